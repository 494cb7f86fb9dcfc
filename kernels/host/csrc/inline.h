// Hints to the compiler and the memory system.

#ifndef HYPER_PARALLEL_KERNELS_HOST_INLINE_H_
#define HYPER_PARALLEL_KERNELS_HOST_INLINE_H_

#include <cstddef>
#include <cstdint>

// Kernels are compiled once per instruction set; what they call must become part of them, or the
// linker might pick one instruction set's copy for all.
#define HP_INLINE inline __attribute__((always_inline))
// The same for a lambda, after its parameters.
#define HP_INLINE_LAMBDA __attribute__((always_inline))

// Before a loop over a few vectors: unrolled late, gcc keeps them in memory, not in registers.
#define HP_UNROLL _Pragma("GCC unroll 16")

namespace hyper_parallel {
namespace {

// The address may be past the end of the data: a prefetch never faults.
HP_INLINE void PrefetchForRead(const std::byte* data, size_t distance) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(data) + distance));
}

// The same, but no nearer than the second-level cache.
HP_INLINE void PrefetchFarForRead(const std::byte* data, size_t distance) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(data) + distance),
                     0, 2);
}

HP_INLINE void PrefetchForWrite(const std::byte* data, size_t distance) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(data) + distance),
                     1);
}

}  // namespace
}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_INLINE_H_
