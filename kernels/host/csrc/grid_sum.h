// An integer of 640 bits: a sum of squares in units of 2^-298, the square of float32's smallest
// number. It holds 2^64 squares of float32's largest.

#ifndef HYPER_PARALLEL_KERNELS_HOST_GRID_SUM_H_
#define HYPER_PARALLEL_KERNELS_HOST_GRID_SUM_H_

#include <cstddef>
#include <cstdint>

#include "host_kernels.h"

namespace hyper_parallel {

class GridSum {
 public:
  static constexpr size_t kWords = HYPER_HOST_EXACT_WORDS;

  // Adds units * 2^exponent, which must be a whole number of the grid's units.
  void Add(int64_t units, int exponent) {
    int shift = exponent - HYPER_HOST_EXACT_EXPONENT;
    if (shift < 0) {
      const int num_zero_bits = shift < -63 ? 63 : -shift;
      units >>= num_zero_bits;
      shift = 0;
    }
    const auto first = static_cast<size_t>(shift / 64);
    const int bit = shift % 64;
    const uint64_t sign = units < 0 ? ~0ull : 0ull;
    const auto bits = static_cast<uint64_t>(units);
    const uint64_t low = bits << bit;
    const uint64_t high = bit == 0 ? sign : bits >> (64 - bit) | sign << bit;
    uint64_t carry = 0;
    for (size_t i = first; i < kWords; ++i) {
      carry = AddWord(i, i == first ? low : i == first + 1 ? high : sign, carry);
    }
  }

  void Add(const GridSum& other) {
    uint64_t carry = 0;
    for (size_t i = 0; i < kWords; ++i) carry = AddWord(i, other.words_[i], carry);
  }

  void CopyTo(uint64_t words[kWords]) const {
    for (size_t i = 0; i < kWords; ++i) words[i] = words_[i];
  }

 private:
  uint64_t AddWord(size_t i, uint64_t word, uint64_t carry) {
    const uint64_t with_carry = word + carry;
    words_[i] += with_carry;
    return (with_carry < carry) + (words_[i] < with_carry);
  }

  uint64_t words_[kWords] = {};  // two's complement, lowest first
};

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_GRID_SUM_H_
