//! Launches `penalty.cu`.

use super::{OP, Penalties, TokenCount};
use crate::device::Device;
use crate::device::cuda::{CudaDevice, Launch};
use crate::error::Result;
use crate::tensor::Tensor;

/// The lists are few and short: they get memory of their own for the length of the call.
pub(super) fn penalty(
    device: &CudaDevice,
    logits: &mut Tensor,
    penalties: Penalties,
    seen: &[TokenCount],
    bias: &[(u32, f32)],
) -> Result<()> {
    let seen = if penalties == Penalties::NONE { &[] } else { seen };
    let entries = bias.iter().map(|&(token, bias)| [token as i32, bias.to_bits() as i32]);
    let entries = entries.chain(seen.iter().map(|seen| [seen.token as i32, seen.num_output as i32]));
    let list: Vec<i32> = entries.flatten().collect();
    let place: &Device = logits.device();
    let list = Tensor::from_slice(place, "penalties", &list, [bias.len() + seen.len(), 2])?;
    let args = [
        logits.into(),
        (&list).into(),
        (bias.len() as u32).into(),
        (seen.len() as u32).into(),
        penalties.repetition.into(),
        penalties.presence.into(),
        penalties.frequency.into(),
    ];
    // SAFETY: `mod.rs` checked the tokens; the list lives until the stream has passed, for which dropping it waits.
    unsafe { Launch::new(1, 256).run(device, OP, "penalty", &args) }
}

#[cfg(test)]
mod tests {
    use super::super::{Penalties, TokenCount, penalize};
    use crate::device::Device;
    use crate::tensor::Tensor;
    use crate::testing::{gpu, random, rng};

    #[test]
    #[ignore = "needs a GPU"]
    fn equals_the_reference() {
        let (gpu, mut rng) = (gpu(), rng(11));
        let logits: Vec<f32> = random(&mut rng, 5000, 9.0).iter().map(|l| l.to_f32() * 1.001).collect();
        let seen: Vec<TokenCount> = (0..700).map(|i| TokenCount { token: i * 7, num_output: i % 4 }).collect();
        let bias: Vec<(u32, f32)> = (0..300).map(|i| (i * 13 % 1000, i as f32 * 0.1 - 7.0)).collect();
        let penalties = Penalties { repetition: 1.3, presence: 0.7, frequency: 0.11 };
        let run = |device: &Device| {
            let mut logits = Tensor::from_slice(device, "logits", &logits, [1, 5000]).unwrap();
            penalize(&mut logits, penalties, &seen, &bias).unwrap();
            penalize(&mut logits, Penalties::NONE, &seen, &bias[..3]).unwrap();
            logits.to_vec::<f32>().unwrap()
        };
        assert_eq!(run(&gpu), run(&Device::Cpu));
    }
}
