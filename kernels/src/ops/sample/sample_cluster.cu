// sample_cluster: what sample.cu does, for few rows on Hopper: eight blocks a row, which have all of it in shared memory.
//
// Reads    logits [rows, vocab] f32; temperature, top_p, min_p [rows] f32; top_k, position [rows] i32; seed [rows, 2] i32
// Writes   ids [rows] i32
// Needs    vocab <= 2^18; Hopper
// Sums in  integers, weights as multiples of 2^-44: no order of adding changes them. A weight under 2^-45 is never picked.
// Grid     (8, rows); a row's blocks are a cluster, each has an equal run of the vocabulary and tells the others its sums
// Block    1024 threads
// Shared   f32 weights of the block's run, and its logits if they fit too
// Moves    vocab * 4 B a row; what is not in shared memory is read again, from L2, by each pass
// Method   A threshold (top_k: by count, top_p: by weight) is searched between two keys of floats: each pass weighs what lies above eight
//          keys between them, until the little that is left between two of them is told to all blocks, or these are neighbours

#include "exp.cuh"
#include "ptx.cuh"
#include "sampling.cuh"
#include "tma.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

constexpr uint32_t kThreads = 1024, kWarps = kThreads / 32;
constexpr uint32_t kBlocks = 8;  // of a row
constexpr int kPivots = 8;
constexpr uint32_t kLeft = 32;     // what a block may have left for the search to end
constexpr uint32_t kPasses = 2;    // before which it will not be so little

struct Shared {
    uint64_t of_warp[kWarps][kPivots];
    // By turns, so that a block may tell its next sums while others still read the last. Behind the sums how many it has left.
    uint64_t of_block[2][kBlocks][kPivots + 1];
    uint64_t scan[kWarps];
    uint32_t num_left;
    uint64_t left[kLeft][2];               // this block's: keys and masses
    uint64_t all_left[kBlocks][kLeft][2];  // every block's
};

__device__ __forceinline__ uint64_t warp_max_u64(uint64_t x) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
        const uint64_t other = __shfl_xor_sync(~0u, x, apart);
        x = other > x ? other : x;
    }
    return x;
}

// The blocks of one row.
struct Blocks {
    Shared& shared;
    uint32_t turn = 0;

    // By one warp: lane b puts `value` where block b finds it.
    __device__ __forceinline__ void tell(int place, uint64_t value) {
        const uint32_t lane = threadIdx.x % 32, mine = blockIdx.x;
        const uint64_t* here = &shared.of_block[turn][mine][place];
        if (lane < kBlocks) store_at(lane, shared_address(here), value);
        __syncwarp();
    }

    // After all have told: what block b told is in the result's [b].
    __device__ __forceinline__ uint64_t (*heard())[kPivots + 1] {
        sync_cluster();
        uint64_t (*of_block)[kPivots + 1] = shared.of_block[turn];
        turn ^= 1;
        return of_block;
    }

    // The row's sums of `kPivots` masses; lane i of each warp gets that of i % kPivots. `most_left` becomes the most that a block has left.
    __device__ __forceinline__ uint64_t add_up(const uint64_t (&mine)[kPivots], uint32_t& most_left) {
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        uint32_t any = 0;
#pragma unroll
        for (int p = 0; p < kPivots; ++p) any |= uint32_t(mine[p] != 0) << p;
        any = __reduce_or_sync(~0u, any);
#pragma unroll
        for (int p = 0; p < kPivots; ++p) {
            const uint64_t sum = any >> p & 1 ? warp_sum_u64(mine[p]) : 0;
            if (lane == 0) shared.of_warp[warp][p] = sum;
        }
        __syncthreads();
        if (warp < kPivots) tell(warp, warp_sum_u64(shared.of_warp[lane][warp]));
        if (warp == kPivots) tell(kPivots, shared.num_left);
        const uint64_t (*of_block)[kPivots + 1] = heard();
        most_left = __reduce_max_sync(~0u, uint32_t(of_block[lane % kBlocks][kPivots]));
        uint64_t sum = 0;
        for (uint32_t block = lane / kPivots; block < kBlocks; block += 32 / kPivots) sum += of_block[block][lane % kPivots];
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        return sum;
    }
};

// The largest key of all that blocks have left such that what is above the search and what has keys >= it reach the limit. There is one:
// all of it does.
__device__ __forceinline__ uint32_t largest_left(const Limit& limit, uint64_t above, Blocks& blocks) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Shared& shared = blocks.shared;
    for (uint32_t i = threadIdx.x; i < kLeft * kBlocks; i += kThreads) {
        const uint32_t place = i / kBlocks;
        const bool is_left = place < shared.num_left;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store_at(i % kBlocks, shared_address(&shared.all_left[blockIdx.x][place][half]), is_left ? shared.left[place][half] : 0);
    }
    sync_cluster();
    uint32_t found = 0;
    if (warp < kBlocks) {
        const uint32_t mine = shared.all_left[warp][lane][0];
        uint64_t sum = above;
#pragma unroll 8
        for (uint32_t i = 0; i < kLeft * kBlocks; ++i) {
            const uint64_t* other = shared.all_left[i / kLeft][i % kLeft];
            if (other[0] >= mine) sum += other[1];
        }
        found = __reduce_max_sync(~0u, limit.reached(sum) ? mine : 0);
        if (lane == 0) shared.scan[warp] = found;
    }
    __syncthreads();
    found = __reduce_max_sync(~0u, uint32_t(shared.scan[lane % kBlocks]));
    __syncthreads();
    return found;
}

