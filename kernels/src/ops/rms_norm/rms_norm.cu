// rms_norm:     y = x / sqrt(mean(x^2) + eps) * weight, row by row.
// rms_norm_pair: y = [norm(a) ; norm(b)], rows of 2 * hidden; the first `rows` blocks take a, the others b.
// add_rms_norm: residual += x; x = residual / sqrt(mean(residual^2) + eps) * weight.
//
// Reads    x        [rows, hidden] bf16, contiguous, 16-byte aligned
//          weight   [hidden]       f32
// Updates  residual [rows, hidden] bf16, likewise; x for add_rms_norm
// Writes   y        [rows, hidden] bf16
// Needs    hidden % 8 == 0
// Sums in  fp32
// Grid     one block per row
// Block    whole warps, each thread 8 neighbouring elements (one 16-byte load) a turn
// Moves    rows * hidden * 2 B * 4 (add_rms_norm): memory-bound. rows = 4096, hidden = 4096: 134 MB, 31 us at 4.3 TB/s
// Source   Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4
// Checked  against cpu.rs

#include "ptx.cuh"
#include "reduce.cuh"

// Eight neighbouring weights.
struct Weights {
    float4 low, high;
    __device__ __forceinline__ Weights(const float4* weight, uint32_t i) : low(weight[2 * i]), high(weight[2 * i + 1]) {}
};

__device__ __forceinline__ bf16x8 scaled(const bf16x8& stored, float scale, const Weights& w) {
    const float8 r = to_float(stored);
    return to_bf16({r.at[0] * scale * w.low.x, r.at[1] * scale * w.low.y, r.at[2] * scale * w.low.z, r.at[3] * scale * w.low.w,
                    r.at[4] * scale * w.high.x, r.at[5] * scale * w.high.y, r.at[6] * scale * w.high.z, r.at[7] * scale * w.high.w});
}

__device__ __forceinline__ float sum_of_squares(const float8& r) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += r.at[j] * r.at[j];
    return sum;
}

// Of each thread's elements the first eight and their weights stay in registers, which is all of a row of up to 8192.
// `load(i)` gives what is normalised, `load_again(i)` gives it once more.
template <typename Load, typename Again>
__device__ __forceinline__ void norm_row(const float4* weight, bf16x8* y, uint32_t vectors, float eps, Load load, Again load_again) {
    launch_dependents();
    // Weights do not depend on the kernel before.
    const bool has_first = threadIdx.x < vectors;
    const Weights weights(weight, has_first ? threadIdx.x : 0);
    wait_for_previous();
    bf16x8 first = {};
    if (has_first) first = load(threadIdx.x);
    float sum = sum_of_squares(to_float(first));
    for (uint32_t i = threadIdx.x + blockDim.x; i < vectors; i += blockDim.x) sum += sum_of_squares(to_float(load(i)));
    const float scale = rsqrtf(block_sum(sum) / (vectors * 8) + eps);
    if (has_first) y[threadIdx.x] = scaled(first, scale, weights);
    for (uint32_t i = threadIdx.x + blockDim.x; i < vectors; i += blockDim.x) y[i] = scaled(load_again(i), scale, Weights(weight, i));
}

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_bf16(const bf16x8* __restrict__ x, const float4* __restrict__ weight, bf16x8* __restrict__ y, uint32_t hidden, float eps) {
    const size_t row = size_t(blockIdx.x) * (hidden / 8);
    const auto load = [&](uint32_t i) { return x[row + i]; };
    norm_row(weight, y + row, hidden / 8, eps, load, load);
}

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_pair_bf16(const bf16x8* __restrict__ a, const bf16x8* __restrict__ b, const float4* __restrict__ weight_a,
                   const float4* __restrict__ weight_b, bf16x8* __restrict__ y, uint32_t rows, uint32_t hidden, float eps) {
    const bool second = blockIdx.x >= rows;
    const size_t row = second ? blockIdx.x - rows : blockIdx.x, vectors = hidden / 8;
    const bf16x8* x = (second ? b : a) + row * vectors;
    const auto load = [&](uint32_t i) { return x[i]; };
    norm_row(second ? weight_b : weight_a, y + (2 * row + second) * vectors, vectors, eps, load, load);
}

extern "C" __global__ void __launch_bounds__(1024)
add_rms_norm_bf16(bf16x8* __restrict__ x, bf16x8* __restrict__ residual, const float4* __restrict__ weight, uint32_t hidden, float eps) {
    const size_t row = size_t(blockIdx.x) * (hidden / 8);
    const auto add = [&](uint32_t i) {
        float8 r = to_float(residual[row + i]);
        const float8 added = to_float(x[row + i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) r.at[j] += added.at[j];
        // Normalise what is stored: the next layer reads the rounded residual, not this fp32 sum.
        return residual[row + i] = to_bf16(r);
    };
    norm_row(weight, x + row, hidden / 8, eps, add, [&](uint32_t i) { return residual[row + i]; });
}
