// mid_rows: y = x weight^T for up to 128 rows of x: the weights pass by once, each multiprocessor taking an equal share of them.
//
// Reads    x      [rows, in]  bf16, 16-byte aligned
//          weight [out, in]   bf16, 16-byte aligned
// Writes   y      [rows, out] bf16 or f32; gated: [rows, out / 2] bf16, silu(first half of the outputs) * second half, each rounded first
// Scratch  parts    [2 * blocks of the grid][128 * kRows] f32
// Updates  counters [tiles of outputs] u32, zero before and after
// Needs    in % 64 == 0; rows <= kRows; gated: out % 16 == 0
// Sums in  fp32, in the order of in within a part, parts in order; the cut into parts depends on the shape alone, so equal bits at every run
// Grid     one block per multiprocessor. The work is all tiles of 128 outputs, in turns of 64 of in, in a row; each block takes an equal run
//          of it. A tile that spans blocks is put together by whichever of them ends last.
// Block    2 warpgroups, each 64 of the 128 outputs
// Shared   kStages turns of weights and x, under 112 KiB, so that the next kernel's first turns fit beside them
// Moves    out * in * 2 B, and x from L2 once a tile. out = 28672, in = 4096: 235 MB, 54 us at 4.39 TB/s
// Method   Weights are the 64-row side of wgmma, x the other. Weights do not depend on the kernel before: the first turns are on their way
//          before the wait for it.

#include "gate.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

constexpr uint32_t kThreads = 256;
constexpr uint32_t kOut = 128;
constexpr uint32_t kStep = 64;
constexpr uint32_t kWeightBytes = kOut * kStep * 2;
// Shorter runs would wait for their first turn most of the time.
constexpr uint32_t kShortestRun = 8;

// Transposes an 8x8 matrix of bf16 that lies as mma's results do.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
    uint32_t other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
    return other;
}

template <int kRows>
__device__ __forceinline__ void store(const float (&sums)[kRows / 2], bf16* y, uint32_t rows, uint32_t out, uint32_t first) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t pair = transposed(to_pair(sums[j * 4 + half * 2], sums[j * 4 + half * 2 + 1]));
            const uint32_t row = j * 8 + g, output = first + half * 8 + c * 2;
            bf16* to = y + size_t(row) * out + output;
            if (row >= rows) continue;
            if (out % 2 == 0 && output + 1 < out) {
                *reinterpret_cast<uint32_t*>(to) = pair;
            } else {
                if (output < out) to[0] = __float2bfloat16(low_to_float(pair));
                if (output + 1 < out) to[1] = __float2bfloat16(high_to_float(pair));
            }
        }
}

template <int kRows>
__device__ __forceinline__ void store(const float (&sums)[kRows / 2], float* y, uint32_t rows, uint32_t out, uint32_t first) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
        const uint32_t row = i / 4 * 8 + c * 2 + i % 2, output = first + i / 2 % 2 * 8 + g;
        if (row < rows && output < out) y[size_t(row) * out + output] = sums[i];
    }
}

// Eight gates lie beside their eight ups: `first` counts pairs.
template <int kRows>
__device__ __forceinline__ void store_gated(const float (&sums)[kRows / 2], bf16* y, uint32_t rows, uint32_t out, uint32_t first) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
        const uint32_t pair = transposed(to_pair(gated(sums[j * 4], sums[j * 4 + 2]), gated(sums[j * 4 + 1], sums[j * 4 + 3])));
        const uint32_t row = j * 8 + g, output = first + c * 2;
        if (row < rows && output < out) *reinterpret_cast<uint32_t*>(y + size_t(row) * out + output) = pair;
    }
}

