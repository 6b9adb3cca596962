// expert_products: y[i] = x[row of pair i] (its expert's rows of weight)^T, in the order of ordered_product.cuh: that of fixed_product.cu.
//
// Reads    x       [rows, in]           bf16, 16-byte aligned: a row for each token, or, if pairs is null, for each pair in the order of y
//          weight  [experts * out, in]  bf16, 16-byte aligned, of the experts that have pairs
//          offsets [experts + 1] i32, 16-byte aligned: where each expert's pairs begin; then their number
//          pairs   [pairs] i32, by expert: pair / top_k is its token
// Writes   y       [pairs, out]         bf16; gated: [pairs, out / 2], silu(first half of the outputs) * second half, each rounded first
// Needs    in % 8 == 0
// Grid     a block for each tile of an expert's rows and outputs, as many as there can be whatever was chosen; each finds its own from the
//          offsets, so the host asks for nothing, and those that find none end
// Moves    few: the weights of each chosen expert once for each kRows of its rows, again from L2. tile: as fixed_product.cu

#include "expert_piece.cuh"

template <uint32_t kRows, int kOuts, int kDepth, bool kGated>
__device__ __forceinline__ void few_of_expert(const Experts& of) {
    constexpr uint32_t kOutputs = 16 * kOuts / (kGated ? 2 : 1);
    begin(of);
    const uint32_t stored = kGated ? of.out / 2 : of.out;
    const Piece piece = find<kRows>(of, (stored + kOutputs - 1) / kOutputs);
    of_piece(of, piece, stored, [&](const bf16* weight, bf16* y, const RowsOf& x_row) {
        few<kOuts, kRows / 8, kDepth, kGated>(weight, y, piece.rows, of.out, of.in, piece.out_tile * kOutputs, [] { wait_for_previous(); }, x_row);
    });
}

template <uint32_t kRows, bool kGated>
__device__ __forceinline__ void tile_of_expert(const Experts& of) {
    constexpr uint32_t kOutputs = kOut / (kGated ? 2 : 1);
    begin(of);
    const uint32_t stored = kGated ? of.out / 2 : of.out;
    const Piece piece = find<kRows>(of, (stored + kOutputs - 1) / kOutputs);
    of_piece(of, piece, stored, [&](const bf16* weight, bf16* y, const RowsOf& x_row) {
        tile<kRows, kGated, false>(weight, y, piece.rows, of.out, of.in, piece.out_tile * kOutputs, Split{}, [] { wait_for_previous(); }, x_row);
    });
}

#define FEW(name, rows, outs, depth, blocks)                                                                                           \
    EXPERTS(name, kParts * 32, blocks, (few_of_expert<rows, outs, depth, false>))                                                      \
    EXPERTS(name##_gated, kParts * 32, blocks, (few_of_expert<rows, outs, depth, true>))
#define TILE(name, rows, blocks)                                                                                                       \
    EXPERTS(name, kThreads, blocks, (tile_of_expert<rows, false>))                                                                     \
    EXPERTS(name##_gated, kThreads, blocks, (tile_of_expert<rows, true>))

FEW(experts_8, 8, 2, 3, 3)
FEW(experts_16, 16, 2, 3, 3)
TILE(experts_32, 32, 2)
TILE(experts_64, 64, 2)
