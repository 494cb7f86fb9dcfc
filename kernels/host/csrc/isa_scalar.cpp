// The kernels for any processor.

#include "instantiate.h"
#include "simd_scalar.h"

namespace hyper_parallel {

const InstructionSet kScalar = MakeInstructionSet<SimdScalar>([] { return true; });

}  // namespace hyper_parallel
