// The kernels for x86 processors with AVX2, FMA and F16C.

#if defined(__x86_64__)

// Before the #pragma, for the reason given in isa_avx512.cpp.
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "instantiate.h"
#include "simd_avx2.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace hyper_parallel {

const InstructionSet kAvx2 = MakeInstructionSet<SimdAvx2>([] {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
});

}  // namespace hyper_parallel

#endif  // defined(__x86_64__)
