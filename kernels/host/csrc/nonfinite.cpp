#include "nonfinite.h"

#include <cmath>

#include "formats.h"

namespace hyper_parallel {
namespace {

// Calls visit(format's tag).
template <typename Visit>
auto WithFormat(HyperHostFormat format, const Visit& visit) {
  switch (format) {
    case HYPER_HOST_FLOAT32:
      return visit(Float32{});
    case HYPER_HOST_BFLOAT16:
      return visit(BFloat16{});
    case HYPER_HOST_FLOAT16:
      return visit(Float16{});
    case HYPER_HOST_FLOAT64:
      break;
  }
  return visit(Float64{});
}

template <typename Format>
NonfiniteCounts Count(const std::byte* data, size_t numel) {
  using Word = typename Format::Word;
  NonfiniteCounts counts;
  for (size_t i = 0; i < numel; ++i) {
    const Word bits = LoadWord<Word>(data + i * sizeof(Word));
    const Word magnitude = static_cast<Word>(bits & kMagnitudeMask<Format>);
    counts.num_nan += magnitude > kInfinity<Format>;
    counts.num_inf += magnitude == kInfinity<Format>;
  }
  return counts;
}

}  // namespace

double MagnitudeValue(uint64_t magnitude, HyperHostFormat format) {
  const auto bits = static_cast<uint32_t>(magnitude);
  switch (format) {
    case HYPER_HOST_FLOAT32:
      return BitCast<float>(bits);
    case HYPER_HOST_BFLOAT16:
      return BitCast<float>(bits << 16);
    case HYPER_HOST_FLOAT16:
      if (bits == kInfinity<Float16>) return HUGE_VAL;
      if (bits > kInfinity<Float16>) return NAN;
      // The exponent's bias differs by 127 - 15; subnormals come out right as well.
      return BitCast<float>(bits << 13) * 0x1p112f;
    case HYPER_HOST_FLOAT64:
      break;
  }
  return BitCast<double>(magnitude);
}

bool IsFiniteMagnitude(uint64_t magnitude, HyperHostFormat format) {
  return WithFormat(format, [=](auto tag) { return magnitude < kInfinity<decltype(tag)>; });
}

NonfiniteCounts CountNonfinite(const Chunk& chunk) {
  return WithFormat(chunk.format,
                    [&](auto tag) { return Count<decltype(tag)>(chunk.data, chunk.numel); });
}

}  // namespace hyper_parallel
