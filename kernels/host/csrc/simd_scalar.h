// Eight doubles and 64 bytes of words in plain C++. The meaning of every function is told here;
// simd_avx2.h, simd_avx512.h and simd_neon.h have the same functions with the same results, bit
// for bit. Any address will do for loads and stores.

#ifndef HYPER_PARALLEL_KERNELS_HOST_SIMD_SCALAR_H_
#define HYPER_PARALLEL_KERNELS_HOST_SIMD_SCALAR_H_

#include "formats.h"
#include "inline.h"

namespace hyper_parallel {
namespace {

struct SimdScalar {
  static constexpr const char* kName = "scalar";

  struct Doubles {
    double lane[8];
  };
  struct Words {
    uint64_t part[8];
  };

  template <typename Op>
  HP_INLINE static Doubles ForEachLane(const Op& op) {
    Doubles result;
    for (int i = 0; i < 8; ++i) result.lane[i] = op(i);
    return result;
  }

  HP_INLINE static Doubles Broadcast(double x) {
    return ForEachLane([&](int) { return x; });
  }
  HP_INLINE static Doubles Add(Doubles a, Doubles b) {
    return ForEachLane([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  HP_INLINE static Doubles Sub(Doubles a, Doubles b) {
    return ForEachLane([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  HP_INLINE static Doubles Mul(Doubles a, Doubles b) {
    return ForEachLane([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  // a * a + c and a * a - c, only for such a whose square is exact: then it does not matter
  // whether the instruction set fuses the two operations.
  HP_INLINE static Doubles AddExactSquare(Doubles a, Doubles c) { return Add(Mul(a, a), c); }
  HP_INLINE static Doubles SubFromExactSquare(Doubles a, Doubles c) { return Sub(Mul(a, a), c); }
  HP_INLINE static void Store(double* out, Doubles a) { __builtin_memcpy(out, &a, sizeof a); }
  HP_INLINE static Doubles Load(const double* from) {
    Doubles result;
    __builtin_memcpy(&result, from, sizeof result);
    return result;
  }

  // Widens a block of 32 elements. Lanes take elements in order, but for bfloat16: vectors 0 and 2
  // hold the even, 1 and 3 the odd ones of their 16 elements, which needs no shuffle.
  // NaN and infinity in a Float16 may come out as any number.
  HP_INLINE static void LoadBlock(Float32, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      out[v] = ForEachLane([&](int i) {
        return static_cast<double>(BitCast<float>(LoadWord<uint32_t>(block + 32 * v + 4 * i)));
      });
    }
  }
  HP_INLINE static void LoadBlock(BFloat16, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      out[v] = ForEachLane([&](int i) {
        const uint32_t pair = LoadWord<uint32_t>(block + 32 * (v / 2) + 4 * i);
        const uint32_t bits = v % 2 == 0 ? pair << 16 : pair & 0xffff0000u;
        return static_cast<double>(BitCast<float>(bits));
      });
    }
  }
  HP_INLINE static void LoadBlock(Float16, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      out[v] = ForEachLane([&](int i) {
        const uint32_t half = LoadWord<uint16_t>(block + 16 * v + 2 * i);
        const uint32_t bits = (half & 0x8000u) << 16 | (half & 0x7fffu) << 13;
        // The exponent's bias differs by 127 - 15; subnormals come out right as well.
        return static_cast<double>(BitCast<float>(bits) * 0x1p112f);
      });
    }
  }
  HP_INLINE static void LoadBlock(Float64, const std::byte* block, Doubles out[4]) {
    __builtin_memcpy(out, block, 4 * sizeof(Doubles));
  }

  HP_INLINE static Words LoadWords(const std::byte* from) {
    Words result;
    __builtin_memcpy(&result, from, sizeof result);
    return result;
  }
  HP_INLINE static void StoreWords(std::byte* to, Words a) { __builtin_memcpy(to, &a, sizeof a); }

  template <typename Word, typename Op>
  HP_INLINE static Words ForEachWord(Words a, Words b, const Op& op) {
    Word x[64 / sizeof(Word)];
    Word y[64 / sizeof(Word)];
    __builtin_memcpy(x, &a, sizeof x);
    __builtin_memcpy(y, &b, sizeof y);
    for (size_t i = 0; i < 64 / sizeof(Word); ++i) x[i] = op(x[i], y[i]);
    __builtin_memcpy(&a, x, sizeof x);
    return a;
  }
  template <typename Word>
  HP_INLINE static Words BroadcastWord(Word word) {
    return ForEachWord<Word>(Words{}, Words{}, [&](Word, Word) { return word; });
  }
  HP_INLINE static Words And(Words a, Words b) {
    return ForEachWord<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x & y; });
  }
  // Unsigned words that wrap.
  template <typename Word>
  HP_INLINE static Words SubWords(Words a, Words b) {
    return ForEachWord<Word>(a, b, [](Word x, Word y) { return static_cast<Word>(x - y); });
  }
  template <typename Word>
  HP_INLINE static Words Max(Words a, Words b) {
    return ForEachWord<Word>(a, b, [](Word x, Word y) { return x > y ? x : y; });
  }
  template <typename Word>
  HP_INLINE static Words Min(Words a, Words b) {
    return ForEachWord<Word>(a, b, [](Word x, Word y) { return x < y ? x : y; });
  }

  // Multiplies 16 float16 in float32 and rounds each once, to nearest even. NaN stays the NaN it
  // is but for its quiet bit.
  HP_INLINE static void ScaleHalves(std::byte* halves, float factor) {
    for (int i = 0; i < 16; ++i) {
      const uint16_t half = LoadWord<uint16_t>(halves + 2 * i);
      StoreWord(halves + 2 * i, ToHalf(FromHalf(half) * factor));
    }
  }

  HP_INLINE static float FromHalf(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu;
    const uint32_t sign = (half & 0x8000u) << 16;
    const uint32_t finite = BitCast<uint32_t>(BitCast<float>(magnitude << 13) * 0x1p112f);
    const uint32_t special = magnitude << 13 | 0x7f800000u;
    return BitCast<float>(sign | (magnitude >= kInfinity<Float16> ? special : finite));
  }
  HP_INLINE static uint16_t ToHalf(float x) {
    const uint32_t bits = BitCast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Below float16's normal range: float32's own addition rounds at the last place of 2^-24.
    const uint32_t subnormal = BitCast<uint32_t>(BitCast<float>(magnitude) + 0.5f) - 0x3f000000u;
    // Half a last place, less a bit where the kept part is even; the carry may reach infinity.
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
    result = magnitude >= 0x47800000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? nan : result;
    return static_cast<uint16_t>(result | (bits >> 16 & 0x8000u));
  }
};

}  // namespace
}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_SIMD_SCALAR_H_
