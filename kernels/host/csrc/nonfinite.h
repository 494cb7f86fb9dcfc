// Magnitudes of elements, by format: their values, and how many are NaN or infinite.

#ifndef HYPER_PARALLEL_KERNELS_HOST_NONFINITE_H_
#define HYPER_PARALLEL_KERNELS_HOST_NONFINITE_H_

#include <cstdint>

#include "host_kernels.h"
#include "work_plan.h"

namespace hyper_parallel {

struct NonfiniteCounts {
  int64_t num_nan = 0;
  int64_t num_inf = 0;
};

// A magnitude is the bits of an element without its sign. Expects DefaultFloatEnvironment.
double MagnitudeValue(uint64_t magnitude, HyperHostFormat format);

bool IsFiniteMagnitude(uint64_t magnitude, HyperHostFormat format);

NonfiniteCounts CountNonfinite(const Chunk& chunk);

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_NONFINITE_H_
