// Passes over memory that compute next to nothing: the limits that kernels are measured against.

#ifndef HYPER_PARALLEL_KERNELS_HOST_MEMORY_PROBE_H_
#define HYPER_PARALLEL_KERNELS_HOST_MEMORY_PROBE_H_

#include "blocks.h"
#include "scale_kernel.h"

namespace hyper_parallel {
namespace {

// Returns a sum, so that no load is left out. A rest below 256 bytes is not read.
template <typename Simd>
uint64_t ReadMemory(const std::byte* data, size_t num_bytes) {
  using Words = typename Simd::Words;
  const Words zero = Simd::template BroadcastWord<uint64_t>(0);
  Words sums[4] = {zero, zero, zero, zero};
  for (size_t at = 0; at + 256 <= num_bytes; at += 256) {
    PrefetchAhead<256>(data + at);
    for (size_t i = 0; i < 4; ++i) {
      const Words words = Simd::LoadWords(data + at + 64 * i);
      sums[i] = Simd::template SubWords<uint64_t>(sums[i], words);
    }
  }
  uint64_t total = 0;
  for (const Words& sum : sums) {
    std::byte bytes[64];
    Simd::StoreWords(bytes, sum);
    for (size_t i = 0; i < 64; i += 8) total += LoadWord<uint64_t>(bytes + i);
  }
  return total;
}

// Writes back what it reads. A rest below 128 bytes is left alone.
template <typename Simd>
void ReadAndWriteMemory(std::byte* data, size_t num_bytes) {
  // The compiler must not see that nothing changes.
  volatile uint64_t all_bits = ~0ull;
  const typename Simd::Words mask = Simd::template BroadcastWord<uint64_t>(all_bits);
  for (size_t at = 0; at + 128 <= num_bytes; at += 128) {
    for (size_t line = at; line < at + 128; line += kCacheLineBytes) {
      PrefetchForWrite(data + line, kWritePrefetchBytes);
      Simd::StoreWords(data + line, Simd::And(Simd::LoadWords(data + line), mask));
    }
  }
}

}  // namespace
}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_MEMORY_PROBE_H_
