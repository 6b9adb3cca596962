// silu_mul: y = silu(gate) * up, silu(g) = g / (1 + exp(-g)).
//
// Reads    gate_up [rows, 2 * inner] bf16, gate first; contiguous, 16-byte aligned
// Writes   y       [rows, inner]     bf16
// Needs    inner % 8 == 0
// Grid     (rows, inner / 8 / 256 rounded up); Block 256 threads, each 8 elements
// Moves    rows * inner * 6 B: memory-bound
// Source   Shazeer 2020, arXiv:2002.05202

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
silu_mul_bf16(const bf16x8* __restrict__ gate_up, bf16x8* __restrict__ y, uint32_t inner) {
    launch_dependents();
    wait_for_previous();
    const uint32_t vectors = inner / 8, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    const size_t row = blockIdx.x;
    const float8 gate = to_float(gate_up[row * 2 * vectors + i]);
    const float8 up = to_float(gate_up[row * 2 * vectors + vectors + i]);
    float8 out;
#pragma unroll
    for (int j = 0; j < 8; ++j) out.at[j] = gate.at[j] / (1.0f + __expf(-gate.at[j])) * up.at[j];
    y[row * vectors + i] = to_bf16(out);
}
