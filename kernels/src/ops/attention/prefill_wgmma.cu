// prefill_wgmma: what prefill.cu does, for Hopper: copies, products and softmax overlap, each in warps of their own.
//
// Reads    qkv          [tokens, (heads + 2 kv_heads) * kDim] bf16: q first, turned; 16-byte aligned
//          k, v         [blocks, kv_heads, block_size, kDim] bf16, as addresses and as maps of tiles of 64 columns of
//                       min(block_size, 128) rows, swizzled by 128 bytes
//          no query sees the keys before position first_key, 0 or 1; what lies there is finite
//          cu_tokens    [seqs + 1] i32, kv_lens [seqs] i32 (this step's tokens included), block_tables [seqs, max_blocks] i32
// Writes   y            [tokens, heads * kDim] bf16, of sequences with at least `least_rows` query rows
// Updates  counter      u32, zero before and after
// Needs    block_size a power of two, at least 16; Hopper
// Sums in  fp32, keys in order, so a query's bits depend on what it sees alone
// Grid     one block a multiprocessor at most. Blocks draw tiles of 128 query rows by number: a sequence's last ones, which see most keys,
//          come first
// Block    one warpgroup that copies (a warp for keys and values, three for queries), two of 64 query rows each. A row is a query token and
//          one of the heads that share the KV head
// Shared   two tiles of queries, and two stages of 128 keys and values: 192 KiB at kDim 128
// Does     4 * kDim FLOP for each query, head and key seen. 16384 tokens, 32 heads of 128: 2.2 TFLOP, 3.1 ms at 700 TFLOP/s
// Source   Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3): the next tile's scores are under way during a tile's softmax, and the
//          two warpgroups take turns at the tensor cores
// Checked  against cpu.rs

#include "ptx.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr uint32_t kGroup = 128;  // threads of a warpgroup
constexpr uint32_t kConsumers = 2;

struct Shape {
    uint32_t seqs, heads, kv_heads, block_size, max_blocks, qkv_row, least_rows, first_key;
    float scale;  // times log2(e)
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr uint32_t kRows = 128, kKeys = 128, kStages = 2;
constexpr uint32_t kHalfBytes = kRows * 128;  // 64 columns of 128 queries, keys or values
constexpr float kMinusInfinity = -INFINITY;

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A tile of query rows; seq is shape.seqs when there are no more.
struct Turn {
    uint32_t seq, head, tile;
};

struct Barriers {
    uint64_t full_k[kStages], full_v[kStages], empty_k[kStages], empty_v[kStages], full_q[2], empty_q[2], full_turn[2], empty_turn[2];
    Turn turns[2];
};

__device__ __forceinline__ uint32_t num_tiles(const int* cu_tokens, uint32_t seq, const Shape& shape) {
    if (seq >= shape.seqs) return 0;
    const uint32_t rows = uint32_t(cu_tokens[seq + 1] - cu_tokens[seq]) * (shape.heads / shape.kv_heads);
    return rows < shape.least_rows ? 0 : (rows + kRows - 1) / kRows;
}

// The tile of this number; by a whole warp.
__device__ __forceinline__ Turn find_turn(const int* cu_tokens, uint32_t number, const Shape& shape) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t before = 0;
    for (uint32_t base = 0; base < shape.seqs; base += 32) {
        const uint32_t num = num_tiles(cu_tokens, base + lane, shape);
        uint32_t sum = num;
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, apart);
            if (lane >= apart) sum += other;
        }
        const uint32_t mine = (before + sum - num) * shape.kv_heads, past = (before + sum) * shape.kv_heads;
        const uint32_t here = __ballot_sync(~0u, mine <= number && number < past);
        if (here) {
            const int who = __ffs(here) - 1;
            const uint32_t inside = number - __shfl_sync(~0u, mine, who), tiles = __shfl_sync(~0u, num, who);
            return {base + who, inside % shape.kv_heads, tiles - 1 - inside / shape.kv_heads};
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    return {shape.seqs, 0, 0};
}

__device__ __forceinline__ uint32_t count_turns(const int* cu_tokens, const Shape& shape) {
    uint32_t total = 0;
    for (uint32_t base = 0; base < shape.seqs; base += 32)
        total += __reduce_add_sync(~0u, num_tiles(cu_tokens, base + threadIdx.x % 32, shape));
    return total * shape.kv_heads;
}

