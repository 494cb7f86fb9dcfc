// simd_scalar.h's functions with NEON on aarch64.

#ifndef HYPER_PARALLEL_KERNELS_HOST_SIMD_NEON_H_
#define HYPER_PARALLEL_KERNELS_HOST_SIMD_NEON_H_

#include <arm_neon.h>

#include "formats.h"
#include "inline.h"

namespace hyper_parallel {
namespace {

struct SimdNeon {
  static constexpr const char* kName = "neon";

  struct Doubles {
    float64x2_t pair[4];
  };
  struct Words {
    uint8x16_t part[4];
  };

  template <typename Op>
  HP_INLINE static Doubles ForEachPair(const Op& op) {
    return {{op(0), op(1), op(2), op(3)}};
  }
  template <typename Op>
  HP_INLINE static Words ForEachPart(const Op& op) {
    return {{op(0), op(1), op(2), op(3)}};
  }

  HP_INLINE static Doubles Broadcast(double x) {
    return ForEachPair([&](int) { return vdupq_n_f64(x); });
  }
  HP_INLINE static Doubles Add(Doubles a, Doubles b) {
    return ForEachPair([&](int i) { return vaddq_f64(a.pair[i], b.pair[i]); });
  }
  HP_INLINE static Doubles Sub(Doubles a, Doubles b) {
    return ForEachPair([&](int i) { return vsubq_f64(a.pair[i], b.pair[i]); });
  }
  HP_INLINE static Doubles Mul(Doubles a, Doubles b) {
    return ForEachPair([&](int i) { return vmulq_f64(a.pair[i], b.pair[i]); });
  }
  HP_INLINE static Doubles AddExactSquare(Doubles a, Doubles c) {
    return ForEachPair([&](int i) { return vfmaq_f64(c.pair[i], a.pair[i], a.pair[i]); });
  }
  HP_INLINE static Doubles SubFromExactSquare(Doubles a, Doubles c) {
    return ForEachPair(
        [&](int i) { return vfmaq_f64(vnegq_f64(c.pair[i]), a.pair[i], a.pair[i]); });
  }
  HP_INLINE static void Store(double* out, Doubles a) {
    for (int i = 0; i < 4; ++i) vst1q_f64(out + 2 * i, a.pair[i]);
  }
  HP_INLINE static Doubles Load(const double* from) {
    return ForEachPair([&](int i) { return vld1q_f64(from + 2 * i); });
  }

