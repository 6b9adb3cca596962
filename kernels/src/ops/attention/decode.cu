// decode: causal attention of a few query tokens per sequence over a paged KV cache, the cache read once. Given cos_sin, the step's
// queries and keys are turned on the way, and its keys and values put into the cache: what rope_kv_write does, without its launch.
//
// Reads    qkv          [tokens, (heads + 2 kv_heads) * kDim] bf16: q first; 16-byte aligned
//          cos_sin      [max_positions, kDim] f32, cosines first; null if queries are turned and the cache is written already
// Updates  k, v         [blocks, kv_heads, block_size, kDim]  bf16, 16-byte aligned; only read without cos_sin
//          no query sees the keys before position first_key, 0 or 1
//          cu_tokens    [seqs + 1] i32, kv_lens [seqs] i32 (this step's tokens included), block_tables [seqs, max_blocks] i32
// Writes   y            [tokens, heads * kDim] bf16
// Updates  counters     [seqs * kv_heads] u32, zero before and after
// Scratch  parts        [2 * blocks of the grid][16 * kTiles][kDim] f32, maxima_sums [2 * blocks of the grid][16 * kTiles][2] f32
// Needs    block_size a multiple of 16. Sequences with more than 16 * kTiles query rows (tokens * heads / kv_heads) are left out
// Sums in  fp32; the cut into parts depends on kv_lens alone and parts are added in order, so equal bits at every run
// Grid     one block per multiprocessor, or two where many pairs end, since a block that puts a pair together loads nothing. The work is all (sequence, kv head) pairs' stretches of 64 keys in a row; each block takes an
//          equal run of it. A pair that spans blocks is put together by whichever of them ends last.
// Block    4 warps; each takes 16 of a stretch's 64 keys and keeps a softmax of its own until the pair ends
// Shared   kStages stretches, K and V: 128 KiB at kDim 128 and 4 stages, so that a few_rows block fits beside it; 96 at 3
// Moves    kv_lens * kv_heads * kDim * 4 B. 64 sequences of 4096, 8 kv heads of 128: 1.07 GB, 245 us at 4.39 TB/s
// Source   Dao 2022, arXiv:2205.14135 (online softmax); split over keys as in Flash-Decoding, 2023
// Checked  against cpu.rs

#include "ptx.cuh"
#include "reduce.cuh"
#include "stretches.cuh"

constexpr int kWarps = 4;
constexpr int kKeys = 16;                 // of a warp's turn
constexpr int kStretch = kWarps * kKeys;  // of a block's turn
// A block takes no less than this, since putting parts together would cost more; and a pair no longer than kWhole stays whole where there
// is a block for each.
constexpr uint32_t kShortestRun = 4;
constexpr uint32_t kWhole = 8;
constexpr float kMinusInfinity = -INFINITY;

struct Shape {
    uint32_t seqs, heads, kv_heads, block_size, max_blocks, qkv_row, most_rows, first_key;
    float scale;  // times log2(e)
};

// A place in the run of work: stretch `at` of `num` of the pair (seq, head).
struct Cursor {
    uint32_t seq, head, at, num;

    __device__ __forceinline__ void next(const int* cu_tokens, const int* kv_lens, const Shape& shape) {
        if (++at < num) return;
        at = 0;
        ::next_pair<kStretch>(cu_tokens, kv_lens, shape, seq, head, num);
    }
};

// All stretches, the first of this block's run, and how many each block takes.
struct Run {
    uint32_t total, each, begin, end;
    Cursor start;
    uint32_t pair_begin;  // where in the run of work the start's pair begins
};

