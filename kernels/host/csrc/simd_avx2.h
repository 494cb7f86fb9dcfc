// simd_scalar.h's functions with AVX2, FMA and F16C.

#ifndef HYPER_PARALLEL_KERNELS_HOST_SIMD_AVX2_H_
#define HYPER_PARALLEL_KERNELS_HOST_SIMD_AVX2_H_

#include <immintrin.h>

#include "formats.h"
#include "inline.h"

namespace hyper_parallel {
namespace {

struct SimdAvx2 {
  static constexpr const char* kName = "avx2";

  struct Doubles {
    __m256d low, high;
  };
  struct Words {
    __m256i low, high;
  };

  HP_INLINE static Doubles Broadcast(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
  HP_INLINE static Doubles Add(Doubles a, Doubles b) {
    return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)};
  }
  HP_INLINE static Doubles Sub(Doubles a, Doubles b) {
    return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)};
  }
  HP_INLINE static Doubles Mul(Doubles a, Doubles b) {
    return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)};
  }
  HP_INLINE static Doubles AddExactSquare(Doubles a, Doubles c) {
    return {_mm256_fmadd_pd(a.low, a.low, c.low), _mm256_fmadd_pd(a.high, a.high, c.high)};
  }
  HP_INLINE static Doubles SubFromExactSquare(Doubles a, Doubles c) {
    return {_mm256_fmsub_pd(a.low, a.low, c.low), _mm256_fmsub_pd(a.high, a.high, c.high)};
  }
  HP_INLINE static void Store(double* out, Doubles a) {
    _mm256_storeu_pd(out, a.low);
    _mm256_storeu_pd(out + 4, a.high);
  }
  HP_INLINE static Doubles Load(const double* from) {
    return {_mm256_loadu_pd(from), _mm256_loadu_pd(from + 4)};
  }

  HP_INLINE static void LoadBlock(Float32, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) out[v] = Widen(_mm256_castsi256_ps(Load32Bytes(block + 32 * v)));
  }
  HP_INLINE static void LoadBlock(BFloat16, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; v += 2) {
      const __m256i pairs = Load32Bytes(block + 16 * v);
      const __m256i even = _mm256_slli_epi32(pairs, 16);
      const __m256i odd = _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000));
      out[v] = Widen(_mm256_castsi256_ps(even));
      out[v + 1] = Widen(_mm256_castsi256_ps(odd));
    }
  }
  HP_INLINE static void LoadBlock(Float16, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * v));
      out[v] = Widen(_mm256_cvtph_ps(halves));
    }
  }
  HP_INLINE static void LoadBlock(Float64, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      const Words words = LoadWords(block + 64 * v);
      out[v] = {_mm256_castsi256_pd(words.low), _mm256_castsi256_pd(words.high)};
    }
  }

  HP_INLINE static Words LoadWords(const std::byte* from) {
    return {Load32Bytes(from), Load32Bytes(from + 32)};
  }
  HP_INLINE static void StoreWords(std::byte* to, Words a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), a.high);
  }
  template <typename Word>
  HP_INLINE static Words BroadcastWord(Word word) {
    __m256i half;
    if constexpr (sizeof(Word) == 2) half = _mm256_set1_epi16(static_cast<short>(word));
    if constexpr (sizeof(Word) == 4) half = _mm256_set1_epi32(static_cast<int>(word));
    if constexpr (sizeof(Word) == 8) half = _mm256_set1_epi64x(static_cast<long long>(word));
    return {half, half};
  }
  HP_INLINE static Words And(Words a, Words b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
  }
  template <typename Word>
  HP_INLINE static Words SubWords(Words a, Words b) {
    return {SubHalf<Word>(a.low, b.low), SubHalf<Word>(a.high, b.high)};
  }
  template <typename Word>
  HP_INLINE static Words Max(Words a, Words b) {
    return {MaxHalf<Word>(a.low, b.low), MaxHalf<Word>(a.high, b.high)};
  }
  template <typename Word>
  HP_INLINE static Words Min(Words a, Words b) {
    return {MinHalf<Word>(a.low, b.low), MinHalf<Word>(a.high, b.high)};
  }

  HP_INLINE static void ScaleHalves(std::byte* halves, float factor) {
    for (int i = 0; i < 2; ++i) {
      __m128i* eight = reinterpret_cast<__m128i*>(halves + 16 * i);
      const __m256 scaled =
          _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(eight)), _mm256_set1_ps(factor));
      _mm_storeu_si128(eight, _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
    }
  }

 private:
  HP_INLINE static __m256i Load32Bytes(const std::byte* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  HP_INLINE static Doubles Widen(__m256 x) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)),
            _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
  }
  template <typename Word>
  HP_INLINE static __m256i SubHalf(__m256i a, __m256i b) {
    if constexpr (sizeof(Word) == 2) return _mm256_sub_epi16(a, b);
    if constexpr (sizeof(Word) == 4) return _mm256_sub_epi32(a, b);
    if constexpr (sizeof(Word) == 8) return _mm256_sub_epi64(a, b);
  }
  template <typename Word>
  HP_INLINE static __m256i MaxHalf(__m256i a, __m256i b) {
    if constexpr (sizeof(Word) == 2) return _mm256_max_epu16(a, b);
    if constexpr (sizeof(Word) == 4) return _mm256_max_epu32(a, b);
    if constexpr (sizeof(Word) == 8) return _mm256_blendv_epi8(b, a, Greater64(a, b));
  }
  template <typename Word>
  HP_INLINE static __m256i MinHalf(__m256i a, __m256i b) {
    if constexpr (sizeof(Word) == 2) return _mm256_min_epu16(a, b);
    if constexpr (sizeof(Word) == 4) return _mm256_min_epu32(a, b);
    if constexpr (sizeof(Word) == 8) return _mm256_blendv_epi8(a, b, Greater64(a, b));
  }
  // AVX2 compares signed 64-bit words only; flipping the top bits makes that unsigned.
  HP_INLINE static __m256i Greater64(__m256i a, __m256i b) {
    const __m256i top = _mm256_set1_epi64x(INT64_MIN);
    return _mm256_cmpgt_epi64(_mm256_xor_si256(a, top), _mm256_xor_si256(b, top));
  }
};

}  // namespace
}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_SIMD_AVX2_H_