  HP_INLINE static void LoadBlock(Float32, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      out[v] = Widen(LoadFloats(block + 32 * v), LoadFloats(block + 32 * v + 16));
    }
  }
  HP_INLINE static void LoadBlock(BFloat16, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; v += 2) {
      const uint32x4_t low = vreinterpretq_u32_u8(Load16Bytes(block + 16 * v));
      const uint32x4_t high = vreinterpretq_u32_u8(Load16Bytes(block + 16 * v + 16));
      const uint32x4_t mask = vdupq_n_u32(0xffff0000u);
      out[v] = Widen(vreinterpretq_f32_u32(vshlq_n_u32(low, 16)),
                     vreinterpretq_f32_u32(vshlq_n_u32(high, 16)));
      out[v + 1] = Widen(vreinterpretq_f32_u32(vandq_u32(low, mask)),
                         vreinterpretq_f32_u32(vandq_u32(high, mask)));
    }
  }
  HP_INLINE static void LoadBlock(Float16, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      const float16x8_t halves = vreinterpretq_f16_u8(Load16Bytes(block + 16 * v));
      out[v] = Widen(vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves));
    }
  }
  HP_INLINE static void LoadBlock(Float64, const std::byte* block, Doubles out[4]) {
    HP_UNROLL
    for (int v = 0; v < 4; ++v) {
      out[v] = ForEachPair(
          [&](int i) { return vreinterpretq_f64_u8(Load16Bytes(block + 64 * v + 16 * i)); });
    }
  }

  HP_INLINE static Words LoadWords(const std::byte* from) {
    return ForEachPart([&](int i) { return Load16Bytes(from + 16 * i); });
  }
  HP_INLINE static void StoreWords(std::byte* to, Words a) {
    for (int i = 0; i < 4; ++i) vst1q_u8(reinterpret_cast<uint8_t*>(to + 16 * i), a.part[i]);
  }
  template <typename Word>
  HP_INLINE static Words BroadcastWord(Word word) {
    return ForEachPart([&](int) {
      if constexpr (sizeof(Word) == 2) return vreinterpretq_u8_u16(vdupq_n_u16(word));
      if constexpr (sizeof(Word) == 4) return vreinterpretq_u8_u32(vdupq_n_u32(word));
      if constexpr (sizeof(Word) == 8) return vreinterpretq_u8_u64(vdupq_n_u64(word));
    });
  }
  HP_INLINE static Words And(Words a, Words b) {
    return ForEachPart([&](int i) { return vandq_u8(a.part[i], b.part[i]); });
  }
  template <typename Word>
  HP_INLINE static Words SubWords(Words a, Words b) {
    return ForEachPart([&](int i) {
      const uint8x16_t x = a.part[i];
      const uint8x16_t y = b.part[i];
      if constexpr (sizeof(Word) == 2) return Bytes(vsubq_u16(As16(x), As16(y)));
      if constexpr (sizeof(Word) == 4) return Bytes(vsubq_u32(As32(x), As32(y)));
      if constexpr (sizeof(Word) == 8) return Bytes(vsubq_u64(As64(x), As64(y)));
    });
  }
  template <typename Word>
  HP_INLINE static Words Max(Words a, Words b) {
    return ForEachPart([&](int i) {
      const uint8x16_t x = a.part[i];
      const uint8x16_t y = b.part[i];
      if constexpr (sizeof(Word) == 2) return Bytes(vmaxq_u16(As16(x), As16(y)));
      if constexpr (sizeof(Word) == 4) return Bytes(vmaxq_u32(As32(x), As32(y)));
      if constexpr (sizeof(Word) == 8) return vbslq_u8(Bytes(vcgtq_u64(As64(x), As64(y))), x, y);
    });
  }
  template <typename Word>
  HP_INLINE static Words Min(Words a, Words b) {
    return ForEachPart([&](int i) {
      const uint8x16_t x = a.part[i];
      const uint8x16_t y = b.part[i];
      if constexpr (sizeof(Word) == 2) return Bytes(vminq_u16(As16(x), As16(y)));
      if constexpr (sizeof(Word) == 4) return Bytes(vminq_u32(As32(x), As32(y)));
      if constexpr (sizeof(Word) == 8) return vbslq_u8(Bytes(vcgtq_u64(As64(x), As64(y))), y, x);
    });
  }

  HP_INLINE static void ScaleHalves(std::byte* halves, float factor) {
    for (int i = 0; i < 4; ++i) {
      const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(halves + 8 * i));
      const float32x4_t wide = vcvt_f32_f16(vreinterpret_f16_u16(bits));
      const float16x4_t rounded = vcvt_f16_f32(vmulq_n_f32(wide, factor));
      vst1_u16(reinterpret_cast<uint16_t*>(halves + 8 * i), vreinterpret_u16_f16(rounded));
    }
  }

 private:
  HP_INLINE static uint8x16_t Load16Bytes(const std::byte* from) {
    return vld1q_u8(reinterpret_cast<const uint8_t*>(from));
  }
  HP_INLINE static float32x4_t LoadFloats(const std::byte* from) {
    return vreinterpretq_f32_u8(Load16Bytes(from));
  }
  HP_INLINE static Doubles Widen(float32x4_t low, float32x4_t high) {
    return {{vcvt_f64_f32(vget_low_f32(low)), vcvt_high_f64_f32(low),
             vcvt_f64_f32(vget_low_f32(high)), vcvt_high_f64_f32(high)}};
  }
  HP_INLINE static uint16x8_t As16(uint8x16_t x) { return vreinterpretq_u16_u8(x); }
  HP_INLINE static uint32x4_t As32(uint8x16_t x) { return vreinterpretq_u32_u8(x); }
  HP_INLINE static uint64x2_t As64(uint8x16_t x) { return vreinterpretq_u64_u8(x); }
  HP_INLINE static uint8x16_t Bytes(uint16x8_t x) { return vreinterpretq_u8_u16(x); }
  HP_INLINE static uint8x16_t Bytes(uint32x4_t x) { return vreinterpretq_u8_u32(x); }
  HP_INLINE static uint8x16_t Bytes(uint64x2_t x) { return vreinterpretq_u8_u64(x); }
};

}  // namespace
}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_SIMD_NEON_H_
