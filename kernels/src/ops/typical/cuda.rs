//! On a GPU the rows come to the host and go back: few requests ask for it, and a row is read once.

use super::{TypicalRow, cpu};
use crate::device::cuda::CudaDevice;
use crate::error::Result;
use crate::tensor::Tensor;

pub(super) fn typical(_: &CudaDevice, logits: &mut Tensor, rows: &[TypicalRow]) -> Result<()> {
    for row in rows {
        let mut one = logits.rows_mut(row.row..row.row + 1);
        let mut values = one.to_vec::<f32>()?;
        cpu::typical(&mut values, row.temperature, row.typical_p);
        one.copy_from_slice(&values)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::{TypicalRow, typical};
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, rng};

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(13));
        let logits: Vec<f32> = (0..4 * 5000).map(|_| rng.random_range(-9.0..9.0)).collect();
        let row = |row, typical_p| TypicalRow { row, temperature: 0.8, typical_p };
        let run = |device: &Device| {
            let mut logits = Tensor::from_slice(device, "logits", &logits, [4, 5000]).unwrap();
            typical(&mut logits, &[row(3, 0.9), row(1, 0.2)]).unwrap();
            logits.to_vec::<f32>().unwrap()
        };
        assert_eq!(run(&gpu), run(&Device::Cpu));
    }
}