// What all roles know of a tile. Row r sees keys up to before + (first_row + r) / group.
struct Tile {
    uint32_t first_token, rows, first_row, len, before, num;

    __device__ __forceinline__ Tile(const Turn& turn, const int* cu_tokens, const int* kv_lens, const Shape& shape) {
        const uint32_t group = shape.heads / shape.kv_heads;
        first_token = cu_tokens[turn.seq];
        const uint32_t tokens = cu_tokens[turn.seq + 1] - first_token;
        rows = tokens * group, first_row = turn.tile * kRows;
        len = kv_lens[turn.seq], before = len - tokens;
        num = (before + min(first_row + kRows - 1, rows - 1) / group) / kKeys + 1;
    }
};

// Where 16-byte piece `piece` of row `row` of 128 rows lies.
__device__ __forceinline__ uint32_t place(uint32_t row, uint32_t piece) {
    return piece / 8 * kHalfBytes + row * 128 + ((piece ^ row) % 8) * 16;
}

template <int kDim>
__device__ __forceinline__ void copy_keys(const TensorMap* k_map, const TensorMap* v_map, const bf16* k, const bf16* v, const int* cu_tokens,
                                          const int* kv_lens, const int* block_tables, uint32_t* counter, uint32_t keys, uint32_t values,
                                          Barriers& barriers, const Shape& shape) {
    constexpr uint32_t kHalves = kDim / 64, kPieces = kDim / 8, kStageBytes = kHalves * kHalfBytes;
    const uint32_t lane = threadIdx.x % 32, tile_rows = min(shape.block_size, kKeys), tiles = kKeys / tile_rows;
    const uint32_t total = count_turns(cu_tokens, shape);
    uint32_t number = blockIdx.x, at_k = 0, at_v = 0;
    for (uint32_t round = 0;; ++round) {
        const Turn turn = find_turn(cu_tokens, number, shape);
        wait_for(shared_address(&barriers.empty_turn[round % 2]), (round / 2 & 1) ^ 1);
        if (lane == 0) {
            barriers.turns[round % 2] = turn;
            arrive(shared_address(&barriers.full_turn[round % 2]));
        }
        if (turn.seq == shape.seqs) return;
        // As many draws as there are tiles: each but the first of a block, and one in vain a block. So the counter ends at zero.
        if (lane == 0) number = gridDim.x + atomicInc(counter, total - 1);

        const Tile tile(turn, cu_tokens, kv_lens, shape);
        const int* table = block_tables + size_t(turn.seq) * shape.max_blocks;
        const auto ask = [&](const TensorMap* map, const bf16* cache, uint32_t n, uint32_t& at, uint32_t stages, uint64_t* full, uint64_t* empty) {
            const uint32_t first = n * kKeys, stage = at % kStages, to = stages + stage * kStageBytes;
            const uint32_t is_full = shared_address(full + stage), is_empty = shared_address(empty + stage), parity = (at / kStages & 1) ^ 1;
            ++at;
            if (first + kKeys <= tile.len) {
                const uint32_t part = lane % tiles, half = lane / tiles, key = first + part * tile_rows;
                const uint32_t row = (table[key / shape.block_size] * shape.kv_heads + turn.head) * shape.block_size + key % shape.block_size;
                wait_for(is_empty, parity);
                if (lane == 0) arrive_expecting(is_full, kStageBytes);
                __syncwarp();
                if (half < kHalves) copy_tile(to + half * kHalfBytes + part * tile_rows * 128, map, half * 64, row, is_full);
            } else {
                // The sequence ends inside. Past its end zeros: a weight of zero times what lies there must not be NaN.
                wait_for(is_empty, parity);
#pragma unroll 4
                for (uint32_t p = lane; p < kKeys * kPieces; p += 32) {
                    const uint32_t r = p / kPieces, piece = p % kPieces, key = first + r;
                    const bool valid = key < tile.len;
                    const uint32_t block = valid ? table[key / shape.block_size] : 0;
                    const size_t row = (size_t(block) * shape.kv_heads + turn.head) * shape.block_size + key % shape.block_size;
                    copy_async(to + place(r, piece), cache + row * kDim + piece * 8, valid);
                }
                commit_copies();
                wait_for_copies<0>();
                publish_to_tensor_cores();
                __syncwarp();
                if (lane == 0) arrive(is_full);
            }
        };
        ask(k_map, k, 0, at_k, keys, barriers.full_k, barriers.empty_k);
        for (uint32_t n = 0; n < tile.num; ++n) {
            if (n + 1 < tile.num) ask(k_map, k, n + 1, at_k, keys, barriers.full_k, barriers.empty_k);
            ask(v_map, v, n, at_v, values, barriers.full_v, barriers.empty_v);
        }
        number = __shfl_sync(~0u, number, 0);
    }
}