// Every warp finds the same answer for itself.
__device__ __forceinline__ Run find_run(const int* cu_tokens, const int* kv_lens, const Shape& shape) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t total = 0, longest = 0;
    for (uint32_t base = 0; base < shape.seqs; base += 32) {
        const uint32_t s = base + lane;
        const uint32_t num = num_stretches<kStretch>(cu_tokens, kv_lens, s, shape);
        total += __reduce_add_sync(~0u, num);
        longest = max(longest, __reduce_max_sync(~0u, num));
    }
    Run run;
    if (longest <= kWhole && shape.seqs * shape.kv_heads <= gridDim.x) {
        const uint32_t seq = blockIdx.x / shape.kv_heads, num = num_stretches<kStretch>(cu_tokens, kv_lens, seq, shape);
        run = {total * shape.kv_heads, kWhole, 0, num, {seq, blockIdx.x % shape.kv_heads, 0, num}, 0};
        return run;
    }
    run.total = total * shape.kv_heads;
    run.each = max((run.total + gridDim.x - 1) / gridDim.x, kShortestRun);
    run.begin = min(blockIdx.x * run.each, run.total);
    run.end = min(run.begin + run.each, run.total);
    uint32_t before = 0;
    run.start = {shape.seqs, 0, 0, 1};
    run.pair_begin = 0;
    for (uint32_t base = 0; base < shape.seqs; base += 32) {
        const uint32_t s = base + lane;
        const uint32_t num = num_stretches<kStretch>(cu_tokens, kv_lens, s, shape);
        uint32_t sum = num;
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, apart);
            if (lane >= apart) sum += other;
        }
        const uint32_t mine = (before + sum - num) * shape.kv_heads, past = (before + sum) * shape.kv_heads;
        const uint32_t here = __ballot_sync(~0u, mine <= run.begin && run.begin < past);
        if (here) {
            const int who = __ffs(here) - 1;
            const uint32_t seq_begin = __shfl_sync(~0u, mine, who), seq_num = __shfl_sync(~0u, num, who);
            const uint32_t inside = run.begin - seq_begin;
            run.start = {base + who, inside / seq_num, inside % seq_num, seq_num};
            run.pair_begin = seq_begin + inside / seq_num * seq_num;
            break;
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    return run;
}

template <int kDim>
struct Tile {
    static constexpr int kPieces = kDim / 8;                       // 16-byte pieces of a row
    static constexpr int kRowPieces = kPieces <= 8 ? 8 : 16;       // a power of two, so that the swizzle stays inside
    static constexpr int kBytes = kKeys * kRowPieces * 16;         // K or V of a warp's turn
    static constexpr int kStageBytes = 2 * kBytes;
    // Rows eight apart share banks; the swizzle moves each row's pieces so that eight rows of a column do not.
    static __device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t piece) {
        return (row * kRowPieces + (piece ^ (row % 8))) * 16;
    }
};

