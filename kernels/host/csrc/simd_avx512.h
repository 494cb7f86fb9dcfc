// simd_scalar.h's functions with AVX-512 (F, BW, DQ, VL).

#ifndef HYPER_PARALLEL_KERNELS_HOST_SIMD_AVX512_H_
#define HYPER_PARALLEL_KERNELS_HOST_SIMD_AVX512_H_

#include <immintrin.h>

#include "formats.h"
#include "inline.h"

namespace hyper_parallel {
namespace {

struct SimdAvx512 {
  static constexpr const char* kName = "avx512";

  using Doubles = __m512d;
  using Words = __m512i;

  HP_INLINE static Doubles Broadcast(double x) { return _mm512_set1_pd(x); }
  HP_INLINE static Doubles Add(Doubles a, Doubles b) { return _mm512_add_pd(a, b); }
  HP_INLINE static Doubles Sub(Doubles a, Doubles b) { return _mm512_sub_pd(a, b); }
  HP_INLINE static Doubles Mul(Doubles a, Doubles b) { return _mm512_mul_pd(a, b); }
  HP_INLINE static Doubles AddExactSquare(Doubles a, Doubles c) {
    return _mm512_fmadd_pd(a, a, c);
  }
  HP_INLINE static Doubles SubFromExactSquare(Doubles a, Doubles c) {
    return _mm512_fmsub_pd(a, a, c);
  }
  HP_INLINE static void Store(double* out, Doubles a) { _mm512_storeu_pd(out, a); }
  HP_INLINE static Doubles Load(const double* from) { return _mm512_loadu_pd(from); }

  HP_INLINE static void LoadBlock(Float32, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      out[v] = _mm512_cvtps_pd(_mm256_castsi256_ps(Load32Bytes(block + 32 * v)));
    }
  }
  HP_INLINE static void LoadBlock(BFloat16, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; v += 2) {
      const __m256i pairs = Load32Bytes(block + 16 * v);
      const __m256i even = _mm256_slli_epi32(pairs, 16);
      const __m256i odd = _mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000));
      out[v] = _mm512_cvtps_pd(_mm256_castsi256_ps(even));
      out[v + 1] = _mm512_cvtps_pd(_mm256_castsi256_ps(odd));
    }
  }
  HP_INLINE static void LoadBlock(Float16, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * v));
      out[v] = _mm512_cvtps_pd(_mm256_cvtph_ps(halves));
    }
  }
  HP_INLINE static void LoadBlock(Float64, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) out[v] = _mm512_castsi512_pd(LoadWords(block + 64 * v));
  }

  HP_INLINE static Words LoadWords(const std::byte* from) { return _mm512_loadu_si512(from); }
  HP_INLINE static void StoreWords(std::byte* to, Words a) { _mm512_storeu_si512(to, a); }
  template <typename Word>
  HP_INLINE static Words BroadcastWord(Word word) {
    if constexpr (sizeof(Word) == 2) return _mm512_set1_epi16(static_cast<short>(word));
    if constexpr (sizeof(Word) == 4) return _mm512_set1_epi32(static_cast<int>(word));
    if constexpr (sizeof(Word) == 8) return _mm512_set1_epi64(static_cast<long long>(word));
  }
  HP_INLINE static Words And(Words a, Words b) { return _mm512_and_si512(a, b); }
  template <typename Word>
  HP_INLINE static Words SubWords(Words a, Words b) {
    if constexpr (sizeof(Word) == 2) return _mm512_sub_epi16(a, b);
    if constexpr (sizeof(Word) == 4) return _mm512_sub_epi32(a, b);
    if constexpr (sizeof(Word) == 8) return _mm512_sub_epi64(a, b);
  }
  template <typename Word>
  HP_INLINE static Words Max(Words a, Words b) {
    if constexpr (sizeof(Word) == 2) return _mm512_max_epu16(a, b);
    if constexpr (sizeof(Word) == 4) return _mm512_max_epu32(a, b);
    if constexpr (sizeof(Word) == 8) return _mm512_max_epu64(a, b);
  }
  template <typename Word>
  HP_INLINE static Words Min(Words a, Words b) {
    if constexpr (sizeof(Word) == 2) return _mm512_min_epu16(a, b);
    if constexpr (sizeof(Word) == 4) return _mm512_min_epu32(a, b);
    if constexpr (sizeof(Word) == 8) return _mm512_min_epu64(a, b);
  }

  HP_INLINE static void ScaleHalves(std::byte* halves, float factor) {
    const __m512 wide = _mm512_cvtph_ps(Load32Bytes(halves));
    const __m512 scaled = _mm512_mul_ps(wide, _mm512_set1_ps(factor));
    const __m256i rounded = _mm512_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves), rounded);
  }

 private:
  HP_INLINE static __m256i Load32Bytes(const std::byte* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
};

}  // namespace
}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_SIMD_AVX512_H_
