// moe_permute: pairs of a token and its choice, by expert; those of one expert keep their order.
//
// Reads    ids     [pairs] i32: experts; what is none counts as the last
// Writes   pairs   [pairs] i32, by expert; places [pairs] i32: where each pair stands in it
//          offsets [experts + 1] i32: where each expert's pairs begin; then their number
// Grid     one block per expert, which counts the pairs of those before it and places its own, so that no block waits for another
// Block    whole warps, each with a stretch of neighbouring pairs
// Moves    experts * pairs * 4 B, from L2

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(1024)
moe_permute(const int* ids, int* pairs, int* places, int* offsets, uint32_t num_pairs, uint32_t experts) {
    __shared__ uint32_t fewer_of[32], own_of[32];
    launch_dependents();
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, expert = blockIdx.x;
    // Of whole turns of a warp.
    const uint32_t stretch = ((num_pairs + 31) / 32 + warps - 1) / warps * 32;
    const uint32_t begin = min(num_pairs, warp * stretch), end = min(num_pairs, begin + stretch);
    wait_for_previous();
    const auto chosen = [&](uint32_t pair) { return min(uint32_t(ids[pair]), experts - 1); };

    uint32_t fewer = 0, own = 0;
    const auto count = [&](uint32_t id) { fewer += id < expert, own += id == expert; };
    uint32_t i = begin + lane;
    // Eight at a time, so that their loads are on their way together.
    for (; i + 7 * 32 < end; i += 8 * 32) {
        uint32_t eight[8];
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) eight[j] = chosen(i + j * 32);
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) count(eight[j]);
    }
    for (; i < end; i += 32) count(chosen(i));
    fewer = __reduce_add_sync(~0u, fewer), own = __reduce_add_sync(~0u, own);
    if (lane == 0) fewer_of[warp] = fewer, own_of[warp] = own;
    __syncthreads();
    const uint32_t before = __reduce_add_sync(~0u, lane < warps ? fewer_of[lane] : 0);
    uint32_t place = before + __reduce_add_sync(~0u, lane < warp ? own_of[lane] : 0);
    if (threadIdx.x == 0) {
        offsets[expert] = before;
        if (expert == experts - 1) offsets[experts] = num_pairs;
    }
    if (own == 0) return;
#pragma unroll 4
    for (uint32_t base = begin; base < end; base += 32) {
        const bool is_own = base + lane < end && chosen(base + lane) == expert;
        const uint32_t of_turn = __ballot_sync(~0u, is_own);
        if (is_own) {
            const uint32_t at = place + __popc(of_turn & ((1u << lane) - 1));
            pairs[at] = base + lane;
            places[base + lane] = at;
        }
        place += __popc(of_turn);
    }
}