template <int kDim, int kTiles, int kStages>
__device__ __forceinline__ void decode(const bf16* __restrict__ qkv, bf16* __restrict__ k, bf16* __restrict__ v,
                                       const float* __restrict__ cos_sin, const int* __restrict__ cu_tokens, const int* __restrict__ kv_lens,
                                       const int* __restrict__ block_tables, bf16* __restrict__ y, float* __restrict__ parts,
                                       float* __restrict__ maxima_sums, uint32_t* __restrict__ counters, Shape shape) {
    using T = Tile<kDim>;
    constexpr int kRows = 16 * kTiles;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ __align__(16) float merged[kRows][kDim + 4];
    __shared__ float of_warp[2][kWarps][kRows];  // maxima, then sums
    __shared__ bool is_last;

    launch_dependents();
    // With cos_sin no kernel of this step writes what is read of the cache, and `embed` lets none begin before the step's numbers
    // are there: so keys and values set out before the kernel ahead has ended.
    if (!cos_sin) wait_for_previous();

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint32_t group = shape.heads / shape.kv_heads;
    const Run run = find_run(cu_tokens, kv_lens, shape);

    const uint32_t stages = shared_address(shared) + warp * kStages * T::kStageBytes;
    const auto ask = [&](const Cursor& at, uint32_t stage, bool valid) {
        if (valid) {
            const uint32_t key = at.at * kStretch + warp * kKeys;
            // This step's own keys are not in the cache yet; they are put in place below.
            const uint32_t len = kv_lens[at.seq] - (cos_sin ? cu_tokens[at.seq + 1] - cu_tokens[at.seq] : 0);
            if (key < kv_lens[at.seq]) {
                const uint32_t block = block_tables[size_t(at.seq) * shape.max_blocks + key / shape.block_size];
                const size_t row = (size_t(block) * shape.kv_heads + at.head) * shape.block_size + key % shape.block_size;
                const uint32_t to = stages + stage * T::kStageBytes;
#pragma unroll
                for (uint32_t p = lane; p < kKeys * T::kPieces; p += 32) {
                    const uint32_t r = p / T::kPieces, piece = p % T::kPieces;
                    const size_t from = (row + r) * kDim + piece * 8;
                    // Zeros past the end: their weight is zero, and zero times what lies there must not be NaN.
                    const bool valid = key + r < len && key + r >= shape.first_key;
                    copy_async(to + T::offset(r, piece), k + from, valid);
                    copy_async(to + T::kBytes + T::offset(r, piece), v + from, valid);
                }
            }
        }
        commit_copies();
    };

    Cursor asked = run.start, now = run.start;
    uint32_t num_asked = run.begin;
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        ask(asked, stage, num_asked < run.end);
        if (++num_asked < run.end) asked.next(cu_tokens, kv_lens, shape);
    }
    if (cos_sin) wait_for_previous();
    if (run.begin >= run.end) return;

    uint32_t q[kTiles][kDim / 16][4];
    float o[kTiles][kDim / 8][4];
    float maximum[kTiles][2], sum[kTiles][2];
    uint32_t stage = 0, pair_begin = run.pair_begin, part_begin = run.begin;

    for (uint32_t i = run.begin; i < run.end; ++i) {
        const uint32_t first_token = cu_tokens[now.seq], tokens = cu_tokens[now.seq + 1] - first_token, rows = tokens * group;
        const uint32_t len = kv_lens[now.seq];
        // The lower half of a tile of 16 is empty. Then nothing is done for it, and two warps at once may put their outputs down.
        const bool narrow = kTiles == 1 && rows <= 8;
        if (i == part_begin) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                // Row r of the tile is query token r / group, head r % group of the kv head's. Past the last row: row 0, not stored.
                const bf16* row[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t r = t * 16 + half * 8 + g < rows ? t * 16 + half * 8 + g : 0;
                    row[half] = qkv + size_t(first_token + r / group) * shape.qkv_row + (now.head * group + r % group) * kDim;
                }
#pragma unroll
                for (int d = 0; d < kDim / 16; ++d)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        q[t][d][j] = narrow && j % 2 ? 0 : *reinterpret_cast<const uint32_t*>(row[j % 2] + d * 16 + c * 2 + j / 2 * 8);
                if (cos_sin)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        if (narrow && j % 2) continue;
                        const uint32_t r = t * 16 + j % 2 * 8 + g < rows ? t * 16 + j % 2 * 8 + g : 0;
                        const float* cosines = cos_sin + size_t(len - tokens + r / group) * kDim + c * 2 + j / 2 * 8;
#pragma unroll
                        for (int d = 0; d < kDim / 32; ++d) {
                            const float2 cosine = *reinterpret_cast<const float2*>(cosines + d * 16);
                            const float2 sine = *reinterpret_cast<const float2*>(cosines + d * 16 + kDim / 2);
                            // A head turns dimension i with i + kDim / 2, which the same lane holds.
                            uint32_t &x = q[t][d][j], &z = q[t][d + kDim / 32][j];
                            const float2 a = {low_to_float(x), high_to_float(x)}, b = {low_to_float(z), high_to_float(z)};
                            x = to_pair(a.x * cosine.x - b.x * sine.x, a.y * cosine.y - b.y * sine.y);
                            z = to_pair(b.x * cosine.x + a.x * sine.x, b.y * cosine.y + a.y * sine.y);
                        }
                    }
#pragma unroll
                for (int d = 0; d < kDim / 8; ++d)
