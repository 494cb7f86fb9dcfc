// Number formats of gradient elements, and what the kernels have to know of each.

#ifndef HYPER_PARALLEL_KERNELS_HOST_FORMATS_H_
#define HYPER_PARALLEL_KERNELS_HOST_FORMATS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hyper_parallel {

// kMaxSquareExponent: every square is below 2 to this power.
// kMinExponent, kFractionBits: the last bit of a subnormal is 2^(kMinExponent - kFractionBits).
// kSquaresAreExact: a square of an element is a float64 without rounding.

struct Float32 {
  using Word = uint32_t;
  static constexpr int kFractionBits = 23;
  static constexpr int kMinExponent = -126;
  static constexpr int kMaxSquareExponent = 256;
  static constexpr bool kSquaresAreExact = true;
};

struct BFloat16 {
  using Word = uint16_t;
  static constexpr int kFractionBits = 7;
  static constexpr int kMinExponent = -126;
  static constexpr int kMaxSquareExponent = 256;
  static constexpr bool kSquaresAreExact = true;
};

struct Float16 {
  using Word = uint16_t;
  static constexpr int kFractionBits = 10;
  static constexpr int kMinExponent = -14;
  static constexpr int kMaxSquareExponent = 32;
  static constexpr bool kSquaresAreExact = true;
};

struct Float64 {
  using Word = uint64_t;
  static constexpr int kFractionBits = 52;
  static constexpr int kMinExponent = -1022;
  static constexpr int kMaxSquareExponent = 2048;
  static constexpr bool kSquaresAreExact = false;
};

// All bits but the sign: ordered as the magnitudes are, NaN above infinity.
template <typename Format>
inline constexpr typename Format::Word kMagnitudeMask =
    static_cast<typename Format::Word>(static_cast<typename Format::Word>(~0ull) >> 1);

// The magnitude of infinity: all exponent bits set, no fraction bit.
template <typename Format>
inline constexpr typename Format::Word kInfinity = static_cast<typename Format::Word>(
    (kMagnitudeMask<Format> >> Format::kFractionBits) << Format::kFractionBits);

template <typename To, typename From>
__attribute__((always_inline)) inline To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// Reads a word from any address: gradients need not be aligned.
template <typename Word>
__attribute__((always_inline)) inline Word LoadWord(const std::byte* address) {
  Word word;
  __builtin_memcpy(&word, address, sizeof word);
  return word;
}

template <typename Word>
__attribute__((always_inline)) inline void StoreWord(std::byte* address, Word word) {
  __builtin_memcpy(address, &word, sizeof word);
}

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_FORMATS_H_
