// moe_route: each token's best experts by their scores, the best first, and what each counts. To the bits of route.rs.
//
// Updates  logits  [tokens, experts] f32, which become scores: a softmax over the experts of a token, or the sigmoid of each
// Reads    bias    [experts] f32 or null: added to scores for choosing
// Writes   ids     [tokens, top_k] i32, all different, whatever the logits are; weights [tokens, top_k] f32
// Needs    experts <= 1024; as Router::check has it
//          and, if pairs is not null, what moe_permute.cu writes of these ids; then there is one block
// Grid     a warp for each token; Block 4 warps
// Shared   chosen [4, top_k] u32; of each warp: scores [experts] f32, keys [experts] u32, and with groups their keys [groups] u32
// Method   What is chosen is the largest key, which falls to 0, until there are enough. Of equal keys the first. A lane has those of every 32nd expert.
// Moves    tokens * experts * 8 B; one token takes as long as its chain of choices

#include "exp.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

constexpr uint32_t kWarps = 4;
constexpr uint32_t kLanes = 16;  // partial sums of math.rs
constexpr float kTiny = 1e-20f;

struct Router {
    uint32_t experts, top_k;
    uint32_t sigmoid;
    uint32_t groups, top_groups;  // 0 groups: any expert may be chosen
    uint32_t top_two;             // a group counts the sum of its two best, not its best
    uint32_t normalize;
    float scale;
};

// Larger scores have larger keys, and none has 0.
__device__ __forceinline__ uint32_t choice_key(float score) { return max(key_of(score), 1u); }

// The first of the largest keys; by a whole warp.
__device__ __forceinline__ uint32_t best_of(const uint32_t* keys, uint32_t count, uint32_t lane) {
    uint32_t best = 0, at = count - 1;
    for (uint32_t i = lane; i < count; i += 32)
        if (keys[i] > best) best = keys[i], at = i;
    const uint32_t largest = __reduce_max_sync(~0u, best);
    return __reduce_min_sync(~0u, best == largest ? at : count - 1);
}

// What a group of experts counts, of its keys.
__device__ __forceinline__ float group_score(const uint32_t* keys, uint32_t size, bool top_two) {
    const float nothing = of_key(kKeyMinusInfinity);
    float first = nothing, second = nothing;
    for (uint32_t i = 0; i < size; ++i) {
        const float score = of_key(keys[i]);
        if (score > first)
            second = first, first = score;
        else if (score > second)
            second = score;
    }
    return top_two && size > 1 ? __fadd_rn(first, second) : first;
}

// The experts with the largest keys, the best first, and the sum of their scores; by a whole warp.
template <uint32_t kEach>
__device__ __forceinline__ float choose(const uint32_t* keys, const float* scores, uint32_t experts, uint32_t top_k, uint32_t lane, uint32_t* chosen) {
    uint32_t own[kEach];
#pragma unroll
    for (uint32_t j = 0; j < kEach; ++j) own[j] = lane + j * 32 < experts ? keys[lane + j * 32] : 0;
    float sum = 0.0f;
    for (uint32_t i = 0; i < top_k; ++i) {
        uint32_t best = own[0], at = lane;
#pragma unroll
        for (uint32_t j = 1; j < kEach; ++j)
            if (own[j] > best) best = own[j], at = lane + j * 32;
        const uint32_t largest = __reduce_max_sync(~0u, best);
        const uint32_t expert = __reduce_min_sync(~0u, best == largest ? at : experts - 1);
#pragma unroll
        for (uint32_t j = 0; j < kEach; ++j)
            if (expert == lane + j * 32) own[j] = 0;
        sum = __fadd_rn(sum, scores[expert]);
        if (lane == 0) chosen[i] = expert;
    }
    return sum;
}