template <int kDim>
__device__ __forceinline__ void copy_queries(const bf16* qkv, const int* cu_tokens, const int* kv_lens, uint32_t queries, Barriers& barriers,
                                             const Shape& shape) {
    constexpr uint32_t kHalves = kDim / 64, kPieces = kDim / 8;
    const uint32_t group = shape.heads / shape.kv_heads;
    for (uint32_t round = 0;; ++round) {
        wait_for(shared_address(&barriers.full_turn[round % 2]), round / 2 & 1);
        const Turn turn = barriers.turns[round % 2];
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared_address(&barriers.empty_turn[round % 2]));
        if (turn.seq == shape.seqs) return;
        const Tile tile(turn, cu_tokens, kv_lens, shape);
        wait_for(shared_address(&barriers.empty_q[round % 2]), (round / 2 & 1) ^ 1);
#pragma unroll 2
        for (uint32_t p = threadIdx.x - 32; p < kRows * kPieces; p += kGroup - 32) {
            const uint32_t r = p / kPieces, piece = p % kPieces;
            const bool valid = tile.first_row + r < tile.rows;
            const uint32_t row = valid ? tile.first_row + r : 0;
            const bf16* from = qkv + size_t(tile.first_token + row / group) * shape.qkv_row + (turn.head * group + row % group) * kDim;
            copy_async(queries + round % 2 * kHalves * kHalfBytes + place(r, piece), from + piece * 8, valid);
        }
        commit_copies();
        wait_for_copies<0>();
        publish_to_tensor_cores();
        arrive(shared_address(&barriers.full_q[round % 2]));
    }
}

