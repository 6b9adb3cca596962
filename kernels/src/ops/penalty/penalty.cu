// penalty: biases, then repetition, frequency and presence, on one row of logits.
//
// Updates  logits [vocab] f32
// Reads    list [num_bias + num_seen, 2] u32: tokens with the bits of their biases, then tokens with their counts in the output
// Needs    every token < vocab; a token once among those seen
// Grid     one block; Block 256 threads. A bias may come twice for one token: its thread is found by the token, and goes in order

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
penalty(float* __restrict__ logits, const uint2* __restrict__ list, uint32_t num_bias, uint32_t num_seen, float repetition, float presence,
        float frequency) {
    launch_dependents();
    wait_for_previous();
    for (uint32_t i = 0; i < num_bias; ++i)
        if (list[i].x % blockDim.x == threadIdx.x) logits[list[i].x] += __uint_as_float(list[i].y);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < num_seen; i += blockDim.x) {
        const uint32_t token = list[num_bias + i].x, num_output = list[num_bias + i].y;
        float logit = logits[token];
        logit = logit > 0.0f ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
        logit = __fsub_rn(logit, __fmul_rn(frequency, float(num_output)));
        if (num_output > 0) logit = __fsub_rn(logit, presence);
        logits[token] = logit;
    }
}
