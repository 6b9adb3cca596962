// fixed_decode: what decode.cu does once queries are turned and the cache is written, with sums whose order positions alone decide.
//
// Reads    qkv          [tokens, (heads + 2 kv_heads) * kDim] bf16: q first, turned; 16-byte aligned
//          k, v         [blocks, kv_heads, block_size, kDim]  bf16, 16-byte aligned
//          no query sees the keys before position first_key, 0 or 1
//          cu_tokens    [seqs + 1] i32, kv_lens [seqs] i32 (this step's tokens included), block_tables [seqs, max_blocks] i32
// Writes   y            [tokens, heads * kDim] bf16
// Updates  counters     [seqs * kv_heads] u32, zero before and after
// Scratch  parts        [capacity + blocks of the grid][16 * kTiles][kDim] f32, maxima_sums [capacity][16 * kTiles][2] f32
// Needs    block_size a multiple of 16. Sequences with more than 16 * kTiles query rows (tokens * heads / kv_heads) are left out
// Sums in  fp32, in the order of cuda/fixed_softmax.cuh, whichever blocks have a pair's units
// Grid     one block per multiprocessor, or two where there are many pairs. The work is all (sequence, kv head) pairs' stretches of 64 keys in a
//          row; each block takes the units that begin in an equal run of it. A pair of several blocks is joined by whichever ends last. If there
//          are more units than `capacity`, a block takes whole pairs
// Block    4 warps, a chain each
// Shared   kStages stretches, K and V
// Moves    kv_lens * kv_heads * kDim * 4 B
// Checked  against cpu.rs

#include "fixed_softmax.cuh"
#include "stretches.cuh"

constexpr int kWarps = kChains;
// A block takes no less than this.
constexpr uint32_t kShortestRun = 4;

struct Shape {
    uint32_t seqs, heads, kv_heads, block_size, max_blocks, qkv_row, most_rows, first_key, capacity;
    float scale;  // times log2(e)
};

// A place in the run of work: stretch `at` of `num` of the pair (seq, head), which begins at `begin`; its first unit is number `unit`.
struct Cursor {
    uint32_t seq, head, at, num, begin, unit;

    __device__ __forceinline__ uint32_t place() const { return begin + at; }

    __device__ __forceinline__ void next_pair(const int* cu_tokens, const int* kv_lens, const Shape& shape) {
        at = 0, begin += num, unit += num_units(num);
        ::next_pair<kStretch>(cu_tokens, kv_lens, shape, seq, head, num);
    }
    __device__ __forceinline__ void next(const int* cu_tokens, const int* kv_lens, const Shape& shape) {
        if (++at == num) next_pair(cu_tokens, kv_lens, shape);
    }
};

// The sum over a warp's lanes at and below this one.
__device__ __forceinline__ uint32_t sum_up_to(uint32_t x) {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, x, apart);
        if (threadIdx.x % 32 >= apart) x += other;
    }
    return x;
}

// The first unit, or the first pair, that begins at stretch `place` of all work or after it; by a whole warp.
__device__ __forceinline__ Cursor find(const int* cu_tokens, const int* kv_lens, uint32_t place, uint32_t total, bool whole_pairs, const Shape& shape) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t before = 0, units_before = 0;
    for (uint32_t base = 0; base < shape.seqs; base += 32) {
        const uint32_t num = num_stretches<kStretch>(cu_tokens, kv_lens, base + lane, shape), units = num_units(num);
        const uint32_t sum = sum_up_to(num), sum_units = sum_up_to(units);
        const uint32_t mine = (before + sum - num) * shape.kv_heads, past = (before + sum) * shape.kv_heads;
        const uint32_t here = __ballot_sync(~0u, mine <= place && place < past);
        if (here) {
            const int who = __ffs(here) - 1;
            const uint32_t seq_begin = __shfl_sync(~0u, mine, who), seq_num = __shfl_sync(~0u, num, who), seq_units = __shfl_sync(~0u, units, who);
            const uint32_t seq_unit = (units_before + __shfl_sync(~0u, sum_units, who) - seq_units) * shape.kv_heads;
            const uint32_t head = (place - seq_begin) / seq_num, at = (place - seq_begin) % seq_num;
            Cursor cursor = {base + who, head, at, seq_num, seq_begin + head * seq_num, seq_unit + head * seq_units};
            const uint32_t begins = unit_begin(at);
            if (begins != at) cursor.at = begins + unit_length(at);
            if (cursor.at >= seq_num || (whole_pairs && cursor.at > 0)) cursor.next_pair(cu_tokens, kv_lens, shape);
            return cursor;
        }
        before += __shfl_sync(~0u, sum, 31);
        units_before += __shfl_sync(~0u, sum_units, 31);
    }
    return {shape.seqs, 0, 0, 1, total, 0};
}

