// transfer: a small copy between the device's memory and page-locked memory of the host, by the multiprocessors: the stream goes on at
// once, where a copy engine takes some microseconds to be handed the turn and to hand it back.
//
// Reads    from [bytes], 16-byte aligned
// Writes   to   [bytes], likewise
// Needs    bytes % 4 == 0
// Grid     16 bytes a thread; Block 128 threads

#include "ptx.cuh"

extern "C" __global__ void __launch_bounds__(128)
transfer(const uint4* __restrict__ from, uint4* __restrict__ to, uint32_t bytes) {
    launch_dependents();
    wait_for_previous();
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < bytes / 16) to[i] = from[i];
    if (i < bytes % 16 / 4) {
        const uint32_t last = bytes / 16 * 4 + i;
        reinterpret_cast<uint32_t*>(to)[last] = reinterpret_cast<const uint32_t*>(from)[last];
    }
}
