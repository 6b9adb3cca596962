// gather_rows: y[i] = x[rows[i]]; a row outside x is its first one.
//
// Reads    x [tokens, row] 16-byte pieces; rows [wanted] i32
// Writes   y [wanted, row] likewise
// Grid     one block per wanted row; Block whole warps, each thread one piece a turn

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(1024)
gather_rows(const bf16x8* __restrict__ x, const int* __restrict__ rows, bf16x8* __restrict__ y, uint32_t tokens, uint32_t row) {
    launch_dependents();
    wait_for_previous();
    const uint32_t wanted = rows[blockIdx.x], from = wanted < tokens ? wanted : 0;
    for (uint32_t i = threadIdx.x; i < row; i += blockDim.x) y[size_t(blockIdx.x) * row + i] = x[size_t(from) * row + i];
}
