// y = x weight^T whose sums are in an order that `in` alone decides: not the number of rows, nor how the work is shared out. What a block does
// for fixed_product.cu and expert_products.cu.
//
// Order    A turn is 64 elements of `in`, past its end zeros; turn t belongs to part t % 4. A part takes its turns in order, 16 neighbouring
//          elements a step of the tensor cores; then the parts are added in order. Sums in fp32
// Method   The tensor cores take weights as the 16-row side and x as the 8-column side. Two of a kind, which share the order:
//          few    4 warps have 16 kOuts outputs, a part each. For up to 16 rows: the weights pass by once, at the speed of the memory
//          tile   8 warps have a tile of 128 outputs and kRows rows, part after part
//          Gated, half of a block's outputs are gates and the other half their ups, which stand out / 2 below them in the weight; what is
//          stored is silu(gate) * up, both rounded first.
// Needs    in % 8 == 0; x and weight 16-byte aligned
#pragma once

#include "gate.cuh"
#include "ptx.cuh"

constexpr uint32_t kStep = 64;  // elements of `in` of a turn: rows of 128 bytes
constexpr uint32_t kParts = 4;

// Where 16-byte piece `piece` of row `row` of a turn lies: eight rows' pieces of one column are in different banks.
__device__ __forceinline__ uint32_t place(uint32_t row, uint32_t piece) { return row * 128 + ((piece ^ row) % 8) * 16; }

// Copies piece `piece` of a row's turn; zeros past the end of `in` and where there is no turn.
__device__ __forceinline__ void ask(uint32_t to, const bf16* row, uint32_t turn, uint32_t piece, uint32_t in, bool is_turn) {
    const uint32_t k = turn * kStep + piece * 8;
    const bool valid = is_turn && k < in;
    copy_async(to, row + (valid ? k : 0), valid);
}

// Row of the weight that a block's output `i` of `kOutputs` comes from. Past the last output it is the last one again; it is not stored.
template <uint32_t kOutputs, bool kGated>
__device__ __forceinline__ uint32_t weight_row(uint32_t first, uint32_t i, uint32_t out) {
    if constexpr (!kGated) return min(first + i, out - 1);
    const uint32_t half = out / 2, up = i / (kOutputs / 2);
    return up * half + min(first + i % (kOutputs / 2), half - 1);
}

