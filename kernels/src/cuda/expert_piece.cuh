// Which rows and weights a block of a product of experts has. For expert_products.cu and expert_products_wgmma.cu, which say what they read and write.
#pragma once

#include "ordered_product.cuh"

// Some neighbouring pairs of one expert; none: rows is 0.
struct Piece {
    uint32_t expert, first, rows, out_tile;
};

// The piece that is the `i`-th of all experts'; by a whole warp. A lane has four neighbouring experts at a time, so that up to 128 take one load.
template <uint32_t kRows>
__device__ __forceinline__ Piece find_by_warp(const int* offsets, uint32_t experts, uint32_t i, uint32_t out_tiles, bool past_l1) {
    constexpr uint32_t kEach = 4;
    const uint32_t lane = threadIdx.x % 32;
    const auto offset = [&](uint32_t expert) -> uint32_t {
        const int* at = offsets + min(expert, experts);
        return past_l1 ? __ldcg(at) : *at;
    };
    for (uint32_t base = 0; base < experts; base += 32 * kEach) {
        const uint32_t own = base + lane * kEach;
        uint32_t begin[kEach + 1], row_tiles[kEach], up_to = 0;
        if (own + kEach - 1 <= experts) {
            const int4* at = reinterpret_cast<const int4*>(offsets + own);
            const int4 four = past_l1 ? __ldcg(at) : *at;
            begin[0] = four.x, begin[1] = four.y, begin[2] = four.z, begin[3] = four.w;
        } else {
#pragma unroll
            for (uint32_t j = 0; j < kEach; ++j) begin[j] = offset(own + j);
        }
        const uint32_t end_of_all = offset(base + 32 * kEach), next = __shfl_down_sync(~0u, begin[0], 1);
        begin[kEach] = lane == 31 ? end_of_all : next;
#pragma unroll
        for (uint32_t j = 0; j < kEach; ++j) {
            row_tiles[j] = (begin[j + 1] - begin[j] + kRows - 1) / kRows;
            up_to += row_tiles[j] * out_tiles;
        }
        const uint32_t count = up_to;
#pragma unroll
        for (uint32_t apart = 1; apart < 32; apart *= 2) {
            const uint32_t before = __shfl_up_sync(~0u, up_to, apart);
            if (lane >= apart) up_to += before;
        }
        const uint32_t reached = __ballot_sync(~0u, i < up_to);
        if (reached) {
            // The first lane that is reached knows which of its four it is.
            const uint32_t at = __ffs(reached) - 1;
            uint32_t inside = i - (up_to - count), expert = own, first = begin[0], end = begin[1], tiles = row_tiles[0];
            bool is_past = false;
#pragma unroll
            for (uint32_t j = 0; j + 1 < kEach; ++j) {
                is_past = (j == 0 || is_past) && inside >= row_tiles[j] * out_tiles;
                if (is_past)
                    inside -= row_tiles[j] * out_tiles, expert += 1, first = begin[j + 1], end = begin[j + 2], tiles = row_tiles[j + 1];
            }
            const TilePlace place(__shfl_sync(~0u, inside, at), __shfl_sync(~0u, tiles, at), out_tiles);
            first = __shfl_sync(~0u, first, at) + place.row_tile * kRows;
            return {__shfl_sync(~0u, expert, at), first, min(kRows, __shfl_sync(~0u, end, at) - first), place.out_tile};
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
    uint32_t are_sorted;  // offsets are as they will be, before this kernel waits
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

// This block's piece. One warp looks for it: blocks by the thousand read the same few lines. Once the kernel has waited, L1 may have them; weights that
// are asked for ahead are found past it, in the few places of L2 where the lines are.
template <uint32_t kRows>
__device__ __forceinline__ Piece find(const Experts& of, uint32_t out_tiles) {
    __shared__ Piece found;
    if (threadIdx.x < 32) {
        const Piece piece = find_by_warp<kRows>(of.offsets, of.experts, blockIdx.x, out_tiles, of.are_sorted);
        if (threadIdx.x == 0) found = piece;
    }
    __syncthreads();
    return found;
}

template <typename Product>
__device__ __forceinline__ void of_piece(const Experts& of, const Piece& piece, uint32_t stored, Product product) {
    if (piece.rows == 0) return;
    product(of.weight + size_t(piece.expert) * of.out * of.in, of.y + size_t(piece.first) * stored, RowsOf{of, piece.first, piece.rows - 1});
}

// Which weights are read depends on the kernels before, but not on the one just before where the pairs are known to be sorted.
__device__ __forceinline__ void begin(const Experts& of) {
    if (!of.are_sorted) wait_for_previous();
    launch_dependents();
}

// A kernel of so many threads, `blocks` on a multiprocessor.
#define EXPERTS(name, threads, blocks, product)                                                                                        \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                                      \
    name(const bf16* x, const bf16* weight, bf16* y, const int* offsets, const int* pairs, uint32_t experts, uint32_t top_k,           \
         uint32_t out, uint32_t in, uint32_t are_sorted) {                                                                             \
        product({x, weight, y, offsets, pairs, experts, top_k, out, in, are_sorted});                                                  \
    }
