// few_rows: y = x weight^T for few rows of x: the weights pass by once, at the speed of the memory.
//
// Reads    x       [rows, in]      bf16, 16-byte aligned
//          weight  [out, in]       bf16, 16-byte aligned
//          squares [rows, in / 16] f32 or null: parts of the sum of squares that x has yet to be normalised by, as `_add` left them;
//                  then y is times 1 / sqrt(sum / in + eps)
// Writes   y       [rows, out] bf16 or f32; _gated: [rows, out / 2] bf16, silu(first half of the outputs) * second half, each rounded
//                  first; _add: bf16, what `residual` becomes times `norm` (f32 [out]), and to `squares_out` [rows, out / 16] its squares
// Updates  _add: residual [rows, out] bf16, which gains the products
// Needs    in % 64 == 0; rows <= 8 * kTiles
// Sums in  fp32: within a warp in the order of in, then over the block's warps in order, so equal bits at every run
// Grid     one block per 16 outputs
// Block    8 warps that share the 16 outputs and take turns along `in`, 64 elements each
// Moves    out * in * 2 B: memory-bound up to about 200 rows. out = 28672, in = 4096: 235 MB, 54 us at 4.39 TB/s
// Shared   kDepth turns of weights a warp: each lane's own queue of 16-byte pieces, which no other lane reads
// Method   The tensor cores take weights as the 16-row side and x as the 8-column side. Which `in` index a lane holds does not matter as
//          long as both sides agree, so each lane takes 16 contiguous bytes of a row and no data changes lanes.
//          Weights do not depend on the kernel before: the first kDepth turns are on their way before the wait for it.

#include "gate.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

constexpr int kWarps = 8;
constexpr int kDepth = 4;
constexpr int kStep = 64;                 // elements of `in` a warp takes a turn: 128 bytes of each of 16 rows
constexpr int kTurnBytes = 16 * kStep * 2;  // 2 KiB: four 16-byte pieces a lane

// Asks for a lane's share of the turn at element k: rows g and g + 8, 8 elements at 0 and 8 at 32.
__device__ __forceinline__ void ask(uint32_t to, const bf16* low, const bf16* high, uint32_t k, bool valid) {
    copy_async(to, low + k, valid);
    copy_async(to + 512, low + k + 32, valid);
    copy_async(to + 1024, high + k, valid);
    copy_async(to + 1536, high + k + 32, valid);
    commit_copies();
}

enum class Store { kPlain, kGated, kAdd };

// What a normalisation that is spread over two products needs.
struct Norm {
    const float* squares;  // of the product before, or null
    float eps;
    const float* weight;  // of kAdd, to end
    bf16* residual;
    float* squares_out;
};

