// map_tokens: out[i] = table[ids[i]], or ids[i] without a table; 0 for what is no row of it.
//
// Reads    ids [n] i32; table [rows] i32, or null
// Writes   out [n] i32
// Grid     one thread per id; Block 256 threads

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
map_tokens(const int* __restrict__ ids, const int* __restrict__ table, int* __restrict__ out, uint32_t n, uint32_t rows) {
    launch_dependents();
    wait_for_previous();
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int id = ids[i];
    out[i] = id < 0 || (table && uint32_t(id) >= rows) ? 0 : table ? table[id] : id;
}
