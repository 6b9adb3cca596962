// sample: one token a row, by the law in mod.rs, without sorting the vocabulary. For many rows; few on Hopper have sample_cluster.cu.
//
// Reads    logits [rows, vocab] f32; temperature, top_p, min_p [rows] f32; top_k, position [rows] i32; seed [rows, 2] i32
// Writes   ids [rows] i32
// Scratch  partials [rows, blocks a row] u64; counters [rows] u32, zero before and after
// Needs    vocab <= 2^18 for rows that are not greedy
// Sums in  integers, weights as multiples of 2^-44: no order of adding changes them. A weight under 2^-45 is never picked.
// Grid     (blocks a row, rows): each block finds the largest logit of its part of the row, the one that ends last puts them together and,
//          if the row is not greedy, goes on alone
// Block    1024 threads
// Moves    vocab * 4 B a row when greedy. Else each pass reads the row again, from L2
// Method   A threshold (top_k: by count, top_p: by weight) is searched between two keys of floats: each pass weighs what lies above eight
//          keys between them, until the few logits between two neighbours fit into shared memory, where they are sorted

#include "exp.cuh"
#include "ptx.cuh"
#include "reduce.cuh"
#include "sampling.cuh"

constexpr uint32_t kThreads = 1024, kWarps = kThreads / 32;
constexpr int kPivots = 8;
constexpr uint32_t kMostSorted = 1024;

struct Shared {
    uint64_t of_warp[kWarps][kPivots];
    uint64_t sums[kPivots];
    uint32_t sorted[kMostSorted];
    uint64_t scan[kWarps];
    uint32_t num_sorted;
    uint32_t answer;
    bool is_last;
};

struct Row {
    const float* logits;
    uint32_t vocab;
    bool aligned;
    float largest, temperature, min_p;

    __device__ __forceinline__ float weight(float logit) const { return exact_exp(__fdiv_rn(__fsub_rn(logit, largest), temperature)); }
    __device__ __forceinline__ bool keeps(float weight) const { return weight > 0.0f && weight >= min_p; }
    // Its mass: one, or its weight.
    __device__ __forceinline__ uint64_t mass(float logit, bool by_weight) const {
        const float w = weight(logit);
        if (!keeps(w)) return 0;
        return by_weight ? __float2ull_rn(w * kOne) : 1;
    }
};

// Adds up the block's sums of `kPivots` masses; the results are in shared.sums.
__device__ __forceinline__ void add_up(const uint64_t (&mine)[kPivots], Shared& shared) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kPivots; ++p) {
        const uint64_t sum = warp_sum_u64(mine[p]);
        if (lane == 0) shared.of_warp[warp][p] = sum;
    }
    __syncthreads();
    if (warp < kPivots) {
        const uint64_t sum = warp_sum_u64(shared.of_warp[lane][warp]);
        if (lane == 0) shared.sums[warp] = sum;
    }
    __syncthreads();
}

// The largest key k such that what has keys >= k reaches the limit; all that has keys > low does.
__device__ __forceinline__ uint32_t threshold(const Row& row, const Limit& limit, uint32_t low, Shared& shared) {
    uint32_t high = key_of(row.largest);  // what is above does not reach the limit: nothing is
    uint64_t above = 0;
    bool first = true;
    while (high - low > 1) {
        uint32_t pivots[kPivots];
#pragma unroll
        for (int p = 0; p < kPivots; ++p) {
            // At first by weight: e^-0.5, e^-1, ... of the largest. Then evenly.
            pivots[p] = first ? key_of(row.largest - row.temperature * 0.5f * float(1 << p)) : low + uint32_t(uint64_t(high - low) * (kPivots - p) / (kPivots + 1));
            pivots[p] = min(max(pivots[p], low), high);
        }
        first = false;
        uint64_t masses[kPivots] = {};
        for_each(row.logits, 0, row.vocab, row.aligned, [&](uint32_t, float logit) {
            const uint32_t key = key_of(logit);
            if (key <= low || key > high) return;
            const uint64_t mass = row.mass(logit, limit.by_weight);
#pragma unroll
            for (int p = 0; p < kPivots; ++p) masses[p] += key > pivots[p] ? mass : 0;
        });
        add_up(masses, shared);
        uint64_t above_low = 0;
        bool found = false;
#pragma unroll
        for (int p = 0; p < kPivots; ++p) {
            if (found) continue;
            if (limit.reached(above + shared.sums[p])) {
                low = max(low, pivots[p]);
                found = true;
            } else {
                high = min(high, pivots[p]);
                above_low = shared.sums[p];
            }
        }
        above += above_low;

        // Gather what is between, if it is little.
        __syncthreads();
        if (threadIdx.x == 0) shared.num_sorted = 0;
        __syncthreads();
        uint32_t mine = 0;
        for_each(row.logits, 0, row.vocab, row.aligned, [&](uint32_t, float logit) {
            const uint32_t key = key_of(logit);
            mine += key > low && key <= high;
        });
        if (mine) atomicAdd(&shared.num_sorted, mine);
        __syncthreads();
        const uint32_t num = shared.num_sorted;
        __syncthreads();
        if (num > kMostSorted) continue;
        if (threadIdx.x == 0) shared.num_sorted = 0;
        shared.sorted[threadIdx.x] = 0;
        __syncthreads();
        for_each(row.logits, 0, row.vocab, row.aligned, [&](uint32_t, float logit) {
            const uint32_t key = key_of(logit);
            if (key > low && key <= high) shared.sorted[atomicAdd(&shared.num_sorted, 1)] = key;
        });
        __syncthreads();
        // Bitonic, the largest first; keys are all there is, so equal ones may lie in any order.
        for (uint32_t size = 2; size <= kMostSorted; size *= 2)
            for (uint32_t apart = size / 2; apart > 0; apart /= 2) {
                const uint32_t i = threadIdx.x, j = i ^ apart;
                if (j > i) {
                    const uint32_t a = shared.sorted[i], b = shared.sorted[j];
                    if ((a < b) == ((i & size) == 0)) shared.sorted[i] = b, shared.sorted[j] = a;
                }
                __syncthreads();
            }
        // Sums from the top, then the first place that reaches the limit: its key is the answer.
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const uint32_t key = shared.sorted[threadIdx.x];
        uint64_t sum = threadIdx.x < num ? row.mass(of_key(key), limit.by_weight) : 0;
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const uint64_t other = __shfl_up_sync(~0u, sum, apart);
            if (lane >= apart) sum += other;
        }
        if (lane == 31) shared.scan[warp] = sum;
        if (threadIdx.x == 0) shared.answer = low + 1;
        __syncthreads();
        for (uint32_t w = 0; w < warp; ++w) sum += shared.scan[w];
        if (threadIdx.x < num && limit.reached(above + sum)) atomicMax(&shared.answer, key);
        __syncthreads();
        const uint32_t answer = shared.answer;
        __syncthreads();
        return answer;
    }
    return high;
}