#pragma unroll
                    for (int j = 0; j < 4; ++j) o[t][d][j] = 0.0f;
                maximum[t][0] = maximum[t][1] = kMinusInfinity;
                sum[t][0] = sum[t][1] = 0.0f;
            }
        }
        {
            const uint32_t free_stage = stage == 0 ? kStages - 1 : stage - 1;
            ask(asked, free_stage, num_asked < run.end);
            if (++num_asked < run.end) asked.next(cu_tokens, kv_lens, shape);
        }
        wait_for_copies<kStages - 1>();
        __syncwarp();

        const uint32_t key = now.at * kStretch + warp * kKeys;
        if (cos_sin && key < len && key + kKeys > len - tokens) {
            uint8_t* tile = shared + warp * kStages * T::kStageBytes + stage * T::kStageBytes;
            for (uint32_t p = max(key, len - tokens); p < min(key + kKeys, len); ++p) {
                const bf16* from = qkv + size_t(first_token + p - (len - tokens)) * shape.qkv_row + (shape.heads + now.head) * kDim;
                const uint32_t block = block_tables[size_t(now.seq) * shape.max_blocks + p / shape.block_size];
                const size_t to = ((size_t(block) * shape.kv_heads + now.head) * shape.block_size + p % shape.block_size) * kDim;
                if (lane < kDim / 16) {
                    const float* cosines = cos_sin + size_t(p) * kDim + lane * 8;
                    const float8 x = to_float(*reinterpret_cast<const bf16x8*>(from + lane * 8));
                    const float8 z = to_float(*reinterpret_cast<const bf16x8*>(from + kDim / 2 + lane * 8));
                    float8 first, second;
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        const float cosine = cosines[j], sine = cosines[kDim / 2 + j];
                        first.at[j] = x.at[j] * cosine - z.at[j] * sine;
                        second.at[j] = z.at[j] * cosine + x.at[j] * sine;
                    }
                    const bf16x8 halves[2] = {to_bf16(first), to_bf16(second)};
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        *reinterpret_cast<bf16x8*>(k + to + half * kDim / 2 + lane * 8) = halves[half];
                        *reinterpret_cast<bf16x8*>(tile + T::offset(p - key, half * kDim / 16 + lane)) = halves[half];
                    }
                } else if (lane >= 16 && lane < 16 + kDim / 8) {
                    const uint32_t piece = lane - 16;
                    const bf16x8 value = *reinterpret_cast<const bf16x8*>(from + shape.kv_heads * kDim + piece * 8);
                    *reinterpret_cast<bf16x8*>(v + to + piece * 8) = value;
                    *reinterpret_cast<bf16x8*>(tile + T::kBytes + T::offset(p - key, piece)) = value;
                }
            }
            __syncwarp();
        }
        if (key < len) {
            const uint32_t k_at = stages + stage * T::kStageBytes, v_at = k_at + T::kBytes;
            float s[kTiles][2][4] = {};
#pragma unroll
            for (int d = 0; d < kDim / 16; ++d) {
                uint32_t b[4];
                load_matrices(b, k_at + T::offset(lane / 16 * 8 + lane % 8, d * 2 + lane / 8 % 2));
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    mma(s[t][0], q[t][d][0], q[t][d][1], q[t][d][2], q[t][d][3], b[0], b[1]);
                    mma(s[t][1], q[t][d][0], q[t][d][1], q[t][d][2], q[t][d][3], b[2], b[3]);
                }
            }
            uint32_t p[kTiles][4];
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                if (key < shape.first_key && c == 0) s[t][0][0] = s[t][0][2] = kMinusInfinity;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (narrow && half == 1) {
                        p[t][1] = p[t][3] = 0;
                        continue;
                    }
                    const uint32_t r = t * 16 + half * 8 + g;
                    // The last key this row sees. A row past the end sees what row 0 does.
                    const uint32_t last = len - tokens + (r < rows ? r / group : 0);
                    float largest = maximum[t][half];
#pragma unroll
                    for (int n = 0; n < 2; ++n)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            float& score = s[t][n][half * 2 + j];
                            score = key + n * 8 + c * 2 + j <= last ? score * shape.scale : kMinusInfinity;
                            largest = fmaxf(largest, score);
                        }
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                    const float base = largest == kMinusInfinity ? 0.0f : largest;
                    const float shrink = exp2f(maximum[t][half] - base);
                    maximum[t][half] = largest;
                    float added = 0.0f;
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const float first = exp2f(s[t][n][half * 2] - base), second = exp2f(s[t][n][half * 2 + 1] - base);
                        added += first + second;
                        p[t][n * 2 + half] = to_pair(first, second);
                    }
                    sum[t][half] = sum[t][half] * shrink + added;
