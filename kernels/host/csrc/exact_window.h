// The window of bits in which a kernel sums squares: kLevelBits bits a level below 2^top.
//
// Few levels are fast, and a few hold the squares of any gradients but the oddest. So a worker
// guesses that a chunk needs the window of the chunk before, and looks again, at data that the
// cache still holds, where the chunk's extremes say that bits were lost. Sums are exact whatever
// the window, if all bits are in it, so guesses do not show in results.

#ifndef HYPER_PARALLEL_KERNELS_HOST_EXACT_WINDOW_H_
#define HYPER_PARALLEL_KERNELS_HOST_EXACT_WINDOW_H_

#include <cstddef>

#include "chunk_kernels.h"
#include "formats.h"

namespace hyper_parallel {

// The exponents that the squares of a chunk's elements use, from those of its extremes.
struct SquareExponents {
  template <typename Format>
  static SquareExponents Of(Format, const Extremes& extremes) {
    return {2 * (Exponent<Format>(extremes.max_magnitude) + 1),
            2 * (Exponent<Format>(extremes.min_nonzero_magnitude) - Format::kFractionBits)};
  }

  int top;     // all squares are below 2^top
  int bottom;  // and whole multiples of 2^bottom

 private:
  template <typename Format>
  static int Exponent(uint64_t magnitude) {
    const auto biased = static_cast<int>(magnitude >> Format::kFractionBits);
    return Format::kMinExponent + (biased == 0 ? 0 : biased - 1);
  }
};

class ExactWindow {
 public:
  int top() const { return top_; }
  // The place of its number of levels in kLevelChoices.
  size_t choice() const { return choice_; }
  bool is_set() const { return is_set_; }

  bool Holds(const SquareExponents& squares) const {
    return squares.top <= top_ && squares.bottom >= Bottom(choice_);
  }

  // Makes it hold these, and somewhat larger ones as well.
  void Fit(const SquareExponents& squares) {
    top_ = squares.top + kWindowHeadroom;
    choice_ = SmallestChoice(squares);
    is_set_ = true;
    num_loose_ = 0;
  }

  // To be told of each chunk that it held: a window that stays too large is made smaller.
  void Notice(const SquareExponents& squares) {
    constexpr int kPatience = 4;
    num_loose_ = SmallestChoice(squares) < choice_ ? num_loose_ + 1 : 0;
    if (num_loose_ >= kPatience) Fit(squares);
  }

 private:
  int Bottom(size_t choice) const { return top_ - kLevelBits * kLevelChoices[choice]; }

  size_t SmallestChoice(const SquareExponents& squares) const {
    size_t choice = 0;
    while (choice + 1 < kNumLevelChoices && squares.bottom < Bottom(choice)) ++choice;
    return choice;
  }

  int top_ = 0;
  size_t choice_ = 0;
  int num_loose_ = 0;
  bool is_set_ = false;
};

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_EXACT_WINDOW_H_
