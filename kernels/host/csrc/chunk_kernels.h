// What one instruction set offers: kernels that work on one chunk of elements of one format.
//
// All of them take any address, any number of elements and any bits; have no state, so any number
// of threads may run them; and expect the default floating point environment
// (float_environment.h). Their results are the same for every instruction set, bit for bit: the
// elements of a chunk go in blocks of 32 to 32 lanes, each lane adds its elements in order, and
// the lanes are added up in one fixed order. A last block that is not full is filled with zeros.

#ifndef HYPER_PARALLEL_KERNELS_HOST_CHUNK_KERNELS_H_
#define HYPER_PARALLEL_KERNELS_HOST_CHUNK_KERNELS_H_

#include <cstddef>
#include <cstdint>

namespace hyper_parallel {

inline constexpr size_t kBlockNumel = 32;

// Magnitudes are the bits of an element without its sign, in the width of its format.
struct Extremes {
  uint64_t max_magnitude;
  uint64_t min_nonzero_magnitude;  // the largest word if all elements are zero
};

struct SquareSum {
  double sum;  // any number if the chunk is not finite
  uint64_t max_magnitude;
};

struct Census {
  uint64_t min_magnitude;
  int64_t num_nonzero;
};

// Exact sums of squares: see exact_kernel.h.
inline constexpr int kLevelBits = 46;
inline constexpr int kMaxLevels = 13;
// How many bits a window leaves above the largest square of the chunk that it was made for.
inline constexpr int kWindowHeadroom = 2;
inline constexpr int kLevelChoices[] = {2, 3, 5, kMaxLevels};
inline constexpr size_t kNumLevelChoices = sizeof(kLevelChoices) / sizeof(kLevelChoices[0]);

struct LeveledSum {
  int64_t units[kMaxLevels];
  Extremes extremes;
};

struct FormatKernels {
  SquareSum (*sum_squares)(const std::byte* data, size_t numel);
  double (*sum_powers)(const std::byte* data, size_t numel, double power);
  Census (*take_census)(const std::byte* data, size_t numel);
  Extremes (*find_extremes)(const std::byte* data, size_t numel);
  // By the place of a number of levels in kLevelChoices; null for float64.
  void (*sum_exactly[kNumLevelChoices])(const std::byte* data, size_t numel, int top,
                                        LeveledSum* result);
  void (*scale)(std::byte* data, size_t numel, double factor);
};

struct InstructionSet {
  const char* name;
  bool (*is_supported)();
  FormatKernels float32;
  FormatKernels bfloat16;
  FormatKernels float16;
  FormatKernels float64;
  // The fastest pass over memory that is known: what the kernels are measured against.
  uint64_t (*read)(const std::byte* data, size_t num_bytes);
  void (*read_and_write)(std::byte* data, size_t num_bytes);
};

// Defined where the processor family has them.
extern const InstructionSet kAvx512;
extern const InstructionSet kAvx2;
extern const InstructionSet kNeon;
extern const InstructionSet kScalar;

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_CHUNK_KERNELS_H_
