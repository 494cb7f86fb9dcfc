// Scaling in place, in float32 (float64 for float64) arithmetic with one rounding to nearest even.
// NaN stays NaN; its sign and payload are not specified.

#ifndef HYPER_PARALLEL_KERNELS_HOST_SCALE_KERNEL_H_
#define HYPER_PARALLEL_KERNELS_HOST_SCALE_KERNEL_H_

#include "blocks.h"

namespace hyper_parallel {
namespace {

inline constexpr size_t kWritePrefetchBytes = 2048;

// Rounds to bfloat16, in the upper half. A NaN with nothing in its lower half stays what it is, and
// there are no others: bfloat16 has none, arithmetic makes none, and NarrowFactor passes none.
HP_INLINE uint32_t RoundToUpperHalf(float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  return bits + 0x7fffu + (bits >> 16 & 1u);
}

HP_INLINE float NarrowFactor(double factor) {
  const float narrow = static_cast<float>(factor);
  return narrow == narrow ? narrow : BitCast<float>(0x7fc00000u);
}

HP_INLINE float ScaleElement(float x, float factor) { return x * factor; }
HP_INLINE double ScaleElement(double x, double factor) { return x * factor; }
// Two bfloat16 at once: each is the upper half of a float32.
HP_INLINE uint32_t ScaleElement(uint32_t pair, float factor) {
  const float low = BitCast<float>(pair << 16) * factor;
  const float high = BitCast<float>(pair & 0xffff0000u) * factor;
  return RoundToUpperHalf(low) >> 16 | (RoundToUpperHalf(high) & 0xffff0000u);
}

// One cache line; the compiler turns it into a few vector operations.
template <typename Item, typename Factor>
HP_INLINE void ScaleLine(std::byte* line, Factor factor) {
  Item items[kCacheLineBytes / sizeof(Item)];
  __builtin_memcpy(items, line, sizeof items);
  for (Item& item : items) item = ScaleElement(item, factor);
  __builtin_memcpy(line, items, sizeof items);
}

// Calls scale_line on every 64 bytes, the last ones by way of a copy filled up with zeros.
template <typename ScaleLine>
HP_INLINE void ForEachLine(std::byte* data, size_t num_bytes, const ScaleLine& scale_line) {
  const size_t num_full = num_bytes / kCacheLineBytes;
  for (size_t i = 0; i < num_full; ++i) {
    PrefetchForWrite(data, kWritePrefetchBytes);
    scale_line(data);
    data += kCacheLineBytes;
  }
  const size_t rest = num_bytes % kCacheLineBytes;
  if (rest != 0) {
    std::byte last[kCacheLineBytes] = {};
    __builtin_memcpy(last, data, rest);
    scale_line(last);
    __builtin_memcpy(data, last, rest);
  }
}

template <typename Simd>
void ScaleFloat32(std::byte* data, size_t numel, double factor) {
  const float narrow = NarrowFactor(factor);
  ForEachLine(data, numel * 4, [=](std::byte* line) HP_INLINE_LAMBDA {
    ScaleLine<float>(line, narrow);
  });
}

template <typename Simd>
void ScaleBFloat16(std::byte* data, size_t numel, double factor) {
  const float narrow = NarrowFactor(factor);
  ForEachLine(data, numel * 2, [=](std::byte* line) HP_INLINE_LAMBDA {
    ScaleLine<uint32_t>(line, narrow);
  });
}

template <typename Simd>
void ScaleFloat16(std::byte* data, size_t numel, double factor) {
  const float narrow = NarrowFactor(factor);
  ForEachLine(data, numel * 2, [=](std::byte* line) HP_INLINE_LAMBDA {
    Simd::ScaleHalves(line, narrow);
    Simd::ScaleHalves(line + kCacheLineBytes / 2, narrow);
  });
}

template <typename Simd>
void ScaleFloat64(std::byte* data, size_t numel, double factor) {
  ForEachLine(data, numel * 8, [=](std::byte* line) HP_INLINE_LAMBDA {
    ScaleLine<double>(line, factor);
  });
}

}  // namespace
}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_SCALE_KERNEL_H_
