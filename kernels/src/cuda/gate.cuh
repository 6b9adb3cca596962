// silu(gate) * up, of values that would have been stored as bf16 in between.
#pragma once

#include "types.cuh"

__device__ __forceinline__ float gated(float gate, float up) {
    gate = __bfloat162float(__float2bfloat16(gate)), up = __bfloat162float(__float2bfloat16(up));
    return gate / (1.0f + __expf(-gate)) * up;
}