// Outputs of y from `first` on, 16 kOuts, or half of that if gated, of `rows` rows. Row i < rows of x is at x_row(i), which is asked after wait(); for
// the other i < 8 kTiles it may be any address. The weights are asked for before. kDepth turns of each warp are on their way.
template <int kOuts, int kTiles, int kDepth, bool kGated, typename Out, typename Wait, typename XRow>
__device__ __forceinline__ void few(const bf16* weight, Out* y, uint32_t rows, uint32_t out, uint32_t in, uint32_t first, Wait wait, XRow x_row) {
    constexpr uint32_t kOutputs = 16 * kOuts, kWeightBytes = kOutputs * 128, kTurnBytes = kWeightBytes + kTiles * 8 * 128;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, piece = lane % 8, turns = (in + kStep - 1) / kStep;
    const uint32_t queue = shared_address(shared) + warp * kDepth * kTurnBytes;
    const bf16 *weights_at[4 * kOuts], *x_at[2 * kTiles];
#pragma unroll
    for (uint32_t i = 0; i < 4 * kOuts; ++i) weights_at[i] = weight + size_t(weight_row<kOutputs, kGated>(first, lane / 8 + i * 4, out)) * in;
    const auto ask_weights = [&](uint32_t slot, uint32_t turn) {
#pragma unroll
        for (uint32_t i = 0; i < 4 * kOuts; ++i)
            ask(queue + slot * kTurnBytes + place(lane / 8 + i * 4, piece), weights_at[i], turn, piece, in, turn < turns);
    };
    const auto ask_x = [&](uint32_t slot, uint32_t turn) {
#pragma unroll
        for (uint32_t i = 0; i < 2 * kTiles; ++i)
            ask(queue + slot * kTurnBytes + kWeightBytes + place(lane / 8 + i * 4, piece), x_at[i], turn, piece, in,
                turn < turns && lane / 8 + i * 4 < rows);
        commit_copies();
    };
#pragma unroll
    for (uint32_t i = 0; i < kDepth; ++i) ask_weights(i, warp + i * kParts);
    commit_copies();
    wait();
#pragma unroll
    for (uint32_t i = 0; i < 2 * kTiles; ++i) x_at[i] = x_row(lane / 8 + i * 4);
#pragma unroll
    for (uint32_t i = 0; i < kDepth; ++i) ask_x(i, warp + i * kParts);

    float sums[kOuts][kTiles][4] = {};
    uint32_t slot = 0;
    for (uint32_t turn = warp; turn < turns; turn += kParts) {
        wait_for_copies<kDepth - 1>();
        __syncwarp();
        const uint32_t weights = queue + slot * kTurnBytes, xs = weights + kWeightBytes;
#pragma unroll
        for (uint32_t k = 0; k < 4; k += 2) {
            uint32_t a[kOuts][2][4];
#pragma unroll
            for (int o = 0; o < kOuts; ++o) {
                load_matrices(a[o][0], weights + place(o * 16 + lane % 16, k * 2 + lane / 16));
                load_matrices(a[o][1], weights + place(o * 16 + lane % 16, k * 2 + 2 + lane / 16));
            }
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                uint32_t b[4];
                load_matrices(b, xs + place(t * 8 + lane % 8, k * 2 + lane / 8));
#pragma unroll
                for (int o = 0; o < kOuts; ++o) {
                    mma(sums[o][t], a[o][0][0], a[o][0][1], a[o][0][2], a[o][0][3], b[0], b[1]);
                    mma(sums[o][t], a[o][1][0], a[o][1][1], a[o][1][2], a[o][1][3], b[2], b[3]);
                }
            }
        }
        __syncwarp();
        ask_weights(slot, turn + kDepth * kParts);
        ask_x(slot, turn + kDepth * kParts);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
    wait_for_copies<0>();
    __syncthreads();

    // [part][row of x][output]; rows an odd number apart, so that the four lanes of a group write to different banks.
    float* of_part = reinterpret_cast<float*>(shared);
    constexpr uint32_t kRow = kOutputs + 1, kPartFloats = 8 * kTiles * kRow, kStored = kGated ? kOutputs / 2 : kOutputs;
    const uint32_t g = lane / 4, c = lane % 4, stored = kGated ? out / 2 : out;
#pragma unroll
    for (int o = 0; o < kOuts; ++o)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                of_part[warp * kPartFloats + (t * 8 + c * 2 + i % 2) * kRow + o * 16 + g + i / 2 * 8] = sums[o][t][i];
    __syncthreads();
    const auto sum_of = [&](uint32_t row, uint32_t column) {
        float sum = 0.0f;
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part) sum = __fadd_rn(sum, of_part[part * kPartFloats + row * kRow + column]);
        return sum;
    };
    for (uint32_t i = threadIdx.x; i < kStored * 8 * kTiles; i += kParts * 32) {
        const uint32_t row = i / kStored, column = i % kStored;
        if (row >= rows || first + column >= stored) continue;
        float sum = sum_of(row, column);
        if constexpr (kGated) sum = gated(sum, sum_of(row, column + kStored));
        y[size_t(row) * stored + first + column] = Out(sum);
    }
}

constexpr uint32_t kThreads = 256;
constexpr uint32_t kOut = 128;  // outputs of a tile
constexpr uint32_t kStages = 4;
// Tiles of rows that follow each other for each tile of outputs, so that both are found in L2.
constexpr uint32_t kRowTiles = 8;

// Which tile of rows and which of outputs comes `i`-th.
struct TilePlace {
    uint32_t row_tile, out_tile;
    __device__ __forceinline__ TilePlace(uint32_t i, uint32_t row_tiles, uint32_t out_tiles) {
        const uint32_t group = i / (kRowTiles * out_tiles), inside = i % (kRowTiles * out_tiles);
        const uint32_t beside = min(kRowTiles, row_tiles - group * kRowTiles);
        row_tile = group * kRowTiles + inside % beside, out_tile = inside / beside;
    }
};

