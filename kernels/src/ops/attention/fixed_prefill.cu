// fixed_prefill: what prefill.cu does, with the bits of fixed_decode.cu.
//
// Reads    qkv          [tokens, (heads + 2 kv_heads) * kDim] bf16: q first, turned; 16-byte aligned
//          k, v         [blocks, kv_heads, block_size, kDim] bf16, 16-byte aligned
//          no query sees the keys before position first_key, 0 or 1
//          cu_tokens    [seqs + 1] i32, kv_lens [seqs] i32 (this step's tokens included), block_tables [seqs, max_blocks] i32
// Writes   y            [tokens, heads * kDim] bf16, of sequences with at least `least_rows` query rows
// Needs    block_size a multiple of 16
// Sums in  fp32, in the order of cuda/fixed_softmax.cuh
// Grid     (kv heads, sequences, tiles of 128 query rows): the last tiles, which see most keys, come first
// Block    8 warps of 16 query rows, each with one chain of a unit after the other. A row is a query token and one of the heads of the KV head
// Shared   kStages times 64 keys and values of one chain, and what came of each row's units so far: 192 KiB at kDim 128
// Does     4 * kDim FLOP for each query, head and key seen
// Checked  against cpu.rs

#include "fixed_softmax.cuh"

constexpr int kWarps = 8;
constexpr int kRows = 16 * kWarps;
constexpr int kStages = 4;
constexpr uint32_t kTurns = 4;  // of a chain, in a stage

struct Shape {
    uint32_t heads, kv_heads, block_size, max_blocks, qkv_row, least_rows, first_key;
    float scale;  // times log2(e)
};

// A stage's place: chain `chain` of the unit that begins at stretch `unit`, from the unit's stretch `at` on.
struct Cursor {
    uint32_t unit, chain, at, length;

    // Of `stretches` in all; `unit` is past them when there is no more.
    __device__ __forceinline__ void next(uint32_t stretches) {
        if ((at += kTurns) < length) return;
        at = 0;
        if (++chain < kChains) return;
        chain = 0, unit += unit_length(unit);
        length = unit < stretches ? min(unit_length(unit), stretches - unit) : 0;
    }
};

