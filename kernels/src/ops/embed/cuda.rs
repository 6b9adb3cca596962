//! Launches `embed.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

pub(super) fn embed(device: &CudaDevice, table: &Tensor, ids: &Tensor, y: &mut Tensor) -> Result<()> {
    table.expect_dtype(OP, "table", DType::BF16)?;
    y.expect_dtype(OP, "y", DType::BF16)?;
    let (vocab, hidden) = table.rows_cols();
    if !hidden.is_multiple_of(8) {
        return Err(KernelError::NotMultiple { op: OP, what: "hidden", size: hidden, of: 8 });
    }
    let (num_tokens, _) = y.rows_cols();
    let threads = (hidden / 8).next_multiple_of(32).min(1024) as u32;
    let args = [table.into(), ids.into(), y.into(), (vocab as u32).into(), (hidden as u32).into()];
    // SAFETY: `mod.rs` checked the shapes; the kernel skips ids outside the table.
    unsafe { Launch::new(num_tokens, threads).run(device, OP, "embed_bf16", &args) }
}

#[cfg(test)]
mod tests {
    use super::super::embed;
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, random, rng, tensor};
    use half::bf16;

    #[test]
    #[ignore = "needs a GPU"]
    fn finds_the_rows_that_the_reference_finds() {
        let (gpu, mut rng) = (gpu(), rng(3));
        let (vocab, hidden, ids) = (50, 576, [49, 0, 7, 7, 23]);
        let table = random(&mut rng, vocab * hidden, 1.0);
        let run = |device: &Device| {
            let ids = Tensor::from_slice(device, "ids", &ids, [ids.len()]).unwrap();
            let mut y = tensor(device, &[bf16::NAN; 5 * 576], [5, hidden]);
            embed(&tensor(device, &table, [vocab, hidden]), &ids, &mut y).unwrap();
            y.to_vec::<bf16>().unwrap()
        };
        assert_eq!(run(&gpu), run(&Device::Cpu));
    }
}