__device__ __forceinline__ void store_eight(bf16* to, const float* sums) {
    *reinterpret_cast<bf16x8*>(to) =
        bf16x8{to_pair(sums[0], sums[1]), to_pair(sums[2], sums[3]), to_pair(sums[4], sums[5]), to_pair(sums[6], sums[7])};
}
__device__ __forceinline__ void store_eight(float* to, const float* sums) {
    reinterpret_cast<float4*>(to)[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
}

// Where the blocks of a tile, gridDim.y of them, leave their parts for the one that ends last.
struct Split {
    float4* parts;       // [tiles][4][128 * kRows] f32
    uint32_t* counters;  // [tiles], zero before and after
    uint32_t tile;
};

// Stores a tile of sums, of which a warp has 16 kOuts outputs from `warp_out` on and 8 kTiles rows from `warp_row` on.
template <int kRows, bool kGated, int kOuts, int kTiles, typename Out>
__device__ __forceinline__ void put_tile(const float (&total)[kOuts][kTiles][4], Out* y, uint32_t rows, uint32_t out, uint32_t first, uint32_t warp_out,
                                         uint32_t warp_row) {
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t lane = threadIdx.x % 32;
    __syncthreads();
    // [row of x][output], so that stores are of eight neighbouring outputs; rows 132 apart: lanes write to different banks.
    float* sums = reinterpret_cast<float*>(shared);
    constexpr uint32_t kRow = kOut + 4, kStored = kGated ? kOut / 2 : kOut;
    const uint32_t g = lane / 4, c = lane % 4, stored = kGated ? out / 2 : out;
#pragma unroll
    for (int o = 0; o < kOuts; ++o)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[(warp_row + t * 8 + c * 2 + i % 2) * kRow + warp_out + o * 16 + g + i / 2 * 8] = total[o][t][i];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kRows * kStored / 8; i += kThreads) {
        const uint32_t of_row = i / (kStored / 8), column = i % (kStored / 8) * 8, output = first + column;
        if (of_row >= rows || output >= stored) continue;
        float* from = sums + of_row * kRow + column;
        if constexpr (kGated) {
#pragma unroll
            for (uint32_t j = 0; j < 8; ++j) from[j] = gated(from[j], from[j + kStored]);
        }
        Out* to = y + size_t(of_row) * stored + output;
        if (stored % 8 == 0)
            store_eight(to, from);
        else
            for (uint32_t j = 0; j < min(8u, stored - output); ++j) to[j] = Out(from[j]);
    }
}