// Keeps the compiler from moving what is done to these to the other side of products or of a wait for them.
template <int kNum>
__device__ __forceinline__ void hold(float (&x)[kNum]) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// A warpgroup's softmax: each thread has rows g and g + 8 of its warp's 16.
struct Softmax {
    float maximum[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {0.0f, 0.0f};

    // Scores become weights; what they were weighed against before shrinks by `shrink`.
    __device__ __forceinline__ void weigh(float (&s)[kKeys / 2], float scale, float (&shrink)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = maximum[half];
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) largest = fmaxf(largest, fmaxf(s[n * 4 + half * 2], s[n * 4 + half * 2 + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            // Every row sees a key of the first turn, so the largest is finite from then on.
            const float base = largest * scale;
            shrink[half] = power_of_2(maximum[half] * scale - base);
            maximum[half] = largest;
            float added = 0.0f;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& score = s[n * 4 + half * 2 + j];
                    score = power_of_2(fmaf(score, scale, -base));
                    added += score;
                }
            sum[half] = sum[half] * shrink[half] + added;
        }
    }
};

template <int kDim>
__device__ __forceinline__ void attend(const int* cu_tokens, const int* kv_lens, bf16* y, uint32_t queries, uint32_t keys, uint32_t values,
                                       Barriers& barriers, const Shape& shape) {
    constexpr uint32_t kHalves = kDim / 64, kStageBytes = kHalves * kHalfBytes;
    const uint32_t consumer = threadIdx.x / kGroup - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint32_t group = shape.heads / shape.kv_heads;
    const auto release = [&](uint64_t* barrier) {
        __syncwarp();
        if (lane == 0) arrive(shared_address(barrier));
    };
    if (consumer == 1) arrive_some(1, 2 * kGroup);  // the first warpgroup begins
    uint32_t at_k = 0, at_v = 0;
    for (uint32_t round = 0;; ++round) {
        wait_for(shared_address(&barriers.full_turn[round % 2]), round / 2 & 1);
        const Turn turn = barriers.turns[round % 2];
        release(&barriers.empty_turn[round % 2]);
        if (turn.seq == shape.seqs) return;
        const Tile tile(turn, cu_tokens, kv_lens, shape);
        const uint32_t warp_row = tile.first_row + consumer * 64 + warp * 16;
        const uint32_t sees[2] = {tile.before + (warp_row + g) / group, tile.before + (warp_row + g + 8) / group};
        const uint32_t all_see = tile.before + (tile.first_row + consumer * 64) / group;

        float o[kDim / 2], s[kKeys / 2];
        uint32_t p[kKeys / 4];
        Softmax softmax;
        const auto score = [&] {
            const uint64_t a = tile_descriptor(queries + round % 2 * kStageBytes + consumer * 64 * 128), b = tile_descriptor(keys + at_k % kStages * kStageBytes);
            begin_products();
            first_wgmma(s, a, b);
#pragma unroll
            for (int d = 1; d < kDim / 16; ++d) {
                const uint64_t next = d / 4 * (kHalfBytes / 16) + d % 4 * kNext16;
                wgmma(s, a + next, b + next);
            }
            commit_products();
        };
        const auto gather = [&] {
            const uint64_t b = row_tile_descriptor(values + at_v % kStages * kStageBytes, kHalfBytes);
            begin_products();
#pragma unroll
            for (int n = 0; n < int(kKeys) / 16; ++n) wgmma(o, p + n * 4, b + n * kNext16Rows);
            commit_products();
        };
        const auto mask = [&](uint32_t n) {
            if (n < shape.first_key && c == 0) s[0] = s[2] = kMinusInfinity;
            if (n * kKeys + kKeys - 1 <= all_see) return;
#pragma unroll
            for (int i = 0; i < int(kKeys) / 2; ++i)
                if (n * kKeys + i / 4 * 8 + c * 2 + i % 2 > sees[i / 2 % 2]) s[i] = kMinusInfinity;
        };
        const auto round_weights = [&] {
#pragma unroll
            for (int i = 0; i < int(kKeys) / 4; ++i) p[i] = to_pair(s[2 * i], s[2 * i + 1]);
        };

        wait_for(shared_address(&barriers.full_q[round % 2]), round / 2 & 1);
        wait_for(shared_address(&barriers.full_k[at_k % kStages]), at_k / kStages & 1);
        score();
        wait_for_products<0>();
        hold(s);
        release(&barriers.empty_k[at_k++ % kStages]);
        mask(0);
        float shrink[2];
        softmax.weigh(s, shape.scale, shrink);
        round_weights();
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) o[i] = 0.0f;

        for (uint32_t n = 1; n < tile.num; ++n) {
            wait_for(shared_address(&barriers.full_k[at_k % kStages]), at_k / kStages & 1);
            sync_some(1 + consumer, 2 * kGroup);
            score();
            wait_for(shared_address(&barriers.full_v[at_v % kStages]), at_v / kStages & 1);
            hold(o);
            gather();
            arrive_some(2 - consumer, 2 * kGroup);
            wait_for_products<1>();
            hold(s);
            release(&barriers.empty_k[at_k++ % kStages]);
            mask(n);
            softmax.weigh(s, shape.scale, shrink);
            wait_for_products<0>();
            hold(o);
            release(&barriers.empty_v[at_v++ % kStages]);
            round_weights();
            // Once the largest have been seen, nothing shrinks.
            if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
                for (int i = 0; i < kDim / 2; ++i) o[i] *= shrink[i / 2 % 2];
        }
        release(&barriers.empty_q[round % 2]);
        wait_for(shared_address(&barriers.full_v[at_v % kStages]), at_v / kStages & 1);
        hold(o);
        gather();
        wait_for_products<0>();
        hold(o);
        release(&barriers.empty_v[at_v++ % kStages]);

#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = softmax.sum[half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const float scale = 1.0f / total;
            const uint32_t row = warp_row + half * 8 + g;
            bf16* to = y + (size_t(tile.first_token + row / group) * shape.heads + turn.head * group + row % group) * kDim;
            // Four lanes have two columns each of every eight; after the exchange each has all eight of every fourth.
#pragma unroll
            for (int i = 0; i < kDim / 32; ++i) {
                uint32_t mine[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = (i * 4 + j) * 4 + half * 2;
                    mine[j] = to_pair(o[at] * scale, o[at + 1] * scale);
                }
                bf16x8 eight;
#pragma unroll
                for (uint32_t turned = 0; turned < 4; ++turned) {
                    // To lane c ^ turned goes its part of eight c ^ turned.
                    const uint32_t other = c ^ turned;
                    const uint32_t give = other == 0 ? mine[0] : other == 1 ? mine[1] : other == 2 ? mine[2] : mine[3];
                    const uint32_t got = __shfl_xor_sync(~0u, give, turned);
#pragma unroll
                    for (uint32_t j = 0; j < 4; ++j)
                        if (other == j) eight.pairs[j] = got;
                }
                if (row < tile.rows) *reinterpret_cast<bf16x8*>(to + i * 32 + c * 8) = eight;
            }
        }
    }
}

