// How many drafts of each sequence hold, and what goes on from it: a thread a sequence, in one block.

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(128)
held_drafts(const int* __restrict__ fed, const int* __restrict__ picked, int* __restrict__ tokens, int* __restrict__ rows,
            int* __restrict__ positions, int* __restrict__ kv_lens, uint32_t seqs, uint32_t each, uint32_t num_positions,
            uint32_t num_kv_lens) {
    launch_dependents();
    wait_for_previous();
    for (uint32_t s = threadIdx.x; s < seqs; s += blockDim.x) {
        const uint32_t first = s * each;
        int held = rows[s];
        if (held < 0)
            for (held = 0; uint32_t(held) + 1 < each && fed[first + held + 1] == picked[first + held];) held++;
        rows[s] = int(first) + held;
        for (uint32_t i = 0; i < each; i++)
            tokens[first + i] = int(i) < held && i + 1 < each ? fed[first + i + 1] : picked[first + i];
        for (uint32_t i = s; i < num_positions; i += seqs) positions[i] += held;
        for (uint32_t i = s; i < num_kv_lens; i += seqs) kv_lens[i] += held;
    }
}
