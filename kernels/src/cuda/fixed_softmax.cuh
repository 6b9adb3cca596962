// Attention whose sums depend on positions alone: what fixed_decode.cu and fixed_prefill.cu share, so that they give the same bits.
//
// Keys are cut where their positions say. A stretch is 64 keys, of which each of four chains has 16. A unit is 8 stretches; from stretch 128 on an
// eighth of the power of two at or below its number, so that long sequences have no more than a few dozen. A query's chains in a unit are each
// an online softmax (Dao 2022, arXiv:2205.14135) over 16 keys at a time, in order; a unit joins its chains in order, and a sequence its units.
// What a query does not see changes nothing: its weights are zero, and what is there shrinks by one.
#pragma once

#include "ptx.cuh"

constexpr int kChains = 4;
constexpr int kKeys = 16;                  // of a chain's turn
constexpr int kStretch = kChains * kKeys;  // of a turn of all chains
constexpr float kMinusInfinity = -INFINITY;

// Stretches of the unit that stretch `at` lies in. Units begin at multiples of their length.
__device__ __forceinline__ uint32_t unit_length(uint32_t at) { return at < 128 ? 8 : 1u << (31 - __clz(at) - 3); }
__device__ __forceinline__ uint32_t unit_begin(uint32_t at) { return at & ~(unit_length(at) - 1); }
// Units that `stretches` of them fill or begin to.
__device__ __forceinline__ uint32_t num_units(uint32_t stretches) {
    if (stretches == 0) return 0;
    const uint32_t at = stretches - 1;
    if (at < 128) return at / 8 + 1;
    const uint32_t doublings = 31 - __clz(at) - 7;
    return 16 + 8 * doublings + ((at >> (4 + doublings)) - 8) + 1;
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What a softmax with this maximum shrinks by when it joins one with that.
__device__ __forceinline__ float shrink_to(float maximum, float largest) {
    return maximum == kMinusInfinity ? 0.0f : power_of_2(__fsub_rn(maximum, largest));
}

// `mine`, then `theirs`; both weighed.
__device__ __forceinline__ float join(float mine, float my_shrink, float theirs, float their_shrink) {
    return __fmaf_rn(theirs, their_shrink, __fmul_rn(mine, my_shrink));
}

template <int kDim>
struct KeyTile {
    static constexpr int kPieces = kDim / 8;                  // 16-byte pieces of a row
    static constexpr int kRowPieces = kPieces <= 8 ? 8 : 16;  // a power of two, so that the swizzle stays inside
    static constexpr int kBytes = kKeys * kRowPieces * 16;    // of 16 keys or values
    // Rows eight apart share banks; the swizzle moves each row's pieces so that eight rows of a column do not.
    static __device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t piece) { return (row * kRowPieces + (piece ^ (row % 8))) * 16; }
};

// A warp's 16 query rows, as mma takes them.
template <int kDim>
struct Queries {
    uint32_t at[kDim / 16][4];

    // Row r of the warp's is row `first + r` of a sequence's: query token and head of the KV head. Past the last row: row 0, not stored.
    __device__ __forceinline__ void load(const bf16* qkv, uint32_t first_token, uint32_t qkv_row, uint32_t group, uint32_t head, uint32_t first,
                                         uint32_t rows) {
        const uint32_t g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t r = first + half * 8 + g < rows ? first + half * 8 + g : 0;
            const bf16* row = qkv + size_t(first_token + r / group) * qkv_row + (head * group + r % group) * kDim + c * 2;
#pragma unroll
            for (int d = 0; d < kDim / 16; ++d) {
                at[d][half] = *reinterpret_cast<const uint32_t*>(row + d * 16);
                at[d][2 + half] = *reinterpret_cast<const uint32_t*>(row + d * 16 + 8);
            }
        }
    }
};

// The softmax of 16 query rows, of which a lane has rows g and g + 8: maxima, sums (a lane's own until `end`), and outputs as mma leaves them.
template <int kDim>
struct Softmax {
    float maximum[2], sum[2], o[kDim / 8][4];

    __device__ __forceinline__ void begin() {
        maximum[0] = maximum[1] = kMinusInfinity;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d)
#pragma unroll
            for (int j = 0; j < 4; ++j) o[d][j] = 0.0f;
    }

    // Takes in the 16 keys from `key` on, which lie in shared memory with their values; a row sees keys from first_key to its last.
    __device__ __forceinline__ void see(const Queries<kDim>& q, uint32_t keys, uint32_t values, uint32_t key, uint32_t first_key,
                                        const uint32_t (&last)[2], float scale) {
        using T = KeyTile<kDim>;
        const uint32_t lane = threadIdx.x % 32, c = lane % 4;
        float s[2][4] = {};
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
            uint32_t b[4];
            load_matrices(b, keys + T::offset(lane / 16 * 8 + lane % 8, d * 2 + lane / 8 % 2));
            mma(s[0], q.at[d][0], q.at[d][1], q.at[d][2], q.at[d][3], b[0], b[1]);
            mma(s[1], q.at[d][0], q.at[d][1], q.at[d][2], q.at[d][3], b[2], b[3]);
        }
        uint32_t p[4];
        float shrink[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = maximum[half];
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& score = s[n][half * 2 + j];
                    const uint32_t at = key + n * 8 + c * 2 + j;
                    score = at >= first_key && at <= last[half] ? __fmul_rn(score, scale) : kMinusInfinity;
                    largest = fmaxf(largest, score);
                }
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float base = largest == kMinusInfinity ? 0.0f : largest;
            shrink[half] = shrink_to(maximum[half], base);
            maximum[half] = largest;
            float weights[2][2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int j = 0; j < 2; ++j) weights[n][j] = power_of_2(__fsub_rn(s[n][half * 2 + j], base));
                p[n * 2 + half] = to_pair(weights[n][0], weights[n][1]);
            }
            const float added = __fadd_rn(__fadd_rn(weights[0][0], weights[0][1]), __fadd_rn(weights[1][0], weights[1][1]));
            sum[half] = __fmaf_rn(sum[half], shrink[half], added);
        }
        // Once the largest have been seen, nothing shrinks.
        if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
            for (int d = 0; d < kDim / 8; ++d)
#pragma unroll
                for (int j = 0; j < 4; ++j) o[d][j] = __fmul_rn(o[d][j], shrink[j / 2]);
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
            uint32_t b[4];
            load_matrices_transposed(b, values + T::offset(lane / 8 % 2 * 8 + lane % 8, d * 2 + lane / 16));
            mma(o[2 * d], p[0], p[1], p[2], p[3], b[0], b[1]);
            mma(o[2 * d + 1], p[0], p[1], p[2], p[3], b[2], b[3]);
        }
    }

    // A chain's sums become those of its rows.
    __device__ __forceinline__ void end() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] = __fadd_rn(sum[half], __shfl_xor_sync(~0u, sum[half], 1));
            sum[half] = __fadd_rn(sum[half], __shfl_xor_sync(~0u, sum[half], 2));
        }
    }
};
