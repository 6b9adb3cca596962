// Sums and maxima over a warp and over a block; every thread gets the result, in an order that never changes.
#pragma once

#include <stdint.h>

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
    return x;
}

// For a block of whole warps, at most 1024 threads. May be called again at once.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[32];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_sum(lane < num_warps ? of_warp[lane] : 0.0f);
}