template <int kDim, int kTiles, int kStages>
__device__ __forceinline__ void decode(const bf16* __restrict__ qkv, const bf16* __restrict__ k, const bf16* __restrict__ v,
                                       const int* __restrict__ cu_tokens, const int* __restrict__ kv_lens, const int* __restrict__ block_tables,
                                       bf16* __restrict__ y, float* parts, float* __restrict__ maxima_sums,
                                       uint32_t* __restrict__ counters, Shape shape) {
    using T = KeyTile<kDim>;
    constexpr int kRows = 16 * kTiles;
    constexpr uint32_t kStageBytes = 2 * T::kBytes;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ __align__(16) float joined[kRows][kDim + 4];
    __shared__ float of_warp[2][kWarps][kRows];  // maxima, then sums
    __shared__ float of_pair[2][kRows];
    __shared__ bool is_last;
    launch_dependents();
    wait_for_previous();

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint32_t group = shape.heads / shape.kv_heads;
    uint32_t total = 0, total_units = 0;
    for (uint32_t base = 0; base < shape.seqs; base += 32) {
        const uint32_t num = num_stretches<kStretch>(cu_tokens, kv_lens, base + lane, shape);
        total += __reduce_add_sync(~0u, num);
        total_units += __reduce_add_sync(~0u, num_units(num));
    }
    total *= shape.kv_heads;
    const bool whole_pairs = total_units * shape.kv_heads > shape.capacity;
    const uint32_t each = max((total + gridDim.x - 1) / gridDim.x, kShortestRun);
    Cursor now = find(cu_tokens, kv_lens, min(blockIdx.x * each, total), total, whole_pairs, shape);
    const uint32_t begin = now.place();
    const uint32_t end = find(cu_tokens, kv_lens, min(blockIdx.x * each + each, total), total, whole_pairs, shape).place();
    if (begin >= end) return;

    const uint32_t stages = shared_address(shared) + warp * kStages * kStageBytes;
    const auto ask = [&](const Cursor& at, uint32_t stage, bool valid) {
        const uint32_t key = at.at * kStretch + warp * kKeys;
        if (valid && key < kv_lens[at.seq]) {
            const uint32_t len = kv_lens[at.seq];
            const uint32_t block = block_tables[size_t(at.seq) * shape.max_blocks + key / shape.block_size];
            const size_t row = (size_t(block) * shape.kv_heads + at.head) * shape.block_size + key % shape.block_size;
            const uint32_t to = stages + stage * kStageBytes;
#pragma unroll
            for (uint32_t p = lane; p < kKeys * T::kPieces; p += 32) {
                const uint32_t r = p / T::kPieces, piece = p % T::kPieces;
                const size_t from = (row + r) * kDim + piece * 8;
                // Zeros past the end: their weight is zero, and zero times what lies there must not be NaN.
                const bool is_there = key + r < len && key + r >= shape.first_key;
                copy_async(to + T::offset(r, piece), k + from, is_there);
                copy_async(to + T::kBytes + T::offset(r, piece), v + from, is_there);
            }
        }
        commit_copies();
    };
    Cursor asked = now;
    uint32_t num_asked = begin;
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        ask(asked, stage, num_asked < end);
        if (++num_asked < end) asked.next(cu_tokens, kv_lens, shape);
    }

    // What came of the units before, where all of a pair's are this block's: each lane's own.
    float* of_units = parts + (size_t(shape.capacity) + blockIdx.x) * kRows * kDim;
    Queries<kDim> queries[kTiles];
    Softmax<kDim> softmax[kTiles];
    uint32_t stage = 0;
    for (uint32_t i = begin; i < end; ++i) {
        const uint32_t first_token = cu_tokens[now.seq], tokens = cu_tokens[now.seq + 1] - first_token, rows = tokens * group;
        const uint32_t len = kv_lens[now.seq], unit = unit_begin(now.at);
        if (now.at == unit)
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                queries[t].load(qkv, first_token, shape.qkv_row, group, now.head, t * 16, rows);
                softmax[t].begin();
            }
        ask(asked, stage == 0 ? kStages - 1 : stage - 1, num_asked < end);
        if (++num_asked < end) asked.next(cu_tokens, kv_lens, shape);
        wait_for_copies<kStages - 1>();
        __syncwarp();
        const uint32_t key = now.at * kStretch + warp * kKeys, keys = stages + stage * kStageBytes;
        if (key < len)
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                uint32_t last[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t r = t * 16 + half * 8 + g;
                    // The last key this row sees. A row past the end sees what row 0 does.
                    last[half] = len - tokens + (r < rows ? r / group : 0);
                }
                softmax[t].see(queries[t], keys, keys + T::kBytes, key, shape.first_key, last, shape.scale);
            }
        __syncwarp();
        stage = stage + 1 == kStages ? 0 : stage + 1;

        const bool pair_ends = now.at + 1 == now.num;
        if (pair_ends || unit_begin(now.at + 1) == now.at + 1) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                softmax[t].end();
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (c == 0) {
                        of_warp[0][warp][t * 16 + half * 8 + g] = softmax[t].maximum[half];
                        of_warp[1][warp][t * 16 + half * 8 + g] = softmax[t].sum[half];
                    }
            }
            __syncthreads();
            for (uint32_t w = 0; w < kWarps; ++w) {
                if (warp == w)
#pragma unroll
                    for (int t = 0; t < kTiles; ++t)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const uint32_t r = t * 16 + half * 8 + g;
                            float before = kMinusInfinity;
                            for (uint32_t other = 0; other < w; ++other) before = fmaxf(before, of_warp[0][other][r]);
                            const float mine = softmax[t].maximum[half], largest = fmaxf(before, mine);
                            const float their_shrink = shrink_to(before, largest), my_shrink = shrink_to(mine, largest);
#pragma unroll
                            for (int d = 0; d < kDim / 8; ++d) {
                                float2& place = *reinterpret_cast<float2*>(&joined[r][d * 8 + c * 2]);
                                const float2 o = {softmax[t].o[d][half * 2], softmax[t].o[d][half * 2 + 1]};
                                if (w == 0)
                                    place = o;
                                else
                                    place = {join(place.x, their_shrink, o.x, my_shrink), join(place.y, their_shrink, o.y, my_shrink)};
                            }
                        }
                __syncthreads();
            }
            const bool whole = now.begin >= begin && now.begin + now.num <= end;
            const uint32_t number = num_units(unit + 1) - 1, units = num_units(now.num);
            const auto store = [&](uint32_t r, uint32_t d, float o, float sum) {
                y[size_t(first_token + r / group) * shape.heads * kDim + (now.head * group + r % group) * kDim + d] =
                    __float2bfloat16(__fdiv_rn(o, sum));
            };
            for (uint32_t r = warp; r < rows; r += kWarps) {
                float top = of_warp[0][0][r], sum = of_warp[1][0][r];
#pragma unroll
                for (int w = 1; w < kWarps; ++w) {
                    const float theirs = of_warp[0][w][r], largest = fmaxf(top, theirs);
                    sum = join(sum, shrink_to(top, largest), of_warp[1][w][r], shrink_to(theirs, largest));
                    top = largest;
                }
                if (whole) {
                    // Row r is always this warp's, so what came of the units before needs no barrier.
                    float mine = 0.0f, theirs = 1.0f, all = sum;
                    if (number > 0) {
                        const float before = of_pair[0][r], largest = fmaxf(before, top);
                        mine = shrink_to(before, largest), theirs = shrink_to(top, largest);
                        all = join(of_pair[1][r], mine, sum, theirs);
                        top = largest;
                    }
                    __syncwarp();
                    if (lane == 0) of_pair[0][r] = top, of_pair[1][r] = all;
                    for (uint32_t d = lane; d < kDim; d += 32) {
                        float o = joined[r][d];
                        if (number > 0) o = join(of_units[r * kDim + d], mine, o, theirs);
                        if (pair_ends)
                            store(r, d, o, all);
                        else
                            of_units[r * kDim + d] = o;
                    }
                    __syncwarp();
                } else {
                    const size_t at = size_t(now.unit + number) * kRows + r;
                    for (uint32_t d = lane; d < kDim; d += 32) parts[at * kDim + d] = joined[r][d];
                    if (lane == 0) maxima_sums[at * 2] = top, maxima_sums[at * 2 + 1] = sum;
                }
            }
            if (!whole) {
                __threadfence();
                __syncthreads();
                uint32_t* counter = counters + now.seq * shape.kv_heads + now.head;
                if (threadIdx.x == 0) is_last = atomicAdd(counter, 1) + 1 == units;
                __syncthreads();
                if (is_last) {
                    __threadfence();
                    for (uint32_t r = warp; r < rows; r += kWarps) {
                        float top = kMinusInfinity, sum = 0.0f, o[(kDim + 31) / 32] = {};
                        for (uint32_t other = 0; other < units; ++other) {
                            const size_t at = size_t(now.unit + other) * kRows + r;
                            const float theirs = __ldcg(maxima_sums + at * 2), their_sum = __ldcg(maxima_sums + at * 2 + 1);
                            const float largest = fmaxf(top, theirs), mine = shrink_to(top, largest), their_shrink = shrink_to(theirs, largest);
                            sum = other == 0 ? their_sum : join(sum, mine, their_sum, their_shrink);
#pragma unroll
                            for (int j = 0; j < (kDim + 31) / 32; ++j)
                                if (lane + 32 * j < kDim) {
                                    const float part = __ldcg(parts + at * kDim + lane + 32 * j);
                                    o[j] = other == 0 ? part : join(o[j], mine, part, their_shrink);
                                }
                            top = largest;
                        }
#pragma unroll
                        for (int j = 0; j < (kDim + 31) / 32; ++j)
                            if (lane + 32 * j < kDim) store(r, lane + 32 * j, o[j], sum);
                    }
                    if (threadIdx.x == 0) *counter = 0;
                }
            }
            __syncthreads();
        }
        if (i + 1 < end) now.next(cu_tokens, kv_lens, shape);
    }
}