template <int kDim>
__device__ __forceinline__ void prefill(const bf16* __restrict__ qkv, const bf16* __restrict__ k, const bf16* __restrict__ v,
                                        const int* __restrict__ cu_tokens, const int* __restrict__ kv_lens,
                                        const int* __restrict__ block_tables, bf16* __restrict__ y, Shape shape) {
    using T = KeyTile<kDim>;
    constexpr uint32_t kStageBytes = 2 * kTurns * T::kBytes;
    constexpr int kVectors = kDim / 8;
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
    // Row r of the tile sees keys up to before + (first_row + r) / group.
    const uint32_t last_key = before + min(first_row + kRows - 1, rows - 1) / group, stretches = last_key / kStretch + 1;

    const uint32_t stages = shared_address(shared);
    const auto ask = [&](const Cursor& at, uint32_t stage) {
        const uint32_t to = stages + stage * kStageBytes;
#pragma unroll
        for (uint32_t i = 0; i < kTurns * kKeys * T::kPieces / (kWarps * 32); ++i) {
            const uint32_t p = threadIdx.x + i * kWarps * 32, r = p / T::kPieces, piece = p % T::kPieces;
            const uint32_t key = (at.unit + at.at + r / kKeys) * kStretch + at.chain * kKeys + r % kKeys;
            const bool is_there = at.at + r / kKeys < at.length && key < len && key >= shape.first_key;
            const uint32_t block = is_there ? table[key / shape.block_size] : 0;
            const size_t from = ((size_t(block) * shape.kv_heads + head) * shape.block_size + key % shape.block_size) * kDim + piece * 8;
            copy_async(to + T::offset(r, piece), k + from, is_there);
            copy_async(to + kTurns * T::kBytes + T::offset(r, piece), v + from, is_there);
        }
    };
    Cursor asked = {0, 0, 0, min(unit_length(0), stretches)};
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        if (asked.unit < stretches) {
            ask(asked, stage);
            asked.next(stretches);
        }
        commit_copies();
    }

    const uint32_t warp_row = first_row + warp * 16;
    Queries<kDim> queries;
    queries.load(qkv, first_token, shape.qkv_row, group, head, warp_row, rows);
    uint32_t last[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) last[half] = before + min(warp_row + half * 8 + g, rows - 1) / group;
    const uint32_t last_of_warp = before + min(warp_row + 15, rows - 1) / group;

    // What came of the units before, each lane's own.
    float4* of_units = reinterpret_cast<float4*>(shared + kStages * kStageBytes) + threadIdx.x;
    float top_of_units[2], sum_of_units[2];
    uint32_t stage = 0;
    Cursor now = {0, 0, 0, min(unit_length(0), stretches)};
    while (now.unit < stretches) {
        const uint32_t unit = now.unit;
        Softmax<kDim> joined;
#pragma unroll 1
        for (uint32_t chain = 0; chain < kChains; ++chain) {
            Softmax<kDim> softmax;
            softmax.begin();
#pragma unroll 1
            while (now.unit == unit && now.chain == chain) {
                wait_for_copies<kStages - 2>();
                __syncthreads();
                if (asked.unit < stretches) {
                    ask(asked, stage == 0 ? kStages - 1 : stage - 1);
                    asked.next(stretches);
                }
                commit_copies();
                const uint32_t keys = stages + stage * kStageBytes, values = keys + kTurns * T::kBytes;
                for (uint32_t turn = 0; turn < min(kTurns, now.length - now.at); ++turn) {
                    const uint32_t key = (unit + now.at + turn) * kStretch + chain * kKeys;
                    if (key > last_of_warp) break;
                    softmax.see(queries, keys + turn * T::kBytes, values + turn * T::kBytes, key, shape.first_key, last, shape.scale);
                }
                stage = stage + 1 == kStages ? 0 : stage + 1;
                now.next(stretches);
            }
            softmax.end();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (chain == 0) {
                    joined.maximum[half] = softmax.maximum[half], joined.sum[half] = softmax.sum[half];
#pragma unroll
                    for (int d = 0; d < kVectors; ++d)
                        joined.o[d][half * 2] = softmax.o[d][half * 2], joined.o[d][half * 2 + 1] = softmax.o[d][half * 2 + 1];
                    continue;
                }
                const float largest = fmaxf(joined.maximum[half], softmax.maximum[half]);
                const float mine = shrink_to(joined.maximum[half], largest), theirs = shrink_to(softmax.maximum[half], largest);
                joined.sum[half] = join(joined.sum[half], mine, softmax.sum[half], theirs);
                joined.maximum[half] = largest;
#pragma unroll
                for (int d = 0; d < kVectors; ++d)
#pragma unroll
                    for (int j = half * 2; j < half * 2 + 2; ++j) joined.o[d][j] = join(joined.o[d][j], mine, softmax.o[d][j], theirs);
            }
        }
        if (unit > 0) {
            float mine[2], theirs[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float largest = fmaxf(top_of_units[half], joined.maximum[half]);
                mine[half] = shrink_to(top_of_units[half], largest), theirs[half] = shrink_to(joined.maximum[half], largest);
                joined.sum[half] = join(sum_of_units[half], mine[half], joined.sum[half], theirs[half]);
                joined.maximum[half] = largest;
            }
#pragma unroll
            for (int d = 0; d < kVectors; ++d) {
                const float4 four = of_units[d * kWarps * 32];
                const float units[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) joined.o[d][j] = join(units[j], mine[j / 2], joined.o[d][j], theirs[j / 2]);
            }
        }
        if (now.unit < stretches) {
#pragma unroll
            for (int half = 0; half < 2; ++half) top_of_units[half] = joined.maximum[half], sum_of_units[half] = joined.sum[half];
#pragma unroll
            for (int d = 0; d < kVectors; ++d)
                of_units[d * kWarps * 32] = make_float4(joined.o[d][0], joined.o[d][1], joined.o[d][2], joined.o[d][3]);
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t row = warp_row + half * 8 + g;
            if (row >= rows) continue;
            bf16* to = y + size_t(first_token + row / group) * shape.heads * kDim + (head * group + row % group) * kDim;
#pragma unroll
            for (int d = 0; d < kVectors; ++d)
                *reinterpret_cast<uint32_t*>(to + d * 8 + c * 2) =
                    to_pair(__fdiv_rn(joined.o[d][half * 2], joined.sum[half]), __fdiv_rn(joined.o[d][half * 2 + 1], joined.sum[half]));
        }
    }
}

#define PREFILL(dim)                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, 1)                                                                           \
    fixed_prefill_##dim(const bf16* qkv, const bf16* k, const bf16* v, const int* cu_tokens, const int* kv_lens, const int* block_tables,  \
                        bf16* y, uint32_t heads, uint32_t kv_heads, uint32_t block_size, uint32_t max_blocks, uint32_t least_rows,          \
                        uint32_t first_key, float scale) {                                                                                 \
        const Shape shape = {heads, kv_heads, block_size, max_blocks, (heads + 2 * kv_heads) * dim, least_rows, first_key, scale};         \
        prefill<dim>(qkv, k, v, cu_tokens, kv_lens, block_tables, y, shape);                                                               \
    }

PREFILL(64)
PREFILL(96)
PREFILL(128)
