// The kernels for x86 processors with AVX-512.

#if defined(__x86_64__)

// Before the #pragma: inline functions of these are shared by all translation units, which must
// not get an AVX-512 copy of them from the linker.
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

#if !defined(__clang__)
// gcc 12 takes its own headers' deliberately undefined vectors for a mistake (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "instantiate.h"
#include "simd_avx512.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace hyper_parallel {

const InstructionSet kAvx512 = MakeInstructionSet<SimdAvx512>([] {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         kAvx2.is_supported();
});

}  // namespace hyper_parallel

#endif  // defined(__x86_64__)
