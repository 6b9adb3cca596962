// expert_products: y[i] = x[row of pair i] (its expert's rows of weight)^T, in the order of ordered_product.cuh: that of fixed_product.cu.
//
// Reads    x       [rows, in]           bf16, 16-byte aligned: a row for each token, or, if pairs is null, for each pair in the order of y
//          weight  [experts * out, in]  bf16, 16-byte aligned, of the experts that have pairs
//          offsets [experts + 1] i32: where each expert's pairs begin; then their number
//          pairs   [pairs] i32, by expert: pair / top_k is its token
// Writes   y       [pairs, out]         bf16; gated: [pairs, out / 2], silu(first half of the outputs) * second half, each rounded first
// Needs    in % 8 == 0
// Grid     a block for each tile of an expert's rows and outputs, as many as there can be whatever was chosen; each finds its own from the
//          offsets, so the host asks for nothing, and those that find none end
// Moves    few: the weights of each chosen expert once for each kRows of its rows, again from L2. tile: as fixed_product.cu

#include "ordered_product.cuh"

// Some neighbouring pairs of one expert; none: rows is 0.
struct Piece {
    uint32_t expert, first, rows, out_tile;
};

// The piece that is the `i`-th of all experts'; by whole warps, which all find the same.
template <uint32_t kRows>
__device__ __forceinline__ Piece find(const int* offsets, uint32_t experts, uint32_t i, uint32_t out_tiles) {
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t base = 0; base < experts; base += 32) {
        const uint32_t expert = min(base + lane, experts);
        const uint32_t begin = offsets[expert], end = offsets[min(expert + 1, experts)];
        const uint32_t row_tiles = (end - begin + kRows - 1) / kRows, count = row_tiles * out_tiles;
        uint32_t up_to = count;
#pragma unroll
        for (uint32_t apart = 1; apart < 32; apart *= 2) {
            const uint32_t before = __shfl_up_sync(~0u, up_to, apart);
            if (lane >= apart) up_to += before;
        }
        const uint32_t reached = __ballot_sync(~0u, i < up_to);
        if (reached) {
            const uint32_t at = __ffs(reached) - 1;
            const uint32_t inside = i - __shfl_sync(~0u, up_to - count, at);
            const TilePlace place(inside, __shfl_sync(~0u, row_tiles, at), out_tiles);
            const uint32_t first = __shfl_sync(~0u, begin, at) + place.row_tile * kRows;
            return {base + at, first, min(kRows, __shfl_sync(~0u, end, at) - first), place.out_tile};
        }
        i -= __shfl_sync(~0u, up_to, 31);
    }
    return {};
}

struct Experts {
    const bf16 *x, *weight;
    bf16* y;
    const int *offsets, *pairs;
    uint32_t experts, top_k, out, in;
};

// A piece's rows of x; past the last it is the last one again.
struct RowsOf {
    const Experts& of;
    uint32_t first, last;
    __device__ __forceinline__ const bf16* operator()(uint32_t row) const {
        const uint32_t i = first + min(row, last);
        return of.x + size_t(of.pairs ? uint32_t(of.pairs[i]) / of.top_k : i) * of.in;
    }
};

template <uint32_t kRows, bool kGated>
__device__ __forceinline__ void expert_product(const Experts& of) {
    constexpr bool kFew = kRows <= 16;
    constexpr uint32_t kOutputs = (kFew ? 16 : kOut) / (kGated ? 2 : 1);
    launch_dependents();
    // Which weights are read depends on the kernels before.
    wait_for_previous();
    const uint32_t stored = kGated ? of.out / 2 : of.out;
    const Piece piece = find<kRows>(of.offsets, of.experts, blockIdx.x, (stored + kOutputs - 1) / kOutputs);
    if (piece.rows == 0) return;
    const bf16* weight = of.weight + size_t(piece.expert) * of.out * of.in;
    bf16* y = of.y + size_t(piece.first) * stored;
    const RowsOf x_row{of, piece.first, piece.rows - 1};
    if constexpr (kFew)
        few<kRows / 8, 6, kGated>(weight, y, piece.rows, of.out, of.in, piece.out_tile * kOutputs, [] {}, x_row);
    else
        tile<kRows, kGated, false>(weight, y, piece.rows, of.out, of.in, piece.out_tile * kOutputs, Split{}, [] {}, x_row);
}

#define EXPERTS(name, rows, gated, threads, blocks)                                                                                    \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                                      \
    name(const bf16* x, const bf16* weight, bf16* y, const int* offsets, const int* pairs, uint32_t experts, uint32_t top_k,           \
         uint32_t out, uint32_t in) {                                                                                                  \
        expert_product<rows, gated>({x, weight, y, offsets, pairs, experts, top_k, out, in});                                          \
    }

EXPERTS(experts_8, 8, false, kParts * 32, 3)
EXPERTS(experts_16, 16, false, kParts * 32, 2)
EXPERTS(experts_32, 32, false, kThreads, 2)
EXPERTS(experts_64, 64, false, kThreads, 2)
EXPERTS(experts_128, 128, false, kThreads, 1)
EXPERTS(experts_8_gated, 8, true, kParts * 32, 3)
EXPERTS(experts_16_gated, 16, true, kParts * 32, 2)
EXPERTS(experts_32_gated, 32, true, kThreads, 2)
EXPERTS(experts_64_gated, 64, true, kThreads, 2)
EXPERTS(experts_128_gated, 128, true, kThreads, 1)
