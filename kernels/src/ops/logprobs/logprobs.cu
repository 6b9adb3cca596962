// logprobs: the log-softmax of each row at a given token and at the likeliest ones.
//
// Reads    logits [rows, vocab] f32; ids [rows] i32
// Writes   logprob [rows] f32, rank [rows] i32, top_ids [rows, top] i32, top_logprobs [rows, top] f32
// Sums in  double: each thread its own share, then warps in order, so equal bits at every run
// Grid     one block per row; Block 1024 threads
// Moves    vocab * 4 B a row for each pass: two, and one for each of the likeliest, from L2

#include "exp.cuh"
#include "ptx.cuh"

using Packed = unsigned long long;

__device__ __forceinline__ Packed block_max(Packed x, Packed (&of_warp)[32]) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x = max(x, __shfl_xor_sync(~0u, x, apart));
    __syncthreads();
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    x = of_warp[lane];
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x = max(x, __shfl_xor_sync(~0u, x, apart));
    return x;
}

__device__ __forceinline__ double block_sum(double x, double (&of_warp)[32]) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
    __syncthreads();
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    x = of_warp[lane];
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

extern "C" __global__ void __launch_bounds__(1024)
logprobs(const float* __restrict__ logits, const int* __restrict__ ids, float* __restrict__ logprob, int* __restrict__ rank,
         int* __restrict__ top_ids, float* __restrict__ top_logprobs, uint32_t vocab, uint32_t top) {
    __shared__ Packed packs[32];
    __shared__ double sums[32];
    launch_dependents();
    wait_for_previous();
    const uint32_t r = blockIdx.x;
    const float* row = logits + size_t(r) * vocab;
    const bool aligned = vocab % 4 == 0;
    // A key and a lower index count more; all ones for what has no meaning.
    const auto pack = [](uint32_t i, float logit) -> Packed {
        return logit < INFINITY ? Packed(key_of(logit)) << 32 | (0xffffffffu - i) : ~0ull;
    };
    Packed best = 0;
    for_each(row, 0, vocab, aligned, [&](uint32_t i, float logit) { best = max(best, pack(i, logit)); });
    best = block_max(best, packs);
    const int id = ids[r];
    if (best == ~0ull || uint32_t(best >> 32) <= kKeyMinusInfinity) {
        if (threadIdx.x == 0) logprob[r] = NAN, rank[r] = 0;
        for (uint32_t i = threadIdx.x; i < top; i += blockDim.x) top_ids[r * top + i] = -1, top_logprobs[r * top + i] = NAN;
        return;
    }
    const float largest = of_key(best >> 32);
    const bool known = id >= 0 && uint32_t(id) < vocab;
    const Packed own = known ? pack(id, row[id]) : 0;
    double sum = 0.0;
    uint32_t before = 0;
    for_each(row, 0, vocab, aligned, [&](uint32_t i, float logit) {
        sum += double(exact_exp(logit - largest));
        before += pack(i, logit) > own;
    });
    const double normalizer = double(largest) + log(block_sum(sum, sums));
    const double num_before = block_sum(double(before), sums);
    if (threadIdx.x == 0) {
        logprob[r] = known ? float(double(row[id]) - normalizer) : NAN;
        rank[r] = known ? 1 + int(num_before) : 0;
    }
    for (uint32_t t = 0; t < top; ++t) {
        if (t > 0) {
            const Packed last = best;
            best = 0;
            for_each(row, 0, vocab, aligned, [&](uint32_t i, float logit) {
                const Packed packed = pack(i, logit);
                if (packed < last) best = max(best, packed);
            });
            best = block_max(best, packs);
        }
        if (threadIdx.x == 0) {
            top_ids[r * top + t] = int(0xffffffffu - uint32_t(best));
            top_logprobs[r * top + t] = float(double(of_key(best >> 32)) - normalizer);
        }
    }
}
