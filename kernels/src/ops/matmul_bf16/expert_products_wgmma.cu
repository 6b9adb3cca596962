// expert_products_wgmma: expert_products.cu's largest tile by Hopper's products of tiles in shared memory, whose sums are those of mma.sync bit by bit.
//
// Reads, writes, needs, grid    as expert_products.cu
// Block    two warpgroups, each with 64 outputs of 128 and all 128 rows; both copy
// Method   The products of a turn run while the next turn is waited for and its copies are asked for, so a stage is free two turns later.

#include "expert_piece.cuh"
#include "wgmma.cuh"

constexpr uint32_t kWideRows = 128, kWideStages = 6, kWideStageBytes = (kOut + kWideRows) * 128;

template <bool kGated>
__device__ __forceinline__ void tile_of_expert_wgmma(const Experts& of) {
    constexpr uint32_t kOutputs = kOut / (kGated ? 2 : 1);
    begin(of);
    const uint32_t stored = kGated ? of.out / 2 : of.out, in = of.in, turns = (in + kStep - 1) / kStep;
    const Piece piece = find<kWideRows>(of, (stored + kOutputs - 1) / kOutputs);
    if (piece.rows == 0) return;
    const bf16* weight = of.weight + size_t(piece.expert) * of.out * in;
    const uint32_t first = piece.out_tile * kOutputs, rows = piece.rows;
    const RowsOf x_row{of, piece.first, rows - 1};

    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t stages = (shared_address(shared) + 1023) / 1024 * 1024, row = threadIdx.x / 8, piece_of_row = threadIdx.x % 8;
    const uint32_t group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    const bf16 *weights_at[kOut / 32], *x_at[kWideRows / 32];
    // The turns of all parts, part after part; a part may have none, and then those after it have none.
    uint32_t asked_part = 0, asked = 0, asked_stage = 0;
    const auto ask_next = [&](bool weights, bool xs) {
        const bool is_turn = asked < turns && asked_part < kParts;
        const uint32_t to = stages + asked_stage * kWideStageBytes;
        if (weights)
#pragma unroll
            for (uint32_t i = 0; i < kOut / 32; ++i) ask(to + place(row + i * 32, piece_of_row), weights_at[i], asked, piece_of_row, in, is_turn);
        if (xs) {
#pragma unroll
            for (uint32_t i = 0; i < kWideRows / 32; ++i)
                ask(to + kOut * 128 + place(row + i * 32, piece_of_row), x_at[i], asked, piece_of_row, in, is_turn && row + i * 32 < rows);
            commit_copies();
        }
        asked += kParts;
        if (asked >= turns) asked = ++asked_part;
        asked_stage = asked_stage + 1 == kWideStages ? 0 : asked_stage + 1;
    };
#pragma unroll
    for (uint32_t i = 0; i < kOut / 32; ++i) weights_at[i] = weight + size_t(weight_row<kOut, kGated>(first, row + i * 32, of.out)) * in;
    for (uint32_t i = 0; i < kWideStages - 2; ++i) ask_next(true, false);
    wait_for_previous();
#pragma unroll
    for (uint32_t i = 0; i < kWideRows / 32; ++i) x_at[i] = x_row(row + i * 32);
    asked_part = asked = asked_stage = 0;
    for (uint32_t i = 0; i < kWideStages - 2; ++i) ask_next(false, true);

    float total[1][16][4] = {};
    uint32_t stage = 0;
    for (uint32_t part = 0; part < kParts; ++part) {
        float sums[64] = {};
        for (uint32_t turn = part; turn < turns; turn += kParts) {
            wait_for_copies<kWideStages - 3>();
            publish_to_tensor_cores();
            __syncthreads();
            ask_next(true, true);
            const uint32_t at = stages + stage * kWideStageBytes;
            const uint64_t a = tile_descriptor(at + group * 64 * 128), b = tile_descriptor(at + kOut * 128);
            stage = stage + 1 == kWideStages ? 0 : stage + 1;
            begin_products();
#pragma unroll
            for (uint32_t k = 0; k < 4; ++k) wgmma(sums, a + k * kNext16, b + k * kNext16);
            commit_products();
            wait_for_products<1>();
        }
        wait_for_products<0>();
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            asm volatile("" : "+f"(sums[i])::"memory");
            total[0][i / 4][i % 4] = __fadd_rn(total[0][i / 4][i % 4], sums[i]);
        }
    }
    wait_for_copies<0>();
    put_tile<kWideRows, kGated>(total, of.y + size_t(piece.first) * stored, rows, of.out, first, group * 64 + warp * 16, 0);
}

EXPERTS(experts_128_wgmma, kThreads, 1, tile_of_expert_wgmma<false>)
EXPERTS(experts_128_wgmma_gated, kThreads, 1, tile_of_expert_wgmma<true>)
