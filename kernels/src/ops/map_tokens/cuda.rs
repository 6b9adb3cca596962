//! Launches `map_tokens.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::error::Result;
use crate::tensor::Tensor;

const THREADS: usize = 256;

pub(super) fn map_tokens(device: &CudaDevice, ids: &Tensor, table: Option<&Tensor>, out: &mut Tensor) -> Result<()> {
    let (n, rows) = (ids.shape().num_elements(), table.map_or(0, |table| table.shape().num_elements()));
    let table = table.map_or(0, Tensor::device_address);
    let args = [ids.into(), table.into(), out.into(), (n as u32).into(), (rows as u32).into()];
    // SAFETY: all are vectors of i32, and the kernel looks at no row beyond the last.
    unsafe { Launch::new(n.div_ceil(THREADS), THREADS as u32).run(device, OP, "map_tokens", &args) }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::map_tokens;
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, rng};

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(17));
        let ids: Vec<i32> = (0..700).map(|_| rng.random_range(-3..520)).collect();
        let table: Vec<i32> = (0..500).map(|_| rng.random_range(0..50_000)).collect();
        let run = |device: &Device, has_table: bool| {
            let vector = |values: &[i32]| Tensor::from_slice(device, "v", values, [values.len()]).unwrap();
            let (ids, table, mut out) = (vector(&ids), vector(&table), vector(&[-7; 700]));
            map_tokens(&ids, Some(&table).filter(|_| has_table), &mut out).unwrap();
            out.to_vec::<i32>().unwrap()
        };
        for has_table in [true, false] {
            assert_eq!(run(&gpu, has_table), run(&Device::Cpu, has_table));
        }
    }
}
