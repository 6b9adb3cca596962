// feed_tokens: where ids[t] is -1 - r, it becomes sampled[r], or 0 if that is negative.
//
// Reads    sampled [rows] i32
// Writes   ids [tokens] i32
// Grid     one thread per token; Block 256 threads

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
feed_tokens(int* __restrict__ ids, const int* __restrict__ sampled, uint32_t tokens, uint32_t rows) {
    launch_dependents();
    wait_for_previous();
    const uint32_t t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= tokens || ids[t] >= 0)
        return;
    const uint32_t row = uint32_t(-1 - ids[t]);
    const int id = row < rows ? sampled[row] : 0;
    ids[t] = id < 0 ? 0 : id;
}