// By a whole warp; `own` is its part of the shared memory.
__device__ __forceinline__ void route_token(float* row, const float* bias, int* ids, float* weights, const Router& router, uint32_t lane,
                                            uint32_t* own, uint32_t* chosen) {
    const uint32_t experts = router.experts, top_k = router.top_k;
    float* const scores = reinterpret_cast<float*>(own);
    uint32_t *const keys = own + experts, *const group_keys = keys + experts;
    if (router.sigmoid) {
        for (uint32_t i = lane; i < experts; i += 32) scores[i] = __fdiv_rn(1.0f, __fadd_rn(1.0f, exact_exp(-row[i])));
    } else {
        float largest = of_key(kKeyMinusInfinity);
#pragma unroll 4
        for (uint32_t i = lane; i < experts; i += 32) largest = fmaxf(largest, scores[i] = row[i]);
        largest = warp_max(largest);
        for (uint32_t i = lane; i < experts; i += 32) scores[i] = exact_exp(__fsub_rn(scores[i], largest));
        __syncwarp();
        // In the order of the reference: element i in partial sum i % 16, then halves are added.
        float sum = 0.0f;
#pragma unroll 8
        for (uint32_t i = lane; lane < kLanes && i < experts; i += kLanes) sum = __fadd_rn(sum, scores[i]);
#pragma unroll
        for (uint32_t apart = kLanes / 2; apart > 0; apart /= 2) sum = __fadd_rn(sum, __shfl_down_sync(~0u, sum, apart));
        sum = __shfl_sync(~0u, sum, 0);
        for (uint32_t i = lane; i < experts; i += 32) scores[i] = __fdiv_rn(scores[i], sum);
    }
    for (uint32_t i = lane; i < experts; i += 32) {
        row[i] = scores[i];
        keys[i] = choice_key(bias ? __fadd_rn(scores[i], bias[i]) : scores[i]);
    }
    __syncwarp();

    if (router.groups) {
        const uint32_t size = experts / router.groups;
        for (uint32_t i = lane; i < router.groups; i += 32) group_keys[i] = choice_key(group_score(keys + i * size, size, router.top_two));
        __syncwarp();
        for (uint32_t i = 0; i < router.top_groups; ++i) {
            const uint32_t group = best_of(group_keys, router.groups, lane);
            __syncwarp();
            if (lane == 0) group_keys[group] = 0;
            __syncwarp();
        }
        for (uint32_t i = lane; i < experts; i += 32)
            if (group_keys[i / size] != 0) keys[i] = 0;
        __syncwarp();
    }

    const float sum = experts <= 128 ? choose<4>(keys, scores, experts, top_k, lane, chosen)
                      : experts <= 256 ? choose<8>(keys, scores, experts, top_k, lane, chosen)
                                       : choose<32>(keys, scores, experts, top_k, lane, chosen);
    __syncwarp();
    const float divisor = router.normalize ? __fadd_rn(sum, kTiny) : 1.0f;
    for (uint32_t i = lane; i < top_k; i += 32) {
        ids[i] = chosen[i];
        weights[i] = __fmul_rn(__fdiv_rn(scores[chosen[i]], divisor), router.scale);
    }
}

extern "C" __global__ void __launch_bounds__(kWarps * 32)
moe_route(float* logits, const float* bias, int* ids, float* weights, int* pairs, int* places, int* offsets, uint32_t tokens, Router router) {
    extern __shared__ __align__(16) uint32_t shared[];
    launch_dependents();
    const uint32_t experts = router.experts, top_k = router.top_k, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t token = blockIdx.x * kWarps + warp;
    uint32_t* const chosen = shared + warp * top_k;
    uint32_t* const own = shared + kWarps * top_k + warp * (2 * experts + router.groups);
    wait_for_previous();
    if (token < tokens)
        route_token(logits + size_t(token) * experts, bias, ids + size_t(token) * top_k, weights + size_t(token) * top_k, router, lane, own, chosen);
    if (!pairs) return;

    __syncthreads();
    const uint32_t num_pairs = tokens * top_k;
    for (uint32_t expert = threadIdx.x; expert < experts; expert += kWarps * 32) {
        uint32_t fewer = 0;
        uint64_t own_pairs = 0;
        for (uint32_t i = 0; i < num_pairs; i += 8) {
            uint32_t equal = 0;
#pragma unroll
            for (uint32_t j = 0; j < 8; ++j) {
                const uint32_t chosen_by = i + j < num_pairs ? shared[i + j] : experts;
                fewer += chosen_by < expert, equal |= uint32_t(chosen_by == expert) << j;
            }
            own_pairs |= uint64_t(equal) << i;
        }
        offsets[expert] = fewer;
        for (; own_pairs != 0; own_pairs &= own_pairs - 1, ++fewer) {
            const uint32_t pair = __ffsll(own_pairs) - 1;
            pairs[fewer] = pair, places[pair] = fewer;
        }
    }
    if (threadIdx.x == 0) offsets[experts] = num_pairs;
}
