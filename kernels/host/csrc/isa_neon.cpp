// The kernels for aarch64, which always has NEON.

#if defined(__aarch64__)

#include "instantiate.h"
#include "simd_neon.h"

namespace hyper_parallel {

const InstructionSet kNeon = MakeInstructionSet<SimdNeon>([] { return true; });

}  // namespace hyper_parallel

#endif  // defined(__aarch64__)
