// Exact sums of squares of tensors.

#ifndef HYPER_PARALLEL_KERNELS_HOST_EXACT_SUM_H_
#define HYPER_PARALLEL_KERNELS_HOST_EXACT_SUM_H_

#include <cstddef>

#include "host_kernels.h"

namespace hyper_parallel {

// See hyper_host_exact_sums_of_squares; arguments are valid. Throws std::bad_alloc.
void SumSquaresExactly(const HyperHostTensors& tensors, size_t num_threads,
                       HyperHostExactSum* sums);

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_EXACT_SUM_H_
