// moe_combine: y[t] = sum over choices of weights[t][choice] * x[its place], in the order of choices, then gate * shared. To the bits of combine.rs.
//
// Reads    x       [pairs, hidden]  bf16, 16-byte aligned, by expert
//          places  [tokens, top_k] i32: where a token's choices stand in x; weights [tokens, top_k] f32
//          shared  [tokens, hidden] bf16, 16-byte aligned, or null; gate [tokens] f32 or null: its sigmoid is what `shared` counts, else 1
// Writes   y       [tokens, hidden] bf16, 16-byte aligned
// Needs    hidden % 8 == 0
// Sums in  fp32, fused
// Grid     (tokens, hidden / 8 / block rounded up); Block whole warps, each thread 8 neighbouring elements
// Moves    tokens * (top_k + 1) * hidden * 2 B: memory-bound. 4096 tokens, 8 choices, hidden 2048: 151 MB, 34 us at 4.39 TB/s

#include "exp.cuh"
#include "ptx.cuh"

__device__ __forceinline__ void add(float8& sum, float weight, const bf16x8& x) {
    const float8 values = to_float(x);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum.at[j] = __fmaf_rn(weight, values.at[j], sum.at[j]);
}

extern "C" __global__ void __launch_bounds__(256)
moe_combine_bf16(const bf16x8* x, const int* places, const float* weights, const bf16x8* shared, const float* gate, bf16x8* y, uint32_t top_k,
                 uint32_t hidden) {
    launch_dependents();
    wait_for_previous();
    const uint32_t vectors = hidden / 8, i = blockIdx.y * blockDim.x + threadIdx.x, token = blockIdx.x;
    if (i >= vectors) return;
    const int* const of_token = places + size_t(token) * top_k;
    const float* const counts = weights + size_t(token) * top_k;
    float8 sum = {};
    // Four at a time, so that their loads are on their way together.
    uint32_t choice = 0;
    for (; choice + 4 <= top_k; choice += 4) {
        bf16x8 row[4];
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) row[j] = x[size_t(of_token[choice + j]) * vectors + i];
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) add(sum, counts[choice + j], row[j]);
    }
    for (; choice < top_k; ++choice) add(sum, counts[choice], x[size_t(of_token[choice]) * vectors + i]);
    if (shared) {
        const float weight = gate ? __fdiv_rn(1.0f, __fadd_rn(1.0f, exact_exp(-gate[token]))) : 1.0f;
        add(sum, weight, shared[size_t(token) * vectors + i]);
    }
    y[size_t(token) * vectors + i] = to_bf16(sum);
}
