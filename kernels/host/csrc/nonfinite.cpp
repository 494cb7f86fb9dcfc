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
  return WithFormat(format, [=](auto tag) -> double {
    using Format = decltype(tag);
    if (magnitude == kInfinity<Format>) return HUGE_VAL;
    if (magnitude > kInfinity<Format>) return NAN;
    const uint64_t fraction_mask = (uint64_t{1} << Format::kFractionBits) - 1;
    const uint64_t fraction = magnitude & fraction_mask;
    const int biased = static_cast<int>(magnitude >> Format::kFractionBits);
    const uint64_t significand = biased == 0 ? fraction : fraction | (fraction_mask + 1);
    const int exponent = Format::kMinExponent + (biased == 0 ? 0 : biased - 1);
    return std::ldexp(static_cast<double>(significand), exponent - Format::kFractionBits);
  });
}

bool IsFiniteMagnitude(uint64_t magnitude, HyperHostFormat format) {
  return WithFormat(format, [=](auto tag) { return magnitude < kInfinity<decltype(tag)>; });
}

NonfiniteCounts CountNonfinite(const Chunk& chunk) {
  return WithFormat(chunk.format,
                    [&](auto tag) { return Count<decltype(tag)>(chunk.data, chunk.numel); });
}

}  // namespace hyper_parallel