#endif

template <int kDim>
__device__ __forceinline__ void prefill(const TensorMap* k_map, const TensorMap* v_map, const bf16* qkv, const bf16* k, const bf16* v,
                                        const int* cu_tokens, const int* kv_lens, const int* block_tables, bf16* y, uint32_t* counter,
                                        const Shape& shape) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr uint32_t kHalves = kDim / 64, kStageBytes = kHalves * kHalfBytes;
    extern __shared__ uint8_t shared[];
    __shared__ Barriers barriers;
    const uint32_t queries = (shared_address(shared) + 1023) / 1024 * 1024, keys = queries + 2 * kStageBytes, values = keys + kStages * kStageBytes;
    if (threadIdx.x == 0) {
        constexpr uint32_t kWarps = kConsumers * 4;
        for (uint32_t stage = 0; stage < kStages; ++stage) {
            init_barrier(shared_address(&barriers.full_k[stage]), 1);
            init_barrier(shared_address(&barriers.full_v[stage]), 1);
            init_barrier(shared_address(&barriers.empty_k[stage]), kWarps);
            init_barrier(shared_address(&barriers.empty_v[stage]), kWarps);
        }
        for (uint32_t i = 0; i < 2; ++i) {
            init_barrier(shared_address(&barriers.full_q[i]), kGroup - 32);
            init_barrier(shared_address(&barriers.empty_q[i]), kWarps);
            init_barrier(shared_address(&barriers.full_turn[i]), 1);
            init_barrier(shared_address(&barriers.empty_turn[i]), kWarps + 3);
        }
        publish_barriers();
    }
    __syncthreads();
    launch_dependents();
    wait_for_previous();

    if (threadIdx.x < kGroup) {
        give_registers<40>();
        if (threadIdx.x < 32)
            copy_keys<kDim>(k_map, v_map, k, v, cu_tokens, kv_lens, block_tables, counter, keys, values, barriers, shape);
        else
            copy_queries<kDim>(qkv, cu_tokens, kv_lens, queries, barriers, shape);
    } else {
        take_registers<232>();
        attend<kDim>(cu_tokens, kv_lens, y, queries, keys, values, barriers, shape);
    }
#else
    __trap();  // other cards have prefill.cu
#endif
}

#define PREFILL(dim)                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(kGroup * (1 + kConsumers), 1)                                                             \
    prefill_wgmma_##dim(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const bf16* qkv, const bf16* k, \
                        const bf16* v, const int* cu_tokens, const int* kv_lens, const int* block_tables, bf16* y, uint32_t* counter,        \
                        uint32_t seqs, uint32_t heads, uint32_t kv_heads, uint32_t block_size, uint32_t max_blocks, uint32_t least_rows,     \
                        uint32_t first_key, float scale) {                                                                                 \
        const Shape shape = {seqs, heads, kv_heads, block_size, max_blocks, (heads + 2 * kv_heads) * dim, least_rows, first_key, scale};   \
        prefill<dim>(&k_map, &v_map, qkv, k, v, cu_tokens, kv_lens, block_tables, y, counter, shape);                                       \
    }

PREFILL(64)
PREFILL(128)