// Outputs of y from `first` on, 128, or 64 if gated, of `rows` rows. As few(); there may be more than kRows rows, which are left out.
template <int kRows, bool kGated, bool kSplit, typename Out, typename Wait, typename XRow>
__device__ __forceinline__ void tile(const bf16* weight, Out* y, uint32_t rows, uint32_t out, uint32_t in, uint32_t first, const Split& split,
                                     Wait wait, XRow x_row) {
    constexpr uint32_t kWeightBytes = kOut * 128, kStageBytes = kWeightBytes + kRows * 128;
    // Warps stand in rows and columns, each with 16 kOuts outputs and 8 kTiles rows.
    constexpr int kRowWarps = kRows / 64 > 1 ? kRows / 64 : 1, kOutWarps = 8 / kRowWarps;
    constexpr int kOuts = kOut / 16 / kOutWarps, kTiles = kRows / 8 / kRowWarps, kVectors = kOuts * kTiles;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, turns = (in + kStep - 1) / kStep;
    const uint32_t first_part = kSplit ? kParts * blockIdx.y / gridDim.y : 0, end_part = kSplit ? kParts * (blockIdx.y + 1) / gridDim.y : kParts;
    const uint32_t stages = shared_address(shared), row = threadIdx.x / 8, piece = threadIdx.x % 8;

    const bf16 *weights_at[kOut / 32], *x_at[kRows / 32];
#pragma unroll
    for (uint32_t i = 0; i < kOut / 32; ++i) weights_at[i] = weight + size_t(weight_row<kOut, kGated>(first, row + i * 32, out)) * in;
    const auto ask_weights = [&](uint32_t stage, uint32_t turn, bool is_turn) {
#pragma unroll
        for (uint32_t i = 0; i < kOut / 32; ++i) ask(stages + stage * kStageBytes + place(row + i * 32, piece), weights_at[i], turn, piece, in, is_turn);
    };
    const auto ask_x = [&](uint32_t stage, uint32_t turn, bool is_turn) {
#pragma unroll
        for (uint32_t i = 0; i < kRows / 32; ++i)
            ask(stages + stage * kStageBytes + kWeightBytes + place(row + i * 32, piece), x_at[i], turn, piece, in, is_turn && row + i * 32 < rows);
        commit_copies();
    };
    // The turns of all this block's parts, part after part; a part may have none, and then those after it have none.
    uint32_t asked_part = first_part, asked = first_part;
    const auto is_turn = [&] { return asked < turns && asked_part < end_part; };
    const auto next_turn = [&] {
        asked += kParts;
        if (asked >= turns) asked = ++asked_part;
    };
    for (uint32_t stage = 0; stage < kStages - 1; ++stage) {
        ask_weights(stage, asked, is_turn());
        next_turn();
    }
    commit_copies();
    wait();
#pragma unroll
    for (uint32_t i = 0; i < kRows / 32; ++i) x_at[i] = x_row(row + i * 32);
    asked_part = first_part, asked = first_part;
    for (uint32_t stage = 0; stage < kStages - 1; ++stage) {
        ask_x(stage, asked, is_turn());
        next_turn();
    }

    const uint32_t warp_out = warp / kRowWarps * kOuts * 16, warp_row = warp % kRowWarps * kTiles * 8;
    float total[kOuts][kTiles][4] = {};
    uint32_t stage = 0;
    for (uint32_t part = first_part; part < end_part; ++part) {
        float sums[kOuts][kTiles][4] = {};
        for (uint32_t turn = part; turn < turns; turn += kParts) {
            wait_for_copies<kStages - 2>();
            __syncthreads();
            const uint32_t free_stage = stage == 0 ? kStages - 1 : stage - 1;
            ask_weights(free_stage, asked, is_turn());
            ask_x(free_stage, asked, is_turn());
            next_turn();
            const uint32_t weights = stages + stage * kStageBytes, xs = weights + kWeightBytes;
            stage = stage + 1 == kStages ? 0 : stage + 1;
            if (warp_row >= rows) continue;
#pragma unroll
            for (uint32_t k = 0; k < 4; ++k) {
                uint32_t a[kOuts][4];
#pragma unroll
                for (int o = 0; o < kOuts; ++o) load_matrices(a[o], weights + place(warp_out + o * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
                for (int t = 0; t < kTiles; t += 2) {
                    uint32_t b[4];
                    load_matrices(b, xs + place(warp_row + t * 8 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
#pragma unroll
                    for (int o = 0; o < kOuts; ++o) {
                        mma(sums[o][t], a[o][0], a[o][1], a[o][2], a[o][3], b[0], b[1]);
                        mma(sums[o][t + 1], a[o][0], a[o][1], a[o][2], a[o][3], b[2], b[3]);
                    }
                }
            }
        }
#pragma unroll
        for (int o = 0; o < kOuts; ++o)
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                if (kSplit && gridDim.y > 1)
                    __stcg(split.parts + ((size_t(split.tile) * kParts + part) * kVectors + o * kTiles + t) * kThreads + threadIdx.x,
                           make_float4(sums[o][t][0], sums[o][t][1], sums[o][t][2], sums[o][t][3]));
#pragma unroll
                for (int i = 0; i < 4; ++i) total[o][t][i] = __fadd_rn(total[o][t][i], sums[o][t][i]);
            }
    }
    wait_for_copies<0>();
    if (kSplit && gridDim.y > 1) {
        __shared__ bool is_last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicAdd(split.counters + split.tile, 1) + 1 == gridDim.y;
        __syncthreads();
        if (!is_last) return;
        __threadfence();
#pragma unroll
        for (int o = 0; o < kOuts; ++o)
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                float* sum = total[o][t];
                sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
                for (uint32_t part = 0; part < kParts; ++part) {
                    const float4 four =
                        __ldcg(split.parts + ((size_t(split.tile) * kParts + part) * kVectors + o * kTiles + t) * kThreads + threadIdx.x);
                    sum[0] = __fadd_rn(sum[0], four.x), sum[1] = __fadd_rn(sum[1], four.y);
                    sum[2] = __fadd_rn(sum[2], four.z), sum[3] = __fadd_rn(sum[3], four.w);
                }
            }
        if (threadIdx.x == 0) split.counters[split.tile] = 0;
    }
    put_tile<kRows, kGated>(total, y, rows, out, first, warp_out, warp_row);
}