struct Row {
    const float* logits;
    uint32_t begin, end;  // this block's run
    bool aligned;
    float largest, temperature, min_p;
    const float* weights;  // of the run

    // Nothing if min_p leaves it out.
    __device__ __forceinline__ float weigh(float logit) const {
        const float w = exact_exp(__fdiv_rn(__fsub_rn(logit, largest), temperature));
        return w >= min_p ? w : 0.0f;
    }
    __device__ __forceinline__ float weight(uint32_t i) const { return weights[i - begin]; }
    // One for what is kept, or its weight.
    static __device__ __forceinline__ uint64_t mass(float weight, bool by_weight) {
        return by_weight ? __float2ull_rn(weight * kOne) : weight > 0.0f;
    }
};

// The largest key k such that what has keys >= k reaches the limit; all that has keys > low does.
__device__ __forceinline__ uint32_t threshold(const Row& row, const Limit& limit, uint32_t low, Blocks& blocks) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t high = key_of(row.largest);  // what is above does not reach the limit: nothing is
    uint64_t above = 0;
    for (uint32_t pass = 0; high - low > 1; ++pass) {
        const bool first = pass == 0, may_end = pass >= kPasses;
        if (threadIdx.x == 0) blocks.shared.num_left = may_end ? 0 : kLeft + 1;
        if (may_end) __syncthreads();
        uint32_t pivots[kPivots];
        uint32_t pivot_of_lane = 0;
#pragma unroll
        for (int p = 0; p < kPivots; ++p) {
            // At first by weight: e^-0.5, e^-1, ... of the largest. Then evenly.
            const uint32_t even = low + min(max((high - low) / (kPivots + 1), 1u) * (kPivots - p), high - low);
            pivots[p] = first ? key_of(row.largest - row.temperature * 0.5f * float(1 << p)) : even;
            pivots[p] = min(max(pivots[p], low), high);
            if (lane % kPivots == p) pivot_of_lane = pivots[p];
        }
        uint64_t masses[kPivots] = {};
        for_each(row.logits, row.begin, row.end, row.aligned, [&](uint32_t i, float logit) {
            const uint32_t key = key_of(logit);
            if (key <= low || key > high) return;
            const uint64_t mass = row.mass(row.weight(i), limit.by_weight);
            if (may_end) {
                const uint32_t place = atomicAdd(&blocks.shared.num_left, 1);
                if (place < kLeft) blocks.shared.left[place][0] = key, blocks.shared.left[place][1] = mass;
            }
#pragma unroll
            for (int p = 0; p < kPivots; ++p) masses[p] += key > pivots[p] ? mass : 0;
        });
        uint32_t most_left;
        const uint64_t sum = blocks.add_up(masses, most_left);
        if (most_left <= kLeft) return largest_left(limit, above, blocks);
        // The first pivot above which enough lies, and the one before it, above which too little does.
        const uint32_t enough = __ballot_sync(~0u, limit.reached(above + sum)) & ((1u << kPivots) - 1);
        const int found = enough ? __ffs(enough) - 1 : kPivots;
        if (found > 0) {
            high = min(high, __shfl_sync(~0u, pivot_of_lane, found - 1));
            above += __shfl_sync(~0u, sum, found - 1);
        }
        if (found < kPivots) low = max(low, __shfl_sync(~0u, pivot_of_lane, found));
    }
    return high;
}

// The first token at which the sum of kept weights exceeds `bits` / 2^53 of their total, `least` being the least key that is kept.
__device__ __forceinline__ void pick(const Row& row, uint32_t least, uint64_t bits, int* id, Blocks& blocks) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Shared& shared = blocks.shared;
    const auto mass = [&](uint32_t i, uint32_t end) -> uint64_t {
        if (i >= end) return 0;
        const float logit = row.logits[i];
        return key_of(logit) >= least ? row.mass(row.weight(i), true) : 0;
    };
    uint32_t begin = row.begin, end = row.end;
    uint64_t target = 0;
    bool whole = true;
    // Each warp takes a part of the run; then all share the part that holds the target, and so on down to one of 32.
    do {
        const uint32_t each = ((end - begin + kWarps - 1) / kWarps + 31) / 32 * 32;
        const uint32_t from = min(begin + warp * each, end), to = min(from + each, end);
        uint64_t sum = 0;
        for (uint32_t i = from + lane; i < to; i += 128)
            sum += mass(i, to) + mass(i + 32, to) + mass(i + 64, to) + mass(i + 96, to);
        sum = warp_sum_u64(sum);
        __syncthreads();
        if (lane == 0) shared.scan[warp] = sum;
        __syncthreads();
        if (whole) {
            if (warp == 0) blocks.tell(0, warp_sum_u64(shared.scan[lane]));
            const uint64_t (*of_block)[kPivots + 1] = blocks.heard();
            uint64_t total = 0;
            for (uint32_t b = 0; b < kBlocks; ++b) total += of_block[b][0];
            target = __umul64hi(bits << 11, total);
            uint32_t b = 0;
            while (b + 1 < kBlocks && of_block[b][0] <= target) target -= of_block[b++][0];
            if (b != blockIdx.x) return;
            whole = false;
        }
        uint32_t w = 0;
        while (w + 1 < kWarps && shared.scan[w] <= target) target -= shared.scan[w++];
        begin = min(begin + w * each, end), end = min(begin + each, end);
    } while (end - begin > 32);
    uint64_t sum = mass(begin + lane, end);
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const uint64_t other = __shfl_up_sync(~0u, sum, apart);
        if (lane >= apart) sum += other;
    }
    const uint32_t past = __ballot_sync(~0u, sum > target);
    if (threadIdx.x == 0) *id = past ? int(begin + __ffs(past) - 1) : -1;
}

