//! The reference, and all a CPU needs.

use crate::dtype::Float;
use crate::tensor::Tensor;

pub(super) fn add_bias<T: Float>(y: &mut Tensor, bias: &Tensor) {
    let bias = bias.as_slice::<f32>();
    for row in y.as_mut_slice::<T>().chunks_mut(bias.len().max(1)) {
        for (y, &bias) in row.iter_mut().zip(bias) {
            *y = T::from_f32(y.to_f32() + bias);
        }
    }
}
