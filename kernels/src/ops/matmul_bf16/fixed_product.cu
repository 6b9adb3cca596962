// fixed_product: y = x weight^T whose sums are in an order that `in` alone decides: not the number of rows, nor how the work is shared out.
//
// Reads    x       [rows, in]  bf16, 16-byte aligned
//          weight  [out, in]   bf16, 16-byte aligned
// Writes   y       [rows, out] bf16 or f32
// Scratch  parts   [tiles][4][128 * kRows] f32, only where a tile's parts have blocks of their own
// Updates  counters [tiles] u32, zero before and after
// Needs    in % 8 == 0
// Sums in  fp32. A turn is 64 elements of `in`, past its end zeros; turn t belongs to part t % 4. A part takes its turns in order, 16 neighbouring
//          elements a step of the tensor cores; then the parts are added in order
// Method   The tensor cores take weights as the 16-row side and x as the 8-column side. Two kernels, which share the order:
//          few    4 warps have 16 outputs, a part each. For up to 16 rows: the weights pass by once, at the speed of the memory
//          tile   8 warps have a tile of 128 outputs and kRows rows, part after part. Where there are few tiles, each part has a block of its own
//                 and the one that ends last adds them
//          Weights do not depend on the kernel before: the first turns are on their way before the wait for it.
// Moves    few: out * in * 2 B. tile: 128 + kRows rows of 128 B a turn, from L2; 2 * 128 * kRows * 64 FLOP a turn

#include "ptx.cuh"

constexpr uint32_t kStep = 64;  // elements of `in` of a turn: rows of 128 bytes
constexpr uint32_t kParts = 4;

// Where 16-byte piece `piece` of row `row` of a turn lies: eight rows' pieces of one column are in different banks.
__device__ __forceinline__ uint32_t place(uint32_t row, uint32_t piece) { return row * 128 + ((piece ^ row) % 8) * 16; }

// Copies piece p of a matrix's row; zeros past the end of `in` and where there is no turn.
__device__ __forceinline__ void ask(uint32_t to, const bf16* matrix, uint32_t row, uint32_t last_row, uint32_t turn, uint32_t piece, uint32_t in,
                                    bool is_turn) {
    const uint32_t k = turn * kStep + piece * 8;
    const bool valid = is_turn && k < in;
    copy_async(to, matrix + size_t(min(row, last_row)) * in + (valid ? k : 0), valid);
}

template <int kTiles, int kDepth, typename Out>
__device__ __forceinline__ void few(const bf16* __restrict__ x, const bf16* __restrict__ weight, Out* __restrict__ y, uint32_t rows, uint32_t out,
                                    uint32_t in) {
    constexpr uint32_t kWeightBytes = 16 * 128, kTurnBytes = kWeightBytes + kTiles * 8 * 128;
    extern __shared__ __align__(128) uint8_t shared[];
    launch_dependents();
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * 16, turns = (in + kStep - 1) / kStep;
    const uint32_t queue = shared_address(shared) + warp * kDepth * kTurnBytes;
    // Past the last output the row is the last one again, and so it is with x; their results are not stored.
    const auto ask_weights = [&](uint32_t slot, uint32_t turn) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t row = (lane + i * 32) / 8, piece = lane % 8;
            ask(queue + slot * kTurnBytes + place(row, piece), weight, first + row, out - 1, turn, piece, in, turn < turns);
        }
    };
    const auto ask_x = [&](uint32_t slot, uint32_t turn) {
#pragma unroll
        for (uint32_t i = 0; i < 2 * kTiles; ++i) {
            const uint32_t row = (lane + i * 32) / 8, piece = lane % 8;
            ask(queue + slot * kTurnBytes + kWeightBytes + place(row, piece), x, row, rows - 1, turn, piece, in, turn < turns);
        }
        commit_copies();
    };
#pragma unroll
    for (uint32_t i = 0; i < kDepth; ++i) ask_weights(i, warp + i * kParts);
    commit_copies();
    wait_for_previous();