template <int kTiles, Store kStore, typename Out>
__device__ __forceinline__ void few_rows(const bf16* __restrict__ x, const bf16* __restrict__ weight, Out* __restrict__ y, const Norm& norm,
                                         uint32_t rows, uint32_t out, uint32_t in) {
    constexpr bool kGated = kStore == Store::kGated;
    static_assert(kTiles == 1, "a warp for each row's squares, a thread for each output");
    __shared__ float scales[kWarps];
    extern __shared__ __align__(128) uint8_t shared[];
    launch_dependents();
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const uint32_t first = blockIdx.x * (kGated ? 8 : 16), turns = in / kStep;
    // Past the last output the row is the last one again; its results are not stored. Gated, eight gates stand beside their eight ups.
    const uint32_t beside = kGated ? out / 2 : 8;
    const bf16* low = weight + size_t(min(first + g, out - 1)) * in + c * 8;
    const bf16* high = weight + size_t(min(first + g + beside, out - 1)) * in + c * 8;
    uint8_t* queue = shared + warp * kDepth * kTurnBytes + lane * 16;
    const uint32_t queue_address = shared_address(queue);

#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
        const uint32_t turn = warp + i * kWarps;
        ask(queue_address + i * kTurnBytes, low, high, min(turn, turns - 1) * kStep, turn < turns);
    }

    // One of the block's 128 outputs, by the first half of its threads.
    const uint32_t my_row = threadIdx.x / 16, my_output = first + threadIdx.x % 16;
    const bool is_mine = kStore == Store::kAdd && my_row < rows && my_output < out;
    float norm_weight = 0.0f, residual = 0.0f;
    if (is_mine) norm_weight = norm.weight[my_output];

    wait_for_previous();

    if (is_mine) residual = __bfloat162float(norm.residual[size_t(my_row) * out + my_output]);
    // On their way until after the products: the squares of the warp's row.
    const uint32_t num_squares = in / 16;
    const float4* squares = reinterpret_cast<const float4*>(norm.squares + size_t(warp) * num_squares);
    const bool scales_row = norm.squares && warp < rows;
    float4 first_squares[2] = {};
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
        if (scales_row && lane + i * 32 < num_squares / 4) first_squares[i] = squares[lane + i * 32];

    float sums[2][kTiles][4] = {};
    const bf16* x_lane[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) x_lane[t] = x + size_t(min(t * 8 + g, rows - 1)) * in + c * 8;

    uint32_t slot = 0;
    for (uint32_t turn = warp; turn < turns; turn += kWarps) {
        const uint32_t k = turn * kStep;
        bf16x8 b[kTiles][2];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            b[t][0] = *reinterpret_cast<const bf16x8*>(x_lane[t] + k);
            b[t][1] = *reinterpret_cast<const bf16x8*>(x_lane[t] + k + 32);
        }
        wait_for_copies<kDepth - 1>();
        const bf16x8* piece = reinterpret_cast<const bf16x8*>(queue + slot * kTurnBytes);
        const bf16x8 w[2][2] = {{piece[0], piece[32]}, {piece[64], piece[96]}};  // [row g or g + 8][half]
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
#pragma unroll
                for (int t = 0; t < kTiles; ++t)
                    mma(sums[half][t], w[0][half].pairs[2 * pair], w[1][half].pairs[2 * pair], w[0][half].pairs[2 * pair + 1],
                        w[1][half].pairs[2 * pair + 1], b[t][half].pairs[2 * pair], b[t][half].pairs[2 * pair + 1]);
        const uint32_t next = turn + kDepth * kWarps;
        ask(queue_address + slot * kTurnBytes, low, high, min(next, turns - 1) * kStep, next < turns);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
    wait_for_copies<0>();
    if (norm.squares) {
        float sum = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) sum += first_squares[i].x + first_squares[i].y + first_squares[i].z + first_squares[i].w;
        for (uint32_t i = lane + 64; scales_row && i < num_squares / 4; i += 32) {
            const float4 four = squares[i];
            sum += four.x + four.y + four.z + four.w;
        }
        sum = warp_sum(sum);
        if (lane == 0) scales[warp] = rsqrtf(sum / in + norm.eps);
    } else if (lane == 0) {
        scales[warp] = 1.0f;
    }
    __syncthreads();

    // [warp][row of x][output]; rows 17 apart, so that the four lanes of a group write to different banks.
    float* of_warp = reinterpret_cast<float*>(shared);
    constexpr int kRow = 17, kWarpFloats = 8 * kTiles * kRow;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            of_warp[warp * kWarpFloats + (t * 8 + c * 2 + i % 2) * kRow + g + i / 2 * 8] = sums[0][t][i] + sums[1][t][i];
    __syncthreads();
    if constexpr (kGated) {
        for (uint32_t i = threadIdx.x; i < 8 * 8 * kTiles; i += kWarps * 32) {
            const uint32_t row = i / 8, column = i % 8;
            if (row >= rows || first + column >= out / 2) continue;
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                gate += of_warp[w * kWarpFloats + row * kRow + column];
                up += of_warp[w * kWarpFloats + row * kRow + column + 8];
            }
            y[size_t(row) * (out / 2) + first + column] = Out(gated(gate * scales[row], up * scales[row]));
        }
    } else if constexpr (kStore == Store::kAdd) {
        if (threadIdx.x >= 128) return;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += of_warp[w * kWarpFloats + my_row * kRow + threadIdx.x % 16];
        // Rounded where add_rms_norm would find it rounded.
        const bf16 total = __float2bfloat16(residual + __bfloat162float(__float2bfloat16(sum)));
        if (is_mine) {
            norm.residual[size_t(my_row) * out + my_output] = total;
            y[size_t(my_row) * out + my_output] = Out(__bfloat162float(total) * norm_weight);
        }
        float square = is_mine ? __bfloat162float(total) * __bfloat162float(total) : 0.0f;
#pragma unroll
        for (int apart = 8; apart > 0; apart /= 2) square += __shfl_xor_sync(~0u, square, apart);
        if (is_mine && threadIdx.x % 16 == 0) norm.squares_out[size_t(my_row) * gridDim.x + blockIdx.x] = square;
    } else {
        for (uint32_t i = threadIdx.x; i < 16 * 8 * kTiles; i += kWarps * 32) {
            const uint32_t row = i / 16, column = i % 16;
            if (row >= rows || first + column >= out) continue;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) sum += of_warp[w * kWarpFloats + row * kRow + column];
            y[size_t(row) * out + first + column] = Out(sum * scales[row]);
        }
    }
}

#define FEW_ROWS(name, store, type)                                                                                             \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, 2)                                                                \
    name(const bf16* x, const bf16* weight, type* y, const float* squares, float eps, uint32_t rows, uint32_t out, uint32_t in) {  \
        few_rows<1, Store::store, type>(x, weight, y, {squares, eps, nullptr, nullptr, nullptr}, rows, out, in);                 \
    }

FEW_ROWS(few_rows_8_bf16, kPlain, bf16)
FEW_ROWS(few_rows_8_f32, kPlain, float)
FEW_ROWS(few_rows_8_gated, kGated, bf16)

extern "C" __global__ void __launch_bounds__(kWarps * 32, 2)
few_rows_8_add(const bf16* x, const bf16* weight, bf16* y, bf16* residual, const float* norm, float* squares_out, uint32_t rows, uint32_t out,
               uint32_t in) {
    few_rows<1, Store::kAdd, bf16>(x, weight, y, {nullptr, 0.0f, norm, residual, squares_out}, rows, out, in);
}
