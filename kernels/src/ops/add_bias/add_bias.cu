// add_bias: y[t] += bias, in f32, rounded to y's type.
//
// Updates  y    [tokens, cols] bf16 or f32
// Reads    bias [cols] f32
// Grid     one block per token; Block whole warps, each thread one element a turn

#include "ptx.cuh"

template <typename T>
__device__ __forceinline__ void add_bias(T* __restrict__ y, const float* __restrict__ bias, uint32_t cols) {
    launch_dependents();
    wait_for_previous();
    T* row = y + size_t(blockIdx.x) * cols;
    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) row[i] = T(float(row[i]) + bias[i]);
}

extern "C" __global__ void __launch_bounds__(1024) add_bias_bf16(bf16* y, const float* bias, uint32_t cols) { add_bias(y, bias, cols); }
extern "C" __global__ void __launch_bounds__(1024) add_bias_f32(float* y, const float* bias, uint32_t cols) { add_bias(y, bias, cols); }
