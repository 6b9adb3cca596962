//! Launches `feed_tokens.cu`.

use super::OP;
use crate::device::cuda::{CudaDevice, Launch};
use crate::error::Result;
use crate::tensor::Tensor;

const THREADS: usize = 256;

pub(super) fn feed_tokens(device: &CudaDevice, ids: &mut Tensor, sampled: &Tensor) -> Result<()> {
    let (tokens, rows) = (ids.shape().num_elements(), sampled.shape().num_elements());
    let args = [ids.into(), sampled.into(), (tokens as u32).into(), (rows as u32).into()];
    // SAFETY: both are vectors of i32, and the kernel looks at no row beyond the last.
    unsafe { Launch::new(tokens.div_ceil(THREADS), THREADS as u32).run(device, OP, "feed_tokens", &args) }
}

#[cfg(test)]
mod tests {
    use super::super::feed_tokens;
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, rng};
    use rand::RngExt;

    #[test]
    #[ignore = "needs a GPU"]
    fn takes_what_the_reference_takes() {
        let (gpu, mut rng) = (gpu(), rng(16));
        let sampled: Vec<i32> = (0..300).map(|_| rng.random_range(-1..128_256)).collect();
        let ids: Vec<i32> = (0..1000).map(|_| rng.random_range(-300..5000)).collect();
        let run = |device: &Device| {
            let sampled = Tensor::from_slice(device, "sampled", &sampled, [sampled.len()]).unwrap();
            let mut ids = Tensor::from_slice(device, "ids", &ids, [ids.len()]).unwrap();
            feed_tokens(&mut ids, &sampled).unwrap();
            ids.to_vec::<i32>().unwrap()
        };
        assert_eq!(run(&gpu), run(&Device::Cpu));
    }
}