#pragma unroll
    for (uint32_t i = 0; i < kDepth; ++i) ask_x(i, warp + i * kParts);

    float sums[kTiles][4] = {};
    uint32_t slot = 0;
    for (uint32_t turn = warp; turn < turns; turn += kParts) {
        wait_for_copies<kDepth - 1>();
        __syncwarp();
        const uint32_t weights = queue + slot * kTurnBytes, xs = weights + kWeightBytes;
#pragma unroll
        for (uint32_t k = 0; k < 4; k += 2) {
            uint32_t a[2][4];
            load_matrices(a[0], weights + place(lane % 16, k * 2 + lane / 16));
            load_matrices(a[1], weights + place(lane % 16, k * 2 + 2 + lane / 16));
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                uint32_t b[4];
                load_matrices(b, xs + place(t * 8 + lane % 8, k * 2 + lane / 8));
                mma(sums[t], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
                mma(sums[t], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
            }
        }
        __syncwarp();
        ask_weights(slot, turn + kDepth * kParts);
        ask_x(slot, turn + kDepth * kParts);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
    wait_for_copies<0>();
    __syncthreads();

    // [part][row of x][output]; rows 17 apart, so that the four lanes of a group write to different banks.
    float* of_part = reinterpret_cast<float*>(shared);
    constexpr uint32_t kRow = 17, kPartFloats = 8 * kTiles * kRow;
    const uint32_t g = lane / 4, c = lane % 4;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) of_part[warp * kPartFloats + (t * 8 + c * 2 + i % 2) * kRow + g + i / 2 * 8] = sums[t][i];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 16 * 8 * kTiles; i += kParts * 32) {
        const uint32_t row = i / 16, column = i % 16;
        if (row >= rows || first + column >= out) continue;
        float sum = 0.0f;
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part) sum = __fadd_rn(sum, of_part[part * kPartFloats + row * kRow + column]);
        y[size_t(row) * out + first + column] = Out(sum);
    }
}

constexpr uint32_t kThreads = 256;
constexpr uint32_t kOut = 128;  // outputs of a tile
constexpr uint32_t kStages = 4;
// Tiles of rows that follow each other for each tile of outputs, so that both are found in L2.
constexpr uint32_t kRowTiles = 8;

__device__ __forceinline__ void store_eight(bf16* to, const float* sums) {
    *reinterpret_cast<bf16x8*>(to) =
        bf16x8{to_pair(sums[0], sums[1]), to_pair(sums[2], sums[3]), to_pair(sums[4], sums[5]), to_pair(sums[6], sums[7])};
}
__device__ __forceinline__ void store_eight(float* to, const float* sums) {
    reinterpret_cast<float4*>(to)[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
}

template <int kRows, typename Out>
__device__ __forceinline__ void tile(const bf16* __restrict__ x, const bf16* __restrict__ weight, Out* __restrict__ y, float4* __restrict__ parts,
                                     uint32_t* __restrict__ counters, uint32_t rows, uint32_t out, uint32_t in) {
    constexpr uint32_t kWeightBytes = kOut * 128, kStageBytes = kWeightBytes + kRows * 128;
    // Warps stand in rows and columns, each with 16 kOuts outputs and 8 kTiles rows.
    constexpr int kRowWarps = kRows / 64 > 1 ? kRows / 64 : 1, kOutWarps = 8 / kRowWarps;
    constexpr int kOuts = kOut / 16 / kOutWarps, kTiles = kRows / 8 / kRowWarps, kVectors = kOuts * kTiles;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ bool is_last;
    launch_dependents();
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, turns = (in + kStep - 1) / kStep;
    const uint32_t out_tiles = (out + kOut - 1) / kOut, row_tiles = (rows + kRows - 1) / kRows;
    const uint32_t group = blockIdx.x / (kRowTiles * out_tiles), inside = blockIdx.x % (kRowTiles * out_tiles);
    const uint32_t beside = min(kRowTiles, row_tiles - group * kRowTiles);
    const uint32_t first_row = (group * kRowTiles + inside % beside) * kRows, first_out = inside / beside * kOut;
    const uint32_t first_part = kParts * blockIdx.y / gridDim.y, end_part = kParts * (blockIdx.y + 1) / gridDim.y;
    const uint32_t stages = shared_address(shared);

    const auto ask_weights = [&](uint32_t stage, uint32_t turn, bool is_turn) {
#pragma unroll
        for (uint32_t i = 0; i < kOut / 32; ++i) {
            const uint32_t row = threadIdx.x / 8 + i * 32, piece = threadIdx.x % 8;
            ask(stages + stage * kStageBytes + place(row, piece), weight, first_out + row, out - 1, turn, piece, in, is_turn);
        }
    };
    const auto ask_x = [&](uint32_t stage, uint32_t turn, bool is_turn) {
#pragma unroll
        for (uint32_t i = 0; i < kRows / 32; ++i) {
            const uint32_t row = threadIdx.x / 8 + i * 32, piece = threadIdx.x % 8;
            ask(stages + stage * kStageBytes + kWeightBytes + place(row, piece), x, first_row + row, rows - 1, turn, piece, in, is_turn);
        }
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
    wait_for_previous();
    asked_part = first_part, asked = first_part;
    for (uint32_t stage = 0; stage < kStages - 1; ++stage) {
        ask_x(stage, asked, is_turn());
        next_turn();
    }

    const uint32_t warp_out = warp / kRowWarps * kOuts * 16, warp_row = warp % kRowWarps * kTiles * 8;
    float total[kOuts][kTiles][4] = {};
    uint32_t stage = 0;
    const uint32_t tile_number = first_row / kRows * out_tiles + first_out / kOut;
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
                if (gridDim.y > 1)
                    __stcg(parts + ((size_t(tile_number) * kParts + part) * kVectors + o * kTiles + t) * kThreads + threadIdx.x,
                           make_float4(sums[o][t][0], sums[o][t][1], sums[o][t][2], sums[o][t][3]));
#pragma unroll
                for (int i = 0; i < 4; ++i) total[o][t][i] = __fadd_rn(total[o][t][i], sums[o][t][i]);
            }
    }
    wait_for_copies<0>();
    if (gridDim.y > 1) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) is_last = atomicAdd(counters + tile_number, 1) + 1 == gridDim.y;
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
                    const float4 four = __ldcg(parts + ((size_t(tile_number) * kParts + part) * kVectors + o * kTiles + t) * kThreads + threadIdx.x);
                    sum[0] = __fadd_rn(sum[0], four.x), sum[1] = __fadd_rn(sum[1], four.y);
                    sum[2] = __fadd_rn(sum[2], four.z), sum[3] = __fadd_rn(sum[3], four.w);
                }
            }
        if (threadIdx.x == 0) counters[tile_number] = 0;
    }
    __syncthreads();

    // [row of x][output], so that stores are of eight neighbouring outputs; rows 132 apart: lanes write to different banks.
    float* sums = reinterpret_cast<float*>(shared);
    constexpr uint32_t kRow = kOut + 4;
    const uint32_t g = lane / 4, c = lane % 4;