extern "C" __global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads)
sample_cluster(const float* __restrict__ logits, const float* temperature, const int* __restrict__ top_k,
               const float* __restrict__ top_p, const float* __restrict__ min_p, const uint32_t* __restrict__ seed,
               const int* __restrict__ position, int* __restrict__ ids, uint32_t vocab, uint32_t keeps_logits) {
    extern __shared__ float4 run[];  // the run's weights, and its logits if they are to be kept
    __shared__ Shared shared;
    Blocks blocks = {shared};
    launch_dependents();
    sync_cluster();  // nothing may be told to a block that has not begun
    wait_for_previous();
    const uint32_t r = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t each = ((vocab + kBlocks - 1) / kBlocks + 3) / 4 * 4;
    Row row;
    row.logits = logits + size_t(r) * vocab;
    row.begin = min(blockIdx.x * each, vocab), row.end = min(row.begin + each, vocab);
    row.aligned = vocab % 4 == 0;
    // Not __restrict__: then it would be read ahead of the wait, before it is there, and a row's blocks might not agree.
    const bool greedy = temperature[r] == 0.0f;
    float* weights = reinterpret_cast<float*>(run);
    float* kept = keeps_logits && !greedy ? weights + each : nullptr;

    // The largest key and the lowest index that has it, as one number; all ones for what cannot be sampled.
    uint64_t best = 0;
    for_each(row.logits, row.begin, row.end, row.aligned, [&](uint32_t i, float logit) {
        const bool bad = !(logit < INFINITY);
        const uint64_t packed = bad ? ~0ull : (uint64_t(key_of(logit)) << 32 | (0xffffffffu - i));
        best = packed > best ? packed : best;
        if (kept) kept[i - row.begin] = logit;
    });
    best = warp_max_u64(best);
    if (lane == 0) shared.scan[warp] = best;
    __syncthreads();
    if (warp == 0) blocks.tell(0, warp_max_u64(shared.scan[lane]));
    {
        const uint64_t (*of_block)[kPivots + 1] = blocks.heard();
        best = 0;
        for (uint32_t b = 0; b < kBlocks; ++b) best = of_block[b][0] > best ? of_block[b][0] : best;
    }
    const uint32_t largest_key = best >> 32;
    const bool failed = best == ~0ull || largest_key <= kKeyMinusInfinity;
    if (failed || greedy) {
        if (blockIdx.x == 0 && threadIdx.x == 0) ids[r] = failed ? -1 : int(0xffffffffu - uint32_t(best));
        return;
    }

    row.largest = of_key(largest_key), row.temperature = temperature[r], row.min_p = min_p[r];
    if (kept) row.logits = kept - row.begin;
    for_each(row.logits, row.begin, row.end, row.aligned, [&](uint32_t i, float logit) { weights[i - row.begin] = row.weigh(logit); });
    row.weights = weights;
    __syncthreads();
    uint32_t least = kKeyMinusInfinity + 1;
    // How many are kept, and what they weigh.
    const auto totals = [&] {
        uint64_t masses[kPivots] = {};
        for_each(row.logits, row.begin, row.end, row.aligned, [&](uint32_t i, float logit) {
            if (key_of(logit) < least) return;
            const float weight = row.weight(i);
            masses[0] += row.mass(weight, true);
            masses[1] += row.mass(weight, false);
        });
        uint32_t most_left;
        return blocks.add_up(masses, most_left);
    };
    const uint32_t k = top_k[r];
    const bool by_rank = k > 0 && k < vocab, by_mass = top_p[r] < 1.0f;
    uint64_t total = by_rank || by_mass ? totals() : 0;
    if (by_rank && __shfl_sync(~0u, total, 1) > k) {
        least = threshold(row, {false, double(k)}, least - 1, blocks);
        if (by_mass) total = totals();
    }
    if (by_mass) {
        const double limit = double(top_p[r]) * double(__shfl_sync(~0u, total, 0));
        least = threshold(row, {true, limit}, least - 1, blocks);
    }
    pick(row, least, random_bits(position[r], seed[2 * r], seed[2 * r + 1]) >> 11, ids + r, blocks);
}

#endif