// The first token at which the sum of kept weights exceeds `bits` / 2^53 of their total, `least` being the least key that is kept.
__device__ __forceinline__ int pick(const Row& row, uint32_t least, uint64_t bits, Shared& shared) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto mass = [&](uint32_t i, uint32_t end) -> uint64_t {
        if (i >= end) return 0;
        const float logit = row.logits[i];
        return key_of(logit) >= least ? row.mass(logit, true) : 0;
    };
    // Each warp takes a run of the vocabulary; then all share the run that holds the target, and so on down to one run of 32.
    uint32_t begin = 0, end = row.vocab;
    uint64_t target = 0;
    bool whole = true;
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
            uint64_t total = 0;
            for (uint32_t w = 0; w < kWarps; ++w) total += shared.scan[w];
            target = __umul64hi(bits << 11, total);
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
    return past ? int(begin + __ffs(past) - 1) : -1;
}

extern "C" __global__ void __launch_bounds__(kThreads)
sample(const float* __restrict__ logits, const float* __restrict__ temperature, const int* __restrict__ top_k,
       const float* __restrict__ top_p, const float* __restrict__ min_p, const uint32_t* __restrict__ seed, const int* __restrict__ position,
       int* __restrict__ ids, unsigned long long* __restrict__ partials, uint32_t* __restrict__ counters, uint32_t vocab) {
    __shared__ Shared shared;
    launch_dependents();
    wait_for_previous();
    const uint32_t r = blockIdx.y, num_parts = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float* logits_of_row = logits + size_t(r) * vocab;
    const bool aligned = vocab % 4 == 0;
    const uint32_t each = ((vocab + num_parts - 1) / num_parts + 3) / 4 * 4;

    // The largest key and the lowest index that has it, as one number; all ones for what cannot be sampled.
    unsigned long long best = 0;
    const uint32_t from = min(blockIdx.x * each, vocab);
    for_each(logits_of_row, from, min(from + each, vocab), aligned, [&](uint32_t i, float logit) {
        const bool bad = !(logit < INFINITY);
        const unsigned long long packed = bad ? ~0ull : (uint64_t(key_of(logit)) << 32 | (0xffffffffu - i));
        best = packed > best ? packed : best;
    });
    const auto warp_max = [](unsigned long long x) {
#pragma unroll
        for (int apart = 16; apart > 0; apart /= 2) {
            const unsigned long long other = __shfl_xor_sync(~0u, x, apart);
            x = other > x ? other : x;
        }
        return x;
    };
    best = warp_max(best);
    if (lane == 0) shared.scan[warp] = best;
    __syncthreads();
    best = warp_max(shared.scan[lane]);
    if (num_parts > 1) {
        if (threadIdx.x == 0) {
            partials[size_t(r) * num_parts + blockIdx.x] = best;
            __threadfence();
            shared.is_last = atomicAdd(counters + r, 1) + 1 == num_parts;
        }
        __syncthreads();
        if (!shared.is_last) return;
        __threadfence();
        best = warp_max(lane < num_parts ? __ldcg(partials + size_t(r) * num_parts + lane) : 0);
        if (threadIdx.x == 0) counters[r] = 0;
    }
    const uint32_t largest_key = best >> 32;
    const bool failed = best == ~0ull || largest_key <= kKeyMinusInfinity;
    if (failed || temperature[r] == 0.0f) {
        if (threadIdx.x == 0) ids[r] = failed ? -1 : int(0xffffffffu - uint32_t(best));
        return;
    }

    const Row row = {logits_of_row, vocab, aligned, of_key(largest_key), temperature[r], min_p[r]};
    uint32_t least = kKeyMinusInfinity + 1;
    const auto total = [&](bool by_weight) {
        uint64_t masses[kPivots] = {};
        for_each(row.logits, 0, vocab, aligned, [&](uint32_t, float logit) {
            if (key_of(logit) >= least) masses[0] += row.mass(logit, by_weight);
        });
        add_up(masses, shared);
        return shared.sums[0];
    };
    const uint32_t k = top_k[r];
    if (k > 0 && k < vocab && total(false) > k) least = threshold(row, {false, double(k)}, least - 1, shared);
    if (top_p[r] < 1.0f) {
        const double limit = double(top_p[r]) * double(total(true));
        least = threshold(row, {true, limit}, least - 1, shared);
    }
    const int id = pick(row, least, random_bits(position[r], seed[2 * r], seed[2 * r + 1]) >> 11, shared);
    if (threadIdx.x == 0) ids[r] = id;
}
