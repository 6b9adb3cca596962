// add: y += x, in f32, rounded to y's type.
//
// Updates  y [rows, cols] bf16 or f32
// Reads    x [rows, cols] as y
// Grid     one block per row; Block whole warps, each thread one element a turn

#include "ptx.cuh"

template <typename T>
__device__ __forceinline__ void add(T* __restrict__ y, const T* __restrict__ x, uint32_t cols) {
    launch_dependents();
    wait_for_previous();
    const size_t row = size_t(blockIdx.x) * cols;
    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) y[row + i] = T(float(y[row + i]) + float(x[row + i]));
}

extern "C" __global__ void __launch_bounds__(1024) add_bf16(bf16* y, const bf16* x, uint32_t cols) { add(y, x, cols); }
extern "C" __global__ void __launch_bounds__(1024) add_f32(float* y, const float* x, uint32_t cols) { add(y, x, cols); }