#pragma unroll
                    for (int d = 0; d < kDim / 8; ++d) {
                        o[t][d][half * 2] *= shrink;
                        o[t][d][half * 2 + 1] *= shrink;
                    }
                }
            }
#pragma unroll
            for (int d = 0; d < kDim / 16; ++d) {
                uint32_t b[4];
                load_matrices_transposed(b, v_at + T::offset(lane / 8 % 2 * 8 + lane % 8, d * 2 + lane / 16));
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    mma(o[t][2 * d], p[t][0], p[t][1], p[t][2], p[t][3], b[0], b[1]);
                    mma(o[t][2 * d + 1], p[t][0], p[t][1], p[t][2], p[t][3], b[2], b[3]);
                }
            }
        }
        __syncwarp();
        stage = stage + 1 == kStages ? 0 : stage + 1;

        const bool pair_ends = now.at + 1 == now.num;
        if (pair_ends || i + 1 == run.end) {
            // Put the warps' softmaxes together: one maximum for all, then sums in the order of the warps, or of two pairs of them.
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    sum[t][half] += __shfl_xor_sync(~0u, sum[t][half], 1);
                    sum[t][half] += __shfl_xor_sync(~0u, sum[t][half], 2);
                    if (c == 0) of_warp[0][warp][t * 16 + half * 8 + g] = maximum[t][half];
                }
            __syncthreads();
            float largest[kTiles][2];
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t r = t * 16 + half * 8 + g;
                    largest[t][half] = kMinusInfinity;
#pragma unroll
                    for (int w = 0; w < kWarps; ++w) largest[t][half] = fmaxf(largest[t][half], of_warp[0][w][r]);
                    if (narrow && half == 1) continue;
                    const float shrink = largest[t][half] == kMinusInfinity ? 0.0f : exp2f(maximum[t][half] - largest[t][half]);
                    if (c == 0) of_warp[1][warp][r] = sum[t][half] * shrink;
