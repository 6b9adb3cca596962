// few_rows: y = x weight^T for few rows of x: the weights pass by once, at the speed of the memory.
//
// Reads    x      [rows, in]  bf16, 16-byte aligned
//          weight [out, in]   bf16, 16-byte aligned
// Writes   y      [rows, out] bf16 or f32; gated: [rows, out / 2] bf16, silu(first half of the outputs) * second half, each rounded first
// Needs    in % 64 == 0; rows <= 8 * kTiles
// Sums in  fp32: within a warp in the order of in, then over the block's warps in order, so equal bits at every run
// Grid     one block per 16 outputs
// Block    8 warps that share the 16 outputs and take turns along `in`, 64 elements each
// Moves    out * in * 2 B: memory-bound up to about 200 rows. out = 28672, in = 4096: 235 MB, 54 us at 4.39 TB/s
// Shared   kDepth turns of weights a warp: each lane's own queue of 16-byte pieces, which no other lane reads
// Method   The tensor cores take weights as the 16-row side and x as the 8-column side. Which `in` index a lane holds does not matter as
//          long as both sides agree, so each lane takes 16 contiguous bytes of a row and no data changes lanes.
//          Weights do not depend on the kernel before: the first kDepth turns are on their way before the wait for it.

#include "gate.cuh"
#include "ptx.cuh"

constexpr int kWarps = 8;
constexpr int kDepth = 4;
constexpr int kStep = 64;                 // elements of `in` a warp takes a turn: 128 bytes of each of 16 rows
constexpr int kTurnBytes = 16 * kStep * 2;  // 2 KiB: four 16-byte pieces a lane

// Asks for a lane's share of the turn at element k: rows g and g + 8, 8 elements at 0 and 8 at 32.
__device__ __forceinline__ void ask(uint32_t to, const bf16* low, const bf16* high, uint32_t k, bool valid) {
    copy_async(to, low + k, valid);
    copy_async(to + 512, low + k + 32, valid);
    copy_async(to + 1024, high + k, valid);
    copy_async(to + 1536, high + k + 32, valid);
    commit_copies();
}

template <int kTiles, bool kGated, typename Out>
__device__ __forceinline__ void few_rows(const bf16* __restrict__ x, const bf16* __restrict__ weight, Out* __restrict__ y,
                                         uint32_t rows, uint32_t out, uint32_t in) {
    extern __shared__ __align__(128) uint8_t shared[];
    launch_dependents();
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint32_t first = blockIdx.x * (kGated ? 8 : 16), turns = in / kStep;
    // Past the last output the row is the last one again; its results are not stored. Gated, eight gates stand beside their eight ups.
    const uint32_t beside = kGated ? out / 2 : 8;
    const bf16* low = weight + size_t(min(first + g, out - 1)) * in + c * 8;
    const bf16* high = weight + size_t(min(first + g + beside, out - 1)) * in + c * 8;
    uint8_t* queue = shared + warp * kDepth * kTurnBytes + lane * 16;
    const uint32_t queue_address = shared_address(queue);

#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
        const uint32_t turn = warp + i * kWarps;
        ask(queue_address + i * kTurnBytes, low, high, min(turn, turns - 1) * kStep, turn < turns);
    }

    wait_for_previous();

    float sums[2][kTiles][4] = {};
    const bf16* x_lane[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) x_lane[t] = x + size_t(min(t * 8 + g, rows - 1)) * in + c * 8;

    uint32_t slot = 0;
    for (uint32_t turn = warp; turn < turns; turn += kWarps) {
        const uint32_t k = turn * kStep;
        bf16x8 b[kTiles][2];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            b[t][0] = *reinterpret_cast<const bf16x8*>(x_lane[t] + k);
            b[t][1] = *reinterpret_cast<const bf16x8*>(x_lane[t] + k + 32);
        }
        wait_for_copies<kDepth - 1>();
        const bf16x8* piece = reinterpret_cast<const bf16x8*>(queue + slot * kTurnBytes);
        const bf16x8 w[2][2] = {{piece[0], piece[32]}, {piece[64], piece[96]}};  // [row g or g + 8][half]
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
#pragma unroll
                for (int t = 0; t < kTiles; ++t)
                    mma(sums[half][t], w[0][half].pairs[2 * pair], w[1][half].pairs[2 * pair], w[0][half].pairs[2 * pair + 1],
                        w[1][half].pairs[2 * pair + 1], b[t][half].pairs[2 * pair], b[t][half].pairs[2 * pair + 1]);
        const uint32_t next = turn + kDepth * kWarps;
        ask(queue_address + slot * kTurnBytes, low, high, min(next, turns - 1) * kStep, next < turns);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
    wait_for_copies<0>();
    __syncthreads();

    // [warp][row of x][output]; rows 17 apart, so that the four lanes of a group write to different banks.
    float* of_warp = reinterpret_cast<float*>(shared);
    constexpr int kRow = 17, kWarpFloats = 8 * kTiles * kRow;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            of_warp[warp * kWarpFloats + (t * 8 + c * 2 + i % 2) * kRow + g + i / 2 * 8] = sums[0][t][i] + sums[1][t][i];
    __syncthreads();
    if constexpr (kGated) {
        for (uint32_t i = threadIdx.x; i < 8 * 8 * kTiles; i += kWarps * 32) {
            const uint32_t row = i / 8, column = i % 8;
            if (row >= rows || first + column >= out / 2) continue;
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                gate += of_warp[w * kWarpFloats + row * kRow + column];
                up += of_warp[w * kWarpFloats + row * kRow + column + 8];
            }
            y[size_t(row) * (out / 2) + first + column] = Out(gated(gate, up));
        }
    } else {
        for (uint32_t i = threadIdx.x; i < 16 * 8 * kTiles; i += kWarps * 32) {
            const uint32_t row = i / 16, column = i % 16;
            if (row >= rows || first + column >= out) continue;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) sum += of_warp[w * kWarpFloats + row * kRow + column];
            y[size_t(row) * out + first + column] = Out(sum);
        }
    }
}

#define FEW_ROWS(name, tiles, gated, type)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, 2)                                                        \
    name(const bf16* x, const bf16* weight, type* y, uint32_t rows, uint32_t out, uint32_t in) {                        \
        few_rows<tiles, gated, type>(x, weight, y, rows, out, in);                                                             \
    }

FEW_ROWS(few_rows_8_bf16, 1, false, bf16)
FEW_ROWS(few_rows_8_f32, 1, false, float)
FEW_ROWS(few_rows_8_gated, 1, true, bf16)
