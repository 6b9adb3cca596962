// Vectors of bf16 as they are loaded and stored, and f32 as they are computed with.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;

// Eight neighbouring bf16: one 16-byte access.
struct alignas(16) bf16x8 {
    uint32_t pairs[4];
};

struct float8 {
    float at[8];
};

__device__ __forceinline__ float low_to_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_to_float(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Rounds to nearest, ties to even; the first argument lands in the low half.
__device__ __forceinline__ uint32_t to_pair(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ float8 to_float(const bf16x8& x) {
    float8 y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        y.at[2 * i] = low_to_float(x.pairs[i]);
        y.at[2 * i + 1] = high_to_float(x.pairs[i]);
    }
    return y;
}

__device__ __forceinline__ bf16x8 to_bf16(const float8& x) {
    bf16x8 y;
#pragma unroll
    for (int i = 0; i < 4; ++i) y.pairs[i] = to_pair(x.at[2 * i], x.at[2 * i + 1]);
    return y;
}
