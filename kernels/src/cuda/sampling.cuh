// What both samplers share: sums of integers, limits, and the random number.
#pragma once

#include <stdint.h>

constexpr float kOne = 17592186044416.0f;  // 2^44, what a weight of one is as an integer

__device__ __forceinline__ uint64_t warp_sum_u64(uint64_t x) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

// What reaches a limit: a count exactly, a share of weights as the reference compares it, in double.
struct Limit {
    bool by_weight;
    double at;
    __device__ __forceinline__ bool reached(uint64_t mass) const { return double(mass) >= at; }
};

// Salmon et al. 2011, Philox4x32-10: words 0 and 1 of counter {position, 0, 0, 0}.
__device__ __forceinline__ uint64_t random_bits(uint32_t position, uint32_t key0, uint32_t key1) {
    uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xd2511f53u, c0), low0 = 0xd2511f53u * c0;
        const uint32_t high1 = __umulhi(0xcd9e8d57u, c2), low1 = 0xcd9e8d57u * c2;
        c0 = high1 ^ c1 ^ key0, c1 = low1, c2 = high0 ^ c3 ^ key1, c3 = low0;
        key0 += 0x9e3779b9u, key1 += 0xbb67ae85u;
    }
    return uint64_t(c0) << 32 | c1;
}