template <int kRows, int kStages, bool kGated, typename Out>
__device__ __forceinline__ void mid_rows(const bf16* __restrict__ x, const bf16* __restrict__ weight, Out* __restrict__ y,
                                         float4* __restrict__ parts, uint32_t* __restrict__ counters, uint32_t rows, uint32_t out,
                                         uint32_t in) {
    constexpr uint32_t kStageBytes = kWeightBytes + kRows * kStep * 2;
    constexpr int kVectors = kRows / 8;  // a thread's results, by four
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ bool is_last;
    launch_dependents();

    const uint32_t warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    const uint32_t tiles = (out + kOut - 1) / kOut, steps = in / kStep, total = tiles * steps;
    const uint32_t each = max((total + gridDim.x - 1) / gridDim.x, kShortestRun);
    const uint32_t begin = min(blockIdx.x * each, total), end = min(begin + each, total);
    const uint32_t stages = (shared_address(shared) + 1023) / 1024 * 1024;

    const uint32_t row = threadIdx.x / 8, piece = threadIdx.x % 8, place = row * 128 + ((piece ^ (row % 8)) << 4);
    const auto ask_weights = [&](uint32_t i) {
        if (i >= end) return;
        const uint32_t tile = i / steps, step = i % steps, to = stages + (i - begin) % kStages * kStageBytes + place;
        const bf16* from = weight + step * kStep + piece * 8;
#pragma unroll
        for (uint32_t j = 0; j < kOut / 32; ++j) {
            const uint32_t r = row + j * 32;
            // Gated, a tile is 64 gates and their 64 ups, by eights.
            const uint32_t pair = tile * (kOut / 2) + r / 16 * 8 + r % 8;
            const uint32_t output = kGated ? pair + r / 8 % 2 * (out / 2) : tile * kOut + r;
            const bool valid = kGated ? pair < out / 2 : output < out;
            copy_async(to + j * 32 * 128, from + size_t(valid ? output : 0) * in, valid);
        }
    };
    const auto ask_x = [&](uint32_t i) {
        if (i < end) {
            const uint32_t step = i % steps, to = stages + (i - begin) % kStages * kStageBytes + kWeightBytes + place;
            const bf16* from = x + step * kStep + piece * 8;
#pragma unroll
            for (uint32_t j = 0; j < (kRows + 31) / 32; ++j) {
                const uint32_t r = row + j * 32;
                if (r < kRows) copy_async(to + j * 32 * 128, from + size_t(min(r, rows - 1)) * in, r < rows);
            }
        }
        commit_copies();
    };

#pragma unroll
    for (uint32_t s = 0; s < kStages - 1; ++s) ask_weights(begin + s);
    wait_for_previous();
#pragma unroll
    for (uint32_t s = 0; s < kStages - 1; ++s) ask_x(begin + s);

    float sums[kRows / 2] = {};
    uint32_t part_begin = begin, stage = 0;
    for (uint32_t i = begin; i < end; ++i) {
        wait_for_copies<kStages - 2>();
        publish_to_tensor_cores();
        __syncthreads();
        ask_weights(i + kStages - 1);
        ask_x(i + kStages - 1);

        const uint32_t at = stages + stage * kStageBytes;
        stage = stage + 1 == kStages ? 0 : stage + 1;
        const uint64_t a = tile_descriptor(at + warpgroup * 64 * 128), b = tile_descriptor(at + kWeightBytes);
        begin_products();
#pragma unroll
        for (int k = 0; k < kStep / 16; ++k) wgmma(sums, a + k * kNext16, b + k * kNext16);
        commit_products();
        wait_for_products<0>();

        const uint32_t tile = i / steps, tile_begin = tile * steps;
        const bool tile_ends = i + 1 == tile_begin + steps;
        if (!tile_ends && i + 1 < end) continue;
        const uint32_t first = tile * kOut + warpgroup * 64 + warp * 16;
        bool done = tile_ends && part_begin == tile_begin;
        if (!done) {
            const uint32_t slot = blockIdx.x * 2 + (part_begin == tile_begin);
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
                __stcg(parts + (size_t(slot) * kVectors + j) * kThreads + threadIdx.x,
                       make_float4(sums[j * 4], sums[j * 4 + 1], sums[j * 4 + 2], sums[j * 4 + 3]));
            const uint32_t first_block = tile_begin / each, last_block = (tile_begin + steps - 1) / each;
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) is_last = atomicAdd(counters + tile, 1) == last_block - first_block;
            __syncthreads();
            done = is_last;
            if (done) {
                __threadfence();
#pragma unroll
                for (int j = 0; j < kRows / 2; ++j) sums[j] = 0.0f;
                for (uint32_t block = first_block; block <= last_block; ++block) {
                    const uint32_t theirs = block * 2 + (block == first_block);
#pragma unroll
                    for (int j = 0; j < kVectors; ++j) {
                        const float4 part = __ldcg(parts + (size_t(theirs) * kVectors + j) * kThreads + threadIdx.x);
                        sums[j * 4] += part.x, sums[j * 4 + 1] += part.y, sums[j * 4 + 2] += part.z, sums[j * 4 + 3] += part.w;
                    }
                }
                if (threadIdx.x == 0) counters[tile] = 0;
            }
        }
        if (done) {
            if constexpr (kGated)
                store_gated<kRows>(sums, y, rows, out / 2, first / 2);
            else
                store<kRows>(sums, y, rows, out, first);
        }
#pragma unroll
        for (int j = 0; j < kRows / 2; ++j) sums[j] = 0.0f;
        part_begin = i + 1;
    }
}

#define MID_ROWS(name, rows_, stages, gated, type)                                                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                                     \
    name(const bf16* x, const bf16* weight, type* y, float4* parts, uint32_t* counters, uint32_t rows, uint32_t out, uint32_t in) { \
        mid_rows<rows_, stages, gated, type>(x, weight, y, parts, counters, rows, out, in);                                               \
    }

MID_ROWS(mid_rows_8_bf16, 8, 6, false, bf16)
MID_ROWS(mid_rows_8_f32, 8, 6, false, float)
MID_ROWS(mid_rows_8_gated, 8, 6, true, bf16)
MID_ROWS(mid_rows_16_bf16, 16, 6, false, bf16)
MID_ROWS(mid_rows_16_f32, 16, 6, false, float)
MID_ROWS(mid_rows_16_gated, 16, 6, true, bf16)
MID_ROWS(mid_rows_32_bf16, 32, 5, false, bf16)
MID_ROWS(mid_rows_32_f32, 32, 5, false, float)
MID_ROWS(mid_rows_32_gated, 32, 5, true, bf16)
MID_ROWS(mid_rows_64_bf16, 64, 4, false, bf16)
MID_ROWS(mid_rows_64_f32, 64, 4, false, float)
MID_ROWS(mid_rows_64_gated, 64, 4, true, bf16)
MID_ROWS(mid_rows_128_bf16, 128, 3, false, bf16)
MID_ROWS(mid_rows_128_f32, 128, 3, false, float)
MID_ROWS(mid_rows_128_gated, 128, 3, true, bf16)