#define DECODE(dim, tiles, stages, blocks)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, blocks)                                                                        \
    fixed_decode_##dim##_##tiles##_##blocks(const bf16* qkv, const bf16* k, const bf16* v, const int* cu_tokens, const int* kv_lens,          \
                                            const int* block_tables, bf16* y, float* parts, float* maxima_sums, uint32_t* counters,           \
                                            uint32_t seqs, uint32_t heads, uint32_t kv_heads, uint32_t block_size, uint32_t max_blocks,        \
                                            uint32_t first_key, uint32_t capacity, float scale) {                                            \
        const Shape shape = {seqs, heads, kv_heads, block_size, max_blocks, (heads + 2 * kv_heads) * dim, 16 * tiles, first_key, capacity,     \
                             scale};                                                                                                         \
        decode<dim, tiles, stages>(qkv, k, v, cu_tokens, kv_lens, block_tables, y, parts, maxima_sums, counters, shape);                       \
    }

DECODE(64, 1, 4, 1)
DECODE(64, 2, 4, 1)
DECODE(64, 1, 3, 2)
DECODE(96, 1, 4, 1)
DECODE(96, 2, 4, 1)
DECODE(128, 1, 4, 1)
DECODE(128, 2, 4, 1)
DECODE(128, 1, 3, 2)
