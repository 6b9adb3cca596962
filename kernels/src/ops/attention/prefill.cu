// prefill: causal attention of many query tokens per sequence over a paged KV cache that holds this step's keys and values already.
//
// Reads    qkv          [tokens, (heads + 2 kv_heads) * kDim] bf16: q first, turned; 16-byte aligned
//          k, v         [blocks, kv_heads, block_size, kDim] bf16, 16-byte aligned
//          no query sees the keys before position first_key, 0 or 1
//          cu_tokens    [seqs + 1] i32, kv_lens [seqs] i32 (this step's tokens included), block_tables [seqs, max_blocks] i32
// Writes   y            [tokens, heads * kDim] bf16, of sequences with at least `least_rows` query rows
// Needs    block_size a multiple of 16
// Sums in  fp32, keys in order, so a query's bits depend on what it sees alone
// Grid     (kv heads, sequences, tiles of 128 query rows): the last tiles, which see most keys, come first
// Block    4 warps of 32 query rows. A row is a query token and one of the heads that share the KV head
// Shared   the tile's queries, and two stages of 64 keys and values: 96 KiB at kDim 128, two blocks a multiprocessor
// Does     4 * kDim FLOP for each query, head and key seen. 16384 tokens, 32 heads of 128: 2.2 TFLOP, 3.1 ms at 700 TFLOP/s
// Source   Dao 2023, arXiv:2307.08691 (FlashAttention-2)
// Checked  against cpu.rs

#include "ptx.cuh"

constexpr int kWarps = 4;
constexpr int kRows = 32 * kWarps;
constexpr int kKeys = 64;
constexpr float kMinusInfinity = -INFINITY;

struct Shape {
    uint32_t heads, kv_heads, block_size, max_blocks, qkv_row, least_rows, first_key;
    float scale;  // times log2(e)
};

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <int kDim>
struct Tile {
    static constexpr int kPieces = kDim / 8;                  // 16-byte pieces of a row
    static constexpr int kRowPieces = kPieces <= 8 ? 8 : 16;  // a power of two, so that the swizzle stays inside
    static constexpr int kQueryBytes = kRows * kRowPieces * 16;
    static constexpr int kKeyBytes = kKeys * kRowPieces * 16;
    static __device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t piece) { return (row * kRowPieces + (piece ^ (row % 8))) * 16; }
};

template <int kDim>
__device__ __forceinline__ void prefill(const bf16* __restrict__ qkv, const bf16* __restrict__ k, const bf16* __restrict__ v,
                                        const int* __restrict__ cu_tokens, const int* __restrict__ kv_lens,
                                        const int* __restrict__ block_tables, bf16* __restrict__ y, Shape shape) {
    using T = Tile<kDim>;
    extern __shared__ __align__(128) uint8_t shared[];
    launch_dependents();
    wait_for_previous();

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint32_t head = blockIdx.x, seq = blockIdx.y, tile = gridDim.z - 1 - blockIdx.z;
    const uint32_t first_token = cu_tokens[seq], tokens = cu_tokens[seq + 1] - first_token;
    const uint32_t group = shape.heads / shape.kv_heads, rows = tokens * group, first_row = tile * kRows;
    if (rows < shape.least_rows || first_row >= rows) return;
    const uint32_t len = kv_lens[seq], before = len - tokens;
    const int* table = block_tables + size_t(seq) * shape.max_blocks;

    const uint32_t queries = shared_address(shared), stages = queries + T::kQueryBytes;
    for (uint32_t p = threadIdx.x; p < kRows * T::kPieces; p += kWarps * 32) {
        const uint32_t r = p / T::kPieces, piece = p % T::kPieces;
        const bool valid = first_row + r < rows;
        const uint32_t row = valid ? first_row + r : 0;
        const bf16* from = qkv + size_t(first_token + row / group) * shape.qkv_row + (head * group + row % group) * kDim + piece * 8;
        copy_async(queries + T::offset(r, piece), from, valid);
    }
    const auto ask = [&](uint32_t at) {
        const uint32_t to = stages + at % 2 * 2 * T::kKeyBytes;
#pragma unroll
        for (uint32_t i = 0; i < kKeys * T::kPieces / (kWarps * 32); ++i) {
            const uint32_t p = threadIdx.x + i * kWarps * 32, r = p / T::kPieces, piece = p % T::kPieces, key = at * kKeys + r;
            const bool valid = key < len && key >= shape.first_key;
            const uint32_t block = valid ? table[key / shape.block_size] : 0;
            const size_t from = ((size_t(block) * shape.kv_heads + head) * shape.block_size + key % shape.block_size) * kDim + piece * 8;
            copy_async(to + T::offset(r, piece), k + from, valid);
            copy_async(to + T::kKeyBytes + T::offset(r, piece), v + from, valid);
        }
    };
    ask(0);
    commit_copies();

    // Row r of the tile sees keys up to before + (first_row + r) / group.
    const uint32_t last_row = min(first_row + kRows - 1, rows - 1), num = (before + last_row / group) / kKeys + 1;
    const uint32_t warp_row = first_row + warp * 32;
    uint32_t last[2][2];
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) last[t][half] = before + (warp_row + t * 16 + half * 8 + g) / group;

    float o[2][kDim / 8][4] = {};
    float maximum[2][2] = {{kMinusInfinity, kMinusInfinity}, {kMinusInfinity, kMinusInfinity}}, sum[2][2] = {};
    for (uint32_t at = 0; at < num; ++at) {
        wait_for_copies<0>();
        __syncthreads();
        if (at + 1 < num) ask(at + 1);
        commit_copies();

        const uint32_t keys = stages + at % 2 * 2 * T::kKeyBytes, values = keys + T::kKeyBytes;
        float s[2][kKeys / 8][4] = {};
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
            uint32_t a[2][4];
#pragma unroll
            for (int t = 0; t < 2; ++t) load_matrices(a[t], queries + T::offset(warp * 32 + t * 16 + lane % 16, d * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                uint32_t b[4];
                load_matrices(b, keys + T::offset(n * 16 + lane / 16 * 8 + lane % 8, d * 2 + lane / 8 % 2));
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    mma(s[t][2 * n], a[t][0], a[t][1], a[t][2], a[t][3], b[0], b[1]);
                    mma(s[t][2 * n + 1], a[t][0], a[t][1], a[t][2], a[t][3], b[2], b[3]);
                }
            }
        }
        if (at < shape.first_key && c == 0)