#pragma unroll
                    for (int d = 0; d < kDim / 8; ++d) {
                        o[t][d][half * 2] *= shrink;
                        o[t][d][half * 2 + 1] *= shrink;
                    }
                }
            for (uint32_t w = 0; narrow && w < kWarps; w += 2) {
                if (warp / 2 * 2 == w)
#pragma unroll
                    for (int d = 0; d < kDim / 8; ++d) {
                        float2& place = *reinterpret_cast<float2*>(&merged[warp % 2 * 8 + g][d * 8 + c * 2]);
                        const float2 before = w == 0 ? float2{0.0f, 0.0f} : place;
                        place = {before.x + o[0][d][0], before.y + o[0][d][1]};
                    }
                __syncthreads();
            }
            for (uint32_t w = 0; !narrow && w < kWarps; ++w) {
                if (warp == w)
#pragma unroll
                    for (int t = 0; t < kTiles; ++t)
#pragma unroll
                        for (int d = 0; d < kDim / 8; ++d)
#pragma unroll
                            for (int j = 0; j < 4; ++j) {
                                float& place = merged[t * 16 + j / 2 * 8 + g][d * 8 + c * 2 + j % 2];
                                place = w == 0 ? o[t][d][j] : place + o[t][d][j];
                            }
                __syncthreads();
            }
            const bool whole = pair_ends && part_begin == pair_begin;
            const uint32_t slot = blockIdx.x * 2 + (part_begin == pair_begin);
            for (uint32_t r = warp; r < rows; r += kWarps) {
                float total = 0.0f, top = kMinusInfinity;
#pragma unroll
                for (int w = 0; w < kWarps; ++w) total += of_warp[1][w][r], top = fmaxf(top, of_warp[0][w][r]);
                bf16* to = y + size_t(first_token + r / group) * shape.heads * kDim + (now.head * group + r % group) * kDim;
                for (uint32_t d = lane; d < kDim; d += 32) {
                    const float sum_of_warps = narrow ? merged[r][d] + merged[kRows / 2 + r][d] : merged[r][d];
                    if (whole)
                        to[d] = __float2bfloat16(sum_of_warps / total);
                    else
                        parts[(size_t(slot) * kRows + r) * kDim + d] = sum_of_warps;
                }
                if (!whole && lane == 0) {
                    maxima_sums[(size_t(slot) * kRows + r) * 2] = top;
                    maxima_sums[(size_t(slot) * kRows + r) * 2 + 1] = total;
                }
            }
            if (!whole) {
                const uint32_t first_block = pair_begin / run.each, last_block = (pair_begin + now.num - 1) / run.each;
                const uint32_t num_parts = last_block - first_block + 1;
                __threadfence();
                __syncthreads();
                uint32_t* counter = counters + now.seq * shape.kv_heads + now.head;
                if (threadIdx.x == 0) is_last = atomicAdd(counter, 1) + 1 == num_parts;
                __syncthreads();
                if (is_last) {
                    __threadfence();
                    for (uint32_t r = warp; r < rows; r += kWarps) {
                        float top = kMinusInfinity;
                        for (uint32_t part = 0; part < num_parts; ++part) {
                            const size_t at = (size_t(first_block + part) * 2 + (part == 0)) * kRows + r;
                            top = fmaxf(top, __ldcg(maxima_sums + at * 2));
                        }
                        float total = 0.0f, out[(kDim + 31) / 32] = {};
                        for (uint32_t part = 0; part < num_parts; ++part) {
                            const size_t at = (size_t(first_block + part) * 2 + (part == 0)) * kRows + r;
                            const float theirs = __ldcg(maxima_sums + at * 2);
                            const float shrink = theirs == kMinusInfinity ? 0.0f : exp2f(theirs - top);
                            total += __ldcg(maxima_sums + at * 2 + 1) * shrink;
#pragma unroll
                            for (int j = 0; j < (kDim + 31) / 32; ++j)
                                if (lane + 32 * j < kDim) out[j] += __ldcg(parts + at * kDim + lane + 32 * j) * shrink;
                        }
                        bf16* to = y + size_t(first_token + r / group) * shape.heads * kDim + (now.head * group + r % group) * kDim;
#pragma unroll
                        for (int j = 0; j < (kDim + 31) / 32; ++j)
                            if (lane + 32 * j < kDim) to[lane + 32 * j] = __float2bfloat16(out[j] / total);
                    }
                    if (threadIdx.x == 0) *counter = 0;
                }
            }
            __syncthreads();
            part_begin = i + 1;
        }
        if (pair_ends) pair_begin = i + 1;
        if (i + 1 < run.end) now.next(cu_tokens, kv_lens, shape);
    }
}

#define DECODE(dim, tiles, stages, blocks)                                                                                               \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, blocks)                                                                    \
    decode_##dim##_##tiles##_##blocks(bf16* qkv, bf16* k, bf16* v, const float* cos_sin, const int* cu_tokens, const int* kv_lens,        \
                                      const int* block_tables, bf16* y, float* parts, float* maxima_sums, uint32_t* counters,             \
                                      uint32_t seqs, uint32_t heads, uint32_t kv_heads, uint32_t block_size, uint32_t max_blocks,          \
                                      uint32_t first_key, float scale) {                                                                  \
        const Shape shape = {seqs, heads, kv_heads, block_size, max_blocks, (heads + 2 * kv_heads) * dim, 16 * tiles, first_key, scale};  \
        decode<dim, tiles, stages>(qkv, k, v, cos_sin, cu_tokens, kv_lens, block_tables, y, parts, maxima_sums, counters, shape);          \
    }

DECODE(64, 1, 4, 1)
DECODE(64, 2, 4, 1)
DECODE(64, 1, 3, 2)
DECODE(96, 1, 4, 1)
DECODE(96, 2, 4, 1)
DECODE(128, 1, 4, 1)
DECODE(128, 2, 4, 1)
DECODE(128, 1, 3, 2)
