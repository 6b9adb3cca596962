// copy_columns: y[t, first..] = x[t].
//
// Reads    x [tokens, of_x] 16-byte pieces
// Writes   y [tokens, of_y] likewise, of_x pieces of each row from `first` on
// Grid     one block per token; each thread 16 bytes a turn

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(1024)
copy_columns(const uint4* __restrict__ x, uint4* __restrict__ y, uint32_t of_x, uint32_t of_y, uint32_t first) {
    launch_dependents();
    wait_for_previous();
    const size_t row = blockIdx.x;
    for (uint32_t i = threadIdx.x; i < of_x; i += blockDim.x) y[row * of_y + first + i] = x[row * of_x + i];
}
