//! The seam for types of weights.

use crate::simd::F32x16;

/// How the weights of 16 outputs lie in lines, and come out of them.
///
/// All bytes zero must decode to zeros: that is what pads outputs and inputs.
///
/// # Safety
/// `decode` must read inside the line.
pub(crate) unsafe trait Format: Send + Sync + 'static {
    /// One weight as a caller gives it.
    type Value: Copy + Send + Sync;

    /// The op, for errors.
    const OP: &'static str;
    /// Whether groups are scaled.
    const SCALED: bool;
    /// Whether something is added to scaled groups.
    const OFFSET: bool;
    /// Whether lines come from far away.
    const PREFETCH: bool = true;
    /// Inputs in a line; divides 8.
    const LINE: usize;
    /// Bytes of a line.
    const LINE_BYTES: usize = 64;
    /// What stands for zero when weights are symmetric.
    const CENTER: f32 = 0.0;
    /// Powers of two to multiply the activations of input `k % 8` by, since `decode` leaves out dividing by them.
    const X_SCALES: [f32; 8] = [1.0; 8];

    /// Writes consecutive inputs of output `lane`, at most `LINE`, to a zeroed line.
    fn encode(line: &mut [u8], lane: usize, values: &[Self::Value]);

    /// The weight of output `lane` and input `j` of a line: the plain counterpart of `decode`, divided by the x scale.
    fn value(line: &[u8], lane: usize, j: usize) -> f32;

    /// Input `J` of all outputs.
    ///
    /// # Safety
    /// `line` must point to a line, and the CPU must have the instructions of `V`.
    unsafe fn decode<V: F32x16, const J: usize>(line: *const u8) -> V;
}
