// mask: logits[rows[i], token] = -inf where bits[i] has no bit for the token.
//
// Updates  logits [rows, vocab] f32
// Reads    rows [masked] i32; bits [masked, words] u32, the lowest bit of a word first
// Grid     x: vocab / 256, y: masked rows; Block 256 threads, each one token

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
mask(float* __restrict__ logits, const int* __restrict__ rows, const uint32_t* __restrict__ bits, uint32_t vocab, uint32_t words) {
    launch_dependents();
    wait_for_previous();
    const uint32_t token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= vocab) return;
    const uint32_t word = bits[size_t(blockIdx.y) * words + token / 32];
    if ((word >> (token % 32) & 1u) == 0) logits[size_t(rows[blockIdx.y]) * vocab + token] = __int_as_float(0xff800000);
}
