// copy_rows: row `to` of y becomes row `from` of x, pair after pair; x and y may be one tensor.
//
// Reads    x [rows, row] 16-byte pieces
// Writes   y [rows, row] likewise
// Grid     one block per 256 pieces of a row
// Block    256 threads, each one piece of all pairs in order, so that a pair sees what those before it wrote

#include "ptx.cuh"

constexpr uint32_t kMostPairs = 256;

struct Pairs {
    uint32_t num;
    uint32_t from_to[kMostPairs][2];
};

extern "C" __global__ void __launch_bounds__(256) copy_rows(const bf16x8* x, bf16x8* y, uint32_t row, const __grid_constant__ Pairs pairs) {
    launch_dependents();
    wait_for_previous();
    const uint32_t piece = blockIdx.x * blockDim.x + threadIdx.x;
    if (piece >= row) return;
    for (uint32_t i = 0; i < pairs.num; ++i) {
        const uint32_t from = pairs.from_to[i][0], to = pairs.from_to[i][1];
        y[size_t(to) * row + piece] = x[size_t(from) * row + piece];
    }
}
