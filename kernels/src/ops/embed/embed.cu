// embed: y[t] = table[ids[t]]; an id outside the table yields a row of zeros.
//
// Reads    ids [tokens] i32; table [vocab, hidden] bf16, 16-byte aligned
// Writes   y   [tokens, hidden] bf16
// Needs    hidden % 8 == 0
// Grid     one block per token; Block whole warps, each thread 8 elements a turn

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(1024)
embed_bf16(const bf16x8* __restrict__ table, const int* __restrict__ ids, bf16x8* __restrict__ y, uint32_t vocab, uint32_t hidden) {
    // First of a step's kernels, and the other way round than all others: so none of them begins before the step's inputs are there.
    wait_for_previous();
    launch_dependents();
    const uint32_t vectors = hidden / 8;
    const int id = ids[blockIdx.x];
    const bool known = id >= 0 && uint32_t(id) < vocab;
    for (uint32_t i = threadIdx.x; i < vectors; i += blockDim.x)
        y[size_t(blockIdx.x) * vectors + i] = known ? table[size_t(id) * vectors + i] : bf16x8{};
}
