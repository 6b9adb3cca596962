//! Token ids that a step takes from the one before it, on the device: the host need not have seen them.

mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

const OP: &str = "feed_tokens";

/// What stands in a batch for the token that row `row` of the step before samples.
pub fn sampled_by(row: usize) -> i32 {
    -1 - row as i32
}

/// `ids[t] = sampled[r]` wherever `ids[t]` is [`sampled_by`]`(r)`. A row without a token, `-1`, and one that is not there give 0.
///
/// | argument  | shape      | dtype | |
/// |-----------|------------|-------|-|
/// | `ids`     | `[tokens]` | i32   | read and written |
/// | `sampled` | `[rows]`   | i32   | read |
///
/// # Errors
/// `DType`, `Shape`, `Launch`.
pub fn feed_tokens(ids: &mut Tensor, sampled: &Tensor) -> Result<()> {
    for (arg, tensor) in [("ids", &*ids), ("sampled", sampled)] {
        tensor.expect_dtype(OP, arg, DType::I32)?;
        tensor.expect_shape(OP, arg, [tensor.shape().num_elements()])?;
    }
    match ids.device().clone() {
        Device::Cpu => {
            let sampled = sampled.as_slice::<i32>();
            for id in ids.as_mut_slice::<i32>().iter_mut().filter(|id| **id < 0) {
                *id = sampled.get((-1 - *id) as usize).map_or(0, |&id| id.max(0));
            }
            Ok(())
        }
        Device::Cuda(device) => cuda::feed_tokens(&device, ids, sampled),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_tokens_stay_and_others_come_from_their_row() {
        let vector = |values: &[i32]| Tensor::from_slice(&Device::Cpu, "ids", values, [values.len()]).unwrap();
        let mut ids = vector(&[5, sampled_by(1), 0, sampled_by(0), sampled_by(2), sampled_by(9)]);
        feed_tokens(&mut ids, &vector(&[70, 80, -1])).unwrap();
        assert_eq!(ids.as_slice::<i32>(), [5, 80, 0, 70, 0, 0]);
    }
}
