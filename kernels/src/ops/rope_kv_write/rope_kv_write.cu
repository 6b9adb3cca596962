// rope_kv_write: turns queries in place, and puts turned keys and plain values into the paged cache.
//
// Updates  qkv          [tokens, (heads + 2 kv_heads) * dim] bf16, 16-byte aligned: the queries
// Writes   k, v         [blocks, kv_heads, block_size, dim] bf16, token by token
// Reads    positions    [tokens] i32; cos_sin [max_positions, dim] f32, cosines first
//          cu_tokens    [seqs + 1] i32, block_tables [seqs, max_blocks] i32
// Needs    dim % 16 == 0; all of a head turns
// Grid     one block per token; Block 128 threads, each 8 pairs (i, i + dim / 2) of a head, or 8 values, a turn
// Source   Su et al. 2021, arXiv:2104.09864

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(128)
rope_kv_write_bf16(bf16* __restrict__ qkv, bf16* __restrict__ k, bf16* __restrict__ v, const int* __restrict__ positions,
                   const float* __restrict__ cos_sin, const int* __restrict__ cu_tokens, const int* __restrict__ block_tables,
                   uint32_t seqs, uint32_t heads, uint32_t kv_heads, uint32_t dim, uint32_t block_size, uint32_t max_blocks,
                   uint32_t max_positions) {
    launch_dependents();
    wait_for_previous();
    const uint32_t token = blockIdx.x;
    // A graph replays with fewer tokens than it was captured for: those past the last belong to no sequence.
    if (token >= uint32_t(cu_tokens[seqs])) return;
    // The sequence whose tokens include this one: the last that begins at or before it and is not empty.
    uint32_t low = 0, high = seqs;
    while (low + 1 < high) {
        const uint32_t middle = (low + high) / 2;
        if (uint32_t(cu_tokens[middle]) <= token)
            low = middle;
        else
            high = middle;
    }
    const uint32_t position = positions[token];
    if (position >= max_positions || position / block_size >= max_blocks) return;
    const uint32_t block = block_tables[size_t(low) * max_blocks + position / block_size];
    const size_t first_row = size_t(block) * kv_heads * block_size + position % block_size;
    bf16* row = qkv + size_t(token) * (heads + 2 * kv_heads) * dim;
    const float* cosines = cos_sin + size_t(position) * dim;

    const uint32_t half = dim / 2, vectors = half / 8, turned = (heads + kv_heads) * vectors;
    for (uint32_t i = threadIdx.x; i < turned; i += blockDim.x) {
        const uint32_t head = i / vectors, d = i % vectors * 8;
        const float8 x = to_float(*reinterpret_cast<const bf16x8*>(row + head * dim + d));
        const float8 z = to_float(*reinterpret_cast<const bf16x8*>(row + head * dim + half + d));
        float8 first, second;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float c = cosines[d + j], s = cosines[half + d + j];
            first.at[j] = x.at[j] * c - z.at[j] * s;
            second.at[j] = z.at[j] * c + x.at[j] * s;
        }
        bf16* to = head < heads ? row + head * dim : k + (first_row + size_t(head - heads) * block_size) * dim;
        *reinterpret_cast<bf16x8*>(to + d) = to_bf16(first);
        *reinterpret_cast<bf16x8*>(to + half + d) = to_bf16(second);
    }
    const bf16* values = row + (heads + kv_heads) * dim;
    for (uint32_t i = threadIdx.x; i < kv_heads * dim / 8; i += blockDim.x) {
        const uint32_t head = i * 8 / dim, d = i * 8 % dim;
        *reinterpret_cast<bf16x8*>(v + (first_row + size_t(head) * block_size) * dim + d) =
            *reinterpret_cast<const bf16x8*>(values + head * dim + d);
    }
}
