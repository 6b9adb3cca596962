// Hopper's copies of tiles into shared memory by one thread, and the barriers that say when they are there.
#pragma once

#include <stdint.h>

// What the driver encodes of a matrix in global memory and the tiles taken from it; passed by value.
struct alignas(64) TensorMap {
    uint8_t bytes[128];
};

// A barrier of a phase completes when `arrivals` have come and all bytes it was told to expect have been copied.
__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// By the thread that initialised barriers, before the block's first __syncthreads.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Until the phase of this parity has completed. Phases count from 0; the one before the first counts as completed.
__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

// Copies the map's tile that begins at column x of row y.
__device__ __forceinline__ void copy_tile(uint32_t to_shared, const TensorMap* map, uint32_t x, uint32_t y, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to_shared),
                 "l"(map), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}

// Stores at this place in a block of the cluster.
__device__ __forceinline__ void store_at(uint32_t block, uint32_t place, uint64_t value) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.u64 [there], %2;\n}" ::"r"(place),
                 "r"(block), "l"(value)
                 : "memory");
}
// All threads of the cluster's blocks.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Barriers among `threads` of a block, by number; 0 is __syncthreads.
__device__ __forceinline__ void sync_some(uint32_t number, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_some(uint32_t number, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Registers of a thread, from here on; by all warps of a warpgroup.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
