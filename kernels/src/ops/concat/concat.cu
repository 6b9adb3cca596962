// concat: y[t] = [a[t] ; b[t]].
//
// Reads    a, b [tokens, n], 16-byte aligned rows
// Writes   y [tokens, 2n]
// Grid     one block per token; each thread 16 bytes a turn
// Moves    tokens * 4n elements

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(1024)
concat(const uint4* __restrict__ a, const uint4* __restrict__ b, uint4* __restrict__ y, uint32_t pieces) {
    launch_dependents();
    wait_for_previous();
    const size_t row = blockIdx.x;
    for (uint32_t i = threadIdx.x; i < 2 * pieces; i += blockDim.x)
        y[row * 2 * pieces + i] = i < pieces ? a[row * pieces + i] : b[row * pieces + i - pieces];
}
