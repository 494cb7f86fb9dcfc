// Sums of squares without any rounding, so that no order of elements can matter.
//
// A square x^2 (exact in float64) is cut into levels of kLevelBits bits below 2^top. Level k is
// an accumulator held in one binade of float64, between 2^52 and 2^53 of its units
// u(k) = 2^(top - (k + 1) * kLevelBits): adding to it rounds to whole units, and what was rounded
// off comes out exactly and goes on to the next level (as in Demmel and Nguyen, "Parallel
// Reproducible Summation", 2015, whose bins these are). All bits of all squares are caught if
// those of the largest and of the smallest element are, which the caller checks by the extremes.

#ifndef HYPER_PARALLEL_KERNELS_HOST_EXACT_KERNEL_H_
#define HYPER_PARALLEL_KERNELS_HOST_EXACT_KERNEL_H_

#include <type_traits>

#include "blocks.h"

namespace hyper_parallel {
namespace {

// Each addition moves an accumulator by at most 2^kLevelBits units and must not take it out of its
// binade, in the middle of which it starts.
inline constexpr size_t kBlocksPerFlush = size_t{1} << (51 - kLevelBits);

template <typename Simd, int kLevels>
class Levels {
 public:
  using Doubles = typename Simd::Doubles;
  static constexpr int kVectors = 4;

  HP_INLINE explicit Levels(int top) {
    HP_UNROLL
    for (int k = 0; k < kLevels; ++k) {
      start_[k] = OneAndAHalfTimesTwoTo(52 + top - (k + 1) * kLevelBits);
      HP_UNROLL
      for (int v = 0; v < kVectors; ++v) sums_[k][v] = Simd::Broadcast(start_[k]);
      for (int lane = 0; lane < 8; ++lane) units_[k][lane] = 0;
    }
  }

  HP_INLINE void AddSquares(const Doubles x[kVectors]) {
    HP_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const Doubles first = Simd::AddExactSquare(x[v], sums_[0][v]);
      Doubles rest = Simd::SubFromExactSquare(x[v], Simd::Sub(first, sums_[0][v]));
      sums_[0][v] = first;
      HP_UNROLL
      for (int k = 1; k < kLevels - 1; ++k) {
        const Doubles next = Simd::Add(sums_[k][v], rest);
        rest = Simd::Sub(rest, Simd::Sub(next, sums_[k][v]));
        sums_[k][v] = next;
      }
      sums_[kLevels - 1][v] = Simd::Add(sums_[kLevels - 1][v], rest);
    }
  }

  // Moves whole units to integers. Within a binade a float64's bits count them.
  HP_INLINE void Flush() {
    HP_UNROLL
    for (int k = 0; k < kLevels; ++k) {
      const uint64_t start_bits = BitCast<uint64_t>(start_[k]);
      HP_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        double lanes[8];
        Simd::Store(lanes, sums_[k][v]);
        for (int lane = 0; lane < 8; ++lane) {
          units_[k][lane] += BitCast<uint64_t>(lanes[lane]) - start_bits;
        }
        sums_[k][v] = Simd::Broadcast(start_[k]);
      }
    }
  }

  HP_INLINE int64_t Units(int k) const {
    uint64_t sum = 0;
    for (const uint64_t lane : units_[k]) sum += lane;
    return static_cast<int64_t>(sum);
  }

 private:
  HP_INLINE static double OneAndAHalfTimesTwoTo(int exponent) {
    constexpr uint64_t kHalf = uint64_t{1} << 51;
    return BitCast<double>(static_cast<uint64_t>(exponent + 1023) << 52 | kHalf);
  }

  Doubles sums_[kLevels][kVectors];
  // Two's complement: where the window does not hold the chunk, they may wrap, and are not used.
  uint64_t units_[kLevels][8];
  double start_[kLevels];
};

// Whether two levels hold all squares of a format, so that the smallest element does not matter.
template <typename Format>
inline constexpr bool kTwoLevelsHoldAll =
    Format::kMaxSquareExponent + kWindowHeadroom -
        2 * (Format::kMinExponent - Format::kFractionBits) <=
    2 * kLevelBits;

template <typename Simd, typename Format>
using ExtremesThatMatter =
    std::conditional_t<kTwoLevelsHoldAll<Format>, MaxMagnitude<Simd, Format>,
                       BothExtremes<Simd, Format>>;

HP_INLINE Extremes ToExtremes(Extremes extremes) { return extremes; }
HP_INLINE Extremes ToExtremes(uint64_t max_magnitude) { return {max_magnitude, 1}; }

// numel: at most kExactChunkNumel (work_plan.h), so that units fit an int64.
template <typename Simd, typename Format, int kLevels>
void SumExactly(const std::byte* data, size_t numel, int top, LeveledSum* result) {
  static_assert(kLevels >= 2);
  constexpr size_t kFlushNumel = kBlocksPerFlush * kBlockNumel;
  Levels<Simd, kLevels> levels(top);
  ExtremesThatMatter<Simd, Format> extremes;
  while (numel != 0) {
    const size_t part = numel < kFlushNumel ? numel : kFlushNumel;
    ForEachBlock<Format>(data, part, [&](const std::byte* block) HP_INLINE_LAMBDA {
      extremes.Add(block);
      typename Simd::Doubles x[4];
      Simd::LoadBlock(Format{}, block, x);
      levels.AddSquares(x);
    });
    levels.Flush();
    data += part * sizeof(typename Format::Word);
    numel -= part;
  }
  HP_UNROLL
  for (int k = 0; k < kMaxLevels; ++k) result->units[k] = k < kLevels ? levels.Units(k) : 0;
  result->extremes = ToExtremes(extremes.Get());
}

}  // namespace
}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_EXACT_KERNEL_H_
