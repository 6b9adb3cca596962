// mask: logits[row, token] = -inf where the mask of the row has no bit for the token; a row without a mask stays as it is.
//
// Updates  logits [rows, vocab] f32
// Reads    masks [rows] i32, the row of `bits` that is a row's mask, or less than 0; bits [masks, words] u32, the lowest bit of a word first
// Grid     x: vocab / 1024, y: rows; Block 256 threads, each four neighbouring tokens
// Moves    4 B for each token taken out

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
mask(float* __restrict__ logits, const int* __restrict__ masks, const uint32_t* __restrict__ bits, uint32_t vocab, uint32_t words) {
    launch_dependents();
    wait_for_previous();
    const int number = masks[blockIdx.y];
    const uint32_t token = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (number < 0 || token >= vocab) return;
    const uint32_t kept = bits[size_t(number) * words + token / 32] >> (token % 32) & 15u;
    if (kept == 15u) return;
    const float out = __int_as_float(0xff800000);
    float* four = logits + size_t(blockIdx.y) * vocab + token;
    if (kept == 0 && vocab % 4 == 0) {
        *reinterpret_cast<float4*>(four) = {out, out, out, out};
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
        if ((kept >> i & 1u) == 0 && token + i < vocab) four[i] = out;
}
