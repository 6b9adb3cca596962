// e^x with the bits of math.rs, and floats as integers in the same order.
#pragma once

#include <stdint.h>

// As `math::exp`: the same fused multiply-adds in the same order.
__device__ __forceinline__ float exact_exp(float x) {
    const float clamped = x > 88.5f ? 88.5f : x;
    const float rounded = __fmaf_rn(clamped, 1.44269504f, 12582912.0f + 127.0f);
    const float n = __fsub_rn(rounded, 12582912.0f + 127.0f);
    const float r = __fmaf_rn(n, 1.9046543e-9f, __fmaf_rn(n, -0.693147182f, clamped));
    float e = __fmaf_rn(1.3863783e-3f, r, 8.367483e-3f);
    e = __fmaf_rn(e, r, 4.1667238e-2f);
    e = __fmaf_rn(e, r, 0.16666535f);
    e = __fmaf_rn(e, r, 0.5f);
    e = __fmaf_rn(e, r, 1.0f);
    e = __fmaf_rn(e, r, 1.0f);
    return x < -87.336f ? 0.0f : __fmul_rn(e, __uint_as_float(__float_as_uint(rounded) << 23));
}

// Larger floats have larger keys; the two zeros have one. -inf is 0x007fffff, inf 0xff800000, NaNs lie outside.
__device__ __forceinline__ uint32_t key_of(float x) {
    uint32_t bits = __float_as_uint(x);
    if (bits == 0x80000000u) bits = 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float of_key(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }
constexpr uint32_t kKeyMinusInfinity = 0x007fffffu;
constexpr uint32_t kKeyInfinity = 0xff800000u;

// f(index, value) for the elements of a row of f32, by all threads of the block, four loads ahead where the row is 16-byte aligned.
template <typename F>
__device__ __forceinline__ void for_each(const float* row, uint32_t begin, uint32_t end, bool aligned, F f) {
    if (aligned) {
        const float4* vectors = reinterpret_cast<const float4*>(row);
        uint32_t i = begin / 4 + threadIdx.x;
        for (; i + 3 * blockDim.x < end / 4; i += 4 * blockDim.x) {
            float4 v[4];
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) v[j] = vectors[i + j * blockDim.x];
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                const uint32_t at = 4 * (i + j * blockDim.x);
                f(at, v[j].x), f(at + 1, v[j].y), f(at + 2, v[j].z), f(at + 3, v[j].w);
            }
        }
        for (; i < end / 4; i += blockDim.x) {
            const float4 v = vectors[i];
            f(4 * i, v.x), f(4 * i + 1, v.y), f(4 * i + 2, v.z), f(4 * i + 3, v.w);
        }
    } else {
        for (uint32_t i = begin + threadIdx.x; i < end; i += blockDim.x) f(i, row[i]);
    }
}
