// The floating point environment that kernels need, whatever the calling thread has set: torch's
// set_flush_denormal makes subnormal numbers zero.

#ifndef HYPER_PARALLEL_KERNELS_HOST_FLOAT_ENVIRONMENT_H_
#define HYPER_PARALLEL_KERNELS_HOST_FLOAT_ENVIRONMENT_H_

#include <cfenv>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hyper_parallel {

// While one exists: round to nearest even, subnormals honoured, no traps. Not copyable.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

#if defined(__x86_64__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) {
    constexpr unsigned kAllMasked = 0x1f80;
    _mm_setcsr(kAllMasked);
  }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}) : "memory");
  }
  ~DefaultFloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }

 private:
  uint64_t saved_;
#else
  DefaultFloatEnvironment() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { fesetenv(&saved_); }

 private:
  fenv_t saved_;
#endif
};

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_FLOAT_ENVIRONMENT_H_
