// Sums of squares and of powers, in float64.
//
// Squares of float32, bfloat16 and float16 are exact in float64, so only the additions round: the
// relative error of a chunk's sum is below numel / 32 * 2^-53.

#ifndef HYPER_PARALLEL_KERNELS_HOST_MEASURE_KERNEL_H_
#define HYPER_PARALLEL_KERNELS_HOST_MEASURE_KERNEL_H_

#include <cmath>

#include "blocks.h"

namespace hyper_parallel {
namespace {

template <typename Simd>
HP_INLINE double SumVectors(const typename Simd::Doubles sums[4]) {
  return SumLanes<Simd>(Simd::Add(Simd::Add(sums[0], sums[1]), Simd::Add(sums[2], sums[3])));
}

template <typename Simd, typename Format>
SquareSum SumSquares(const std::byte* data, size_t numel) {
  using Doubles = typename Simd::Doubles;
  const Doubles zero = Simd::Broadcast(0.0);
  Doubles sums[4] = {zero, zero, zero, zero};
  MaxMagnitude<Simd, Format> max_magnitude;
  ForEachBlock<Format>(data, numel, [&](const std::byte* block) HP_INLINE_LAMBDA {
    max_magnitude.Add(block);
    Doubles x[4];
    Simd::LoadBlock(Format{}, block, x);
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      if constexpr (Format::kSquaresAreExact) {
        sums[v] = Simd::AddExactSquare(x[v], sums[v]);
      } else {
        sums[v] = Simd::Add(sums[v], Simd::Mul(x[v], x[v]));
      }
    }
  });
  return {SumVectors<Simd>(sums), max_magnitude.Get()};
}

// |x|^n by repeated squaring: 2 log2(n) roundings at most, the same everywhere.
template <typename Simd>
HP_INLINE typename Simd::Doubles IntegerPower(typename Simd::Doubles x, unsigned n) {
  typename Simd::Doubles result = Simd::Broadcast(1.0);
  for (; n != 0; n >>= 1) {
    if ((n & 1u) != 0) result = Simd::Mul(result, x);
    if (n > 1) x = Simd::Mul(x, x);
  }
  return result;
}

template <typename Simd>
HP_INLINE typename Simd::Doubles Magnitudes(typename Simd::Doubles x) {
  double lanes[8];
  Simd::Store(lanes, x);
  for (double& lane : lanes) lane = __builtin_fabs(lane);
  return Simd::Load(lanes);
}

// The C library's pow, one lane at a time: the bits are those of this machine's library.
template <typename Simd>
HP_INLINE typename Simd::Doubles AnyPower(typename Simd::Doubles x, double power) {
  double lanes[8];
  Simd::Store(lanes, x);
  for (double& lane : lanes) lane = pow(lane, power);
  return Simd::Load(lanes);
}

inline constexpr double kMaxIntegerPower = 64.0;

template <typename Simd, typename Format>
double SumPowers(const std::byte* data, size_t numel, double power) {
  using Doubles = typename Simd::Doubles;
  const bool is_integer = power <= kMaxIntegerPower && power == static_cast<int>(power);
  const unsigned integer_power = is_integer ? static_cast<unsigned>(power) : 0;
  const Doubles zero = Simd::Broadcast(0.0);
  Doubles sums[4] = {zero, zero, zero, zero};
  ForEachBlock<Format>(data, numel, [&](const std::byte* block) HP_INLINE_LAMBDA {
    Doubles x[4];
    Simd::LoadBlock(Format{}, block, x);
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      const Doubles magnitudes = Magnitudes<Simd>(x[v]);
      const Doubles powers = is_integer ? IntegerPower<Simd>(magnitudes, integer_power)
                                        : AnyPower<Simd>(magnitudes, power);
      sums[v] = Simd::Add(sums[v], powers);
    }
  });
  return SumVectors<Simd>(sums);
}

template <typename Format>
Census TakeCensus(const std::byte* data, size_t numel) {
  using Word = typename Format::Word;
  Word min_magnitude = kMagnitudeMask<Format>;
  int64_t num_nonzero = 0;
  for (size_t i = 0; i < numel; ++i) {
    const Word bits = LoadWord<Word>(data + i * sizeof(Word));
    const Word magnitude = static_cast<Word>(bits & kMagnitudeMask<Format>);
    min_magnitude = magnitude < min_magnitude ? magnitude : min_magnitude;
    num_nonzero += magnitude != 0;
  }
  return {min_magnitude, num_nonzero};
}

template <typename Simd, typename Format>
Extremes FindExtremes(const std::byte* data, size_t numel) {
  BothExtremes<Simd, Format> extremes;
  ForEachBlock<Format>(
      data, numel, [&](const std::byte* block) HP_INLINE_LAMBDA { extremes.Add(block); });
  return extremes.Get();
}

}  // namespace
}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_MEASURE_KERNEL_H_
