// All kernels of one instruction set. Included once by each isa_*.cpp, after its #pragma.

#ifndef HYPER_PARALLEL_KERNELS_HOST_INSTANTIATE_H_
#define HYPER_PARALLEL_KERNELS_HOST_INSTANTIATE_H_

#include "chunk_kernels.h"
#include "exact_kernel.h"
#include "measure_kernel.h"
#include "memory_probe.h"
#include "scale_kernel.h"

namespace hyper_parallel {
namespace {

template <typename Simd, typename Format>
constexpr FormatKernels KernelsWithoutExactSum(void (*scale)(std::byte*, size_t, double)) {
  FormatKernels kernels = {};
  kernels.sum_squares = &SumSquares<Simd, Format>;
  kernels.sum_powers = &SumPowers<Simd, Format>;
  kernels.take_census = &TakeCensus<Format>;
  kernels.find_extremes = &FindExtremes<Simd, Format>;
  kernels.scale = scale;
  return kernels;
}

template <typename Simd, typename Format>
constexpr FormatKernels KernelsOf(void (*scale)(std::byte*, size_t, double)) {
  static_assert(kNumLevelChoices == 4);
  FormatKernels kernels = KernelsWithoutExactSum<Simd, Format>(scale);
  kernels.sum_exactly[0] = &SumExactly<Simd, Format, kLevelChoices[0]>;
  kernels.sum_exactly[1] = &SumExactly<Simd, Format, kLevelChoices[1]>;
  kernels.sum_exactly[2] = &SumExactly<Simd, Format, kLevelChoices[2]>;
  kernels.sum_exactly[3] = &SumExactly<Simd, Format, kLevelChoices[3]>;
  return kernels;
}

template <typename Simd>
constexpr InstructionSet MakeInstructionSet(bool (*is_supported)()) {
  InstructionSet set = {};
  set.name = Simd::kName;
  set.is_supported = is_supported;
  set.float32 = KernelsOf<Simd, Float32>(&ScaleFloat32<Simd>);
  set.bfloat16 = KernelsOf<Simd, BFloat16>(&ScaleBFloat16<Simd>);
  set.float16 = KernelsOf<Simd, Float16>(&ScaleFloat16<Simd>);
  set.float64 = KernelsWithoutExactSum<Simd, Float64>(&ScaleFloat64<Simd>);
  set.read = &ReadMemory<Simd>;
  set.read_and_write = &ReadAndWriteMemory<Simd>;
  return set;
}

}  // namespace
}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_INSTANTIATE_H_
