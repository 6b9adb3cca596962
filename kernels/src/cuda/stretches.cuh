// The work of decode attention: pairs of a sequence and a KV head, one after the other, each a number of stretches of kStretch keys.

#pragma once

#include <cstdint>

// Stretches of each of a sequence's pairs; none if it has no tokens in this step, or too many.
template <int kStretch, typename Shape>
__device__ __forceinline__ uint32_t num_stretches(const int* cu_tokens, const int* kv_lens, uint32_t seq, const Shape& shape) {
    if (seq >= shape.seqs) return 0;
    const uint32_t rows = uint32_t(cu_tokens[seq + 1] - cu_tokens[seq]) * (shape.heads / shape.kv_heads);
    return rows == 0 || rows > shape.most_rows ? 0 : (uint32_t(kv_lens[seq]) + kStretch - 1) / kStretch;
}

// The pair after (seq, head) that has stretches, and how many; past the last, sequence shape.seqs.
template <int kStretch, typename Shape>
__device__ __forceinline__ void next_pair(const int* cu_tokens, const int* kv_lens, const Shape& shape, uint32_t& seq, uint32_t& head,
                                          uint32_t& num) {
    if (++head < shape.kv_heads) return;
    head = 0;
    do {
        ++seq;
        num = num_stretches<kStretch>(cu_tokens, kv_lens, seq, shape);
    } while (num == 0 && seq < shape.seqs);
}
