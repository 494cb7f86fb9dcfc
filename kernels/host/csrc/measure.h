// Partial norms of tensors, from those of their chunks.

#ifndef HYPER_PARALLEL_KERNELS_HOST_MEASURE_H_
#define HYPER_PARALLEL_KERNELS_HOST_MEASURE_H_

#include <cstddef>

#include "host_kernels.h"

namespace hyper_parallel {

// See hyper_host_partial_norms; arguments are valid. Throws std::bad_alloc.
void Measure(const HyperHostTensors& tensors, double norm_type, size_t num_threads,
             HyperHostNorm* norms);

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_MEASURE_H_
