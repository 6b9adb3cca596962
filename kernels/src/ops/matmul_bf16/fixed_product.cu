// fixed_product: y = x weight^T in the order of ordered_product.cuh.
//
// Reads    x       [rows, in]  bf16, 16-byte aligned
//          weight  [out, in]   bf16, 16-byte aligned
// Writes   y       [rows, out] bf16 or f32; gated [rows, out / 2] bf16
// Scratch  parts   [tiles][4][128 * kRows] f32, only where a tile's parts have blocks of their own
// Updates  counters [tiles] u32, zero before and after
// Needs    in % 8 == 0; gated: out % 16 == 0
// Grid     few: a block for each 16 outputs, gates and ups counted. tile: one for each tile; where there are few tiles, each part has a block of its own, and the one
//          that ends last adds them
// Moves    few: out * in * 2 B. tile: 128 + kRows rows of 128 B a turn, from L2; 2 * 128 * kRows * 64 FLOP a turn

#include "ordered_product.cuh"

// Rows of x; past the last it is the last one again, whose results are not stored.
struct RowsOf {
    const bf16* x;
    uint32_t last, in;
    __device__ __forceinline__ const bf16* operator()(uint32_t row) const { return x + size_t(min(row, last)) * in; }
};

#define FEW(name, tiles, depth, gated, type)                                                                                           \
    extern "C" __global__ void __launch_bounds__(kParts * 32)                                                                          \
    name(const bf16* x, const bf16* weight, type* y, uint32_t rows, uint32_t out, uint32_t in) {                                       \
        launch_dependents();                                                                                                          \
        /* Weights do not depend on the kernel before. */                                                                             \
        few<1, tiles, depth, gated>(weight, y, rows, out, in, blockIdx.x * (gated ? 8 : 16), [] { wait_for_previous(); },              \
                                 RowsOf{x, rows - 1, in});                                                                             \
    }
#define TILE(name, rows_, blocks, type)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads, blocks)                                                                      \
    name(const bf16* x, const bf16* weight, type* y, float4* parts, uint32_t* counters, uint32_t rows, uint32_t out, uint32_t in) {     \
        launch_dependents();                                                                                                           \
        const uint32_t out_tiles = (out + kOut - 1) / kOut;                                                                             \
        const TilePlace at(blockIdx.x, (rows + rows_ - 1) / rows_, out_tiles);                                                          \
        const size_t row = size_t(at.row_tile) * rows_;                                                                                 \
        const uint32_t left = rows - at.row_tile * rows_;                                                                               \
        tile<rows_, false, true>(weight, y + row * out, left, out, in, at.out_tile * kOut,                                              \
                                 Split{parts, counters, at.row_tile * out_tiles + at.out_tile}, [] { wait_for_previous(); },            \
                                 RowsOf{x + row * in, left - 1, in});                                                                   \
    }

FEW(fixed_few_8_bf16, 1, 6, false, bf16)
FEW(fixed_few_8_f32, 1, 6, false, float)
FEW(fixed_few_8_gated, 1, 6, true, bf16)
FEW(fixed_few_16_bf16, 2, 6, false, bf16)
FEW(fixed_few_16_f32, 2, 6, false, float)
FEW(fixed_few_16_gated, 2, 6, true, bf16)
TILE(fixed_tile_32_bf16, 32, 2, bf16)
TILE(fixed_tile_32_f32, 32, 2, float)
TILE(fixed_tile_64_bf16, 64, 2, bf16)
TILE(fixed_tile_64_f32, 64, 2, float)
TILE(fixed_tile_128_bf16, 128, 1, bf16)
TILE(fixed_tile_128_f32, 128, 1, float)