#pragma unroll
    for (int o = 0; o < kOuts; ++o)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[(warp_row + t * 8 + c * 2 + i % 2) * kRow + warp_out + o * 16 + g + i / 2 * 8] = total[o][t][i];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kRows * kOut / 8; i += kThreads) {
        const uint32_t row = i / (kOut / 8), column = i % (kOut / 8) * 8, output = first_out + column;
        if (first_row + row >= rows || output >= out) continue;
        const float* from = sums + row * kRow + column;
        Out* to = y + size_t(first_row + row) * out + output;
        if (out % 8 == 0)
            store_eight(to, from);
        else
            for (uint32_t j = 0; j < min(8u, out - output); ++j) to[j] = Out(from[j]);
    }
}

#define FEW(name, tiles, depth, type)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kParts * 32)                                                                          \
    name(const bf16* x, const bf16* weight, type* y, uint32_t rows, uint32_t out, uint32_t in) {                                       \
        few<tiles, depth, type>(x, weight, y, rows, out, in);                                                                         \
    }
#define TILE(name, rows_, blocks, type)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads, blocks)                                                                      \
    name(const bf16* x, const bf16* weight, type* y, float4* parts, uint32_t* counters, uint32_t rows, uint32_t out, uint32_t in) {     \
        tile<rows_, type>(x, weight, y, parts, counters, rows, out, in);                                                                \
    }

FEW(fixed_few_8_bf16, 1, 6, bf16)
FEW(fixed_few_8_f32, 1, 6, float)
FEW(fixed_few_16_bf16, 2, 6, bf16)
FEW(fixed_few_16_f32, 2, 6, float)
TILE(fixed_tile_32_bf16, 32, 2, bf16)
TILE(fixed_tile_32_f32, 32, 2, float)
TILE(fixed_tile_64_bf16, 64, 2, bf16)
TILE(fixed_tile_64_f32, 64, 2, float)
TILE(fixed_tile_128_bf16, 128, 1, bf16)
TILE(fixed_tile_128_f32, 128, 1, float)