#pragma unroll
            for (int t = 0; t < 2; ++t) s[t][0][0] = s[t][0][2] = kMinusInfinity;
        if (at * kKeys + kKeys - 1 > before + warp_row / group) {
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (at * kKeys + n * 8 + c * 2 + j % 2 > last[t][j / 2]) s[t][n][j] = kMinusInfinity;
        }
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float largest = maximum[t][half];
#pragma unroll
                for (int n = 0; n < kKeys / 8; ++n) largest = fmaxf(largest, fmaxf(s[t][n][half * 2], s[t][n][half * 2 + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                const float base = largest == kMinusInfinity ? 0.0f : largest * shape.scale;
                const float shrink = power_of_2(maximum[t][half] * shape.scale - base);
                maximum[t][half] = largest;
                float added = 0.0f;
#pragma unroll
                for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float& score = s[t][n][half * 2 + j];
                        score = power_of_2(fmaf(score, shape.scale, -base));
                        added += score;
                    }
                sum[t][half] = sum[t][half] * shrink + added;
#pragma unroll
                for (int d = 0; d < kDim / 8; ++d) o[t][d][half * 2] *= shrink, o[t][d][half * 2 + 1] *= shrink;
            }
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
            uint32_t p[2][4];
#pragma unroll
            for (int t = 0; t < 2; ++t)
#pragma unroll
                for (int j = 0; j < 4; ++j) p[t][j] = to_pair(s[t][2 * n + j / 2][j % 2 * 2], s[t][2 * n + j / 2][j % 2 * 2 + 1]);
#pragma unroll
            for (int d = 0; d < kDim / 16; ++d) {
                uint32_t b[4];
                load_matrices_transposed(b, values + T::offset(n * 16 + lane / 8 % 2 * 8 + lane % 8, d * 2 + lane / 16));
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    mma(o[t][2 * d], p[t][0], p[t][1], p[t][2], p[t][3], b[0], b[1]);
                    mma(o[t][2 * d + 1], p[t][0], p[t][1], p[t][2], p[t][3], b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = sum[t][half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const uint32_t row = warp_row + t * 16 + half * 8 + g;
            if (row >= rows) continue;
            bf16* to = y + size_t(first_token + row / group) * shape.heads * kDim + (head * group + row % group) * kDim;
            const float scale = 1.0f / total;
#pragma unroll
            for (int d = 0; d < kDim / 8; ++d)
                *reinterpret_cast<uint32_t*>(to + d * 8 + c * 2) = to_pair(o[t][d][half * 2] * scale, o[t][d][half * 2 + 1] * scale);
        }
}

#define PREFILL(dim)                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, 2)                                                                     \
    prefill_##dim(const bf16* qkv, const bf16* k, const bf16* v, const int* cu_tokens, const int* kv_lens, const int* block_tables,  \
                  bf16* y, uint32_t heads, uint32_t kv_heads, uint32_t block_size, uint32_t max_blocks, uint32_t least_rows,          \
                  uint32_t first_key, float scale) {                                                                                 \
        const Shape shape = {heads, kv_heads, block_size, max_blocks, (heads + 2 * kv_heads) * dim, least_rows, first_key, scale};   \
        prefill<dim>(qkv, k, v, cu_tokens, kv_lens, block_tables, y, shape);                                                         \
    }

PREFILL(64)
PREFILL(96)
PREFILL(128)
