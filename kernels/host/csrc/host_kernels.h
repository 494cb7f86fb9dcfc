/* The C interface of the host kernels: norms and scaling of gradients in host memory.
 *
 * Every function takes a list of tensors and does its work in one parallel region, however many
 * tensors there are. A tensor is an address, a number of elements and a format. Its elements lie
 * one after the other, in any order; the address need not be aligned, not even to an element; a
 * tensor of no elements may have any address, also null. Tensors may overlap for measuring, and
 * must not for scaling.
 *
 * Arithmetic is float64 for measuring and float32 (float64 for float64) for scaling. Subnormal
 * numbers are honoured, and rounding is to nearest even, whatever the calling thread's floating
 * point environment, which is left as it was. Results depend neither on the number of threads nor
 * on the instruction set.
 *
 * Functions may be called from several threads at once; one of them then gets the helpers and the
 * others work alone. They may be called in a forked child. They return a status, and throw nothing.
 */

#ifndef HYPER_PARALLEL_KERNELS_HOST_HOST_KERNELS_H_
#define HYPER_PARALLEL_KERNELS_HOST_HOST_KERNELS_H_

#include <stdint.h>

#define HYPER_HOST_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef enum HyperHostStatus {
  HYPER_HOST_OK = 0,
  HYPER_HOST_INVALID_ARGUMENT = 1,
  HYPER_HOST_OUT_OF_MEMORY = 2,
  HYPER_HOST_INTERNAL = 3,
} HyperHostStatus;

typedef enum HyperHostFormat {
  HYPER_HOST_FLOAT32 = 0,
  HYPER_HOST_BFLOAT16 = 1,
  HYPER_HOST_FLOAT16 = 2,
  HYPER_HOST_FLOAT64 = 3,
} HyperHostFormat;

typedef struct HyperHostTensors {
  int64_t count;
  void* const* data;      /* [count] */
  const int64_t* numel;   /* [count] */
  const uint8_t* format;  /* [count] HyperHostFormat */
} HyperHostTensors;

/* Of an empty tensor: zeros, but min_abs, which is infinite. Of one with NaN or infinite elements:
 * sums are NaN or infinite. Sums of finite elements may be infinite, too. */
typedef struct HyperHostNorm {
  double sum_of_squares;
  double max_abs;      /* NaN if any element is */
  double pow_sum;      /* sum of |x|^norm_type for norm types other than 0, 2, inf, -inf; else 0 */
  double min_abs;      /* for norm type -inf, NaN if any element is; else infinite */
  int64_t num_nonzero; /* for norm type 0, NaN counting as nonzero; else 0 */
  int64_t num_nan;
  int64_t num_inf;
} HyperHostNorm;

/* Sum of squares as a little-endian integer in units of 2^-298, the square of float32's smallest
 * number; 0 if an element is NaN or infinite. */
#define HYPER_HOST_EXACT_WORDS 10
#define HYPER_HOST_EXACT_EXPONENT (-298)
typedef struct HyperHostExactSum {
  uint64_t words[HYPER_HOST_EXACT_WORDS];
  int64_t num_nan;
  int64_t num_inf;
} HyperHostExactSum;

/* Measures each tensor. norm_type: any p >= 0, inf or -inf. norms: [tensors->count].
 * num_threads: at most so many work, the calling one included; at least 1. */
HYPER_HOST_EXPORT int32_t hyper_host_partial_norms(const HyperHostTensors* tensors,
                                                   double norm_type, int32_t num_threads,
                                                   HyperHostNorm* norms);

/* Sums squares without rounding. Not for float64, whose squares do not fit the grid.
 * sums: [tensors->count]. */
HYPER_HOST_EXPORT int32_t hyper_host_exact_sums_of_squares(const HyperHostTensors* tensors,
                                                           int32_t num_threads,
                                                           HyperHostExactSum* sums);

/* Multiplies every element in place and rounds it once. The factor is rounded to float32 but for
 * float64 tensors. NaN stays NaN, with any sign and payload. */
HYPER_HOST_EXPORT int32_t hyper_host_scale(const HyperHostTensors* tensors, double factor,
                                           int32_t num_threads);

/* Passes over the tensors' memory that compute nothing, as fast as is known here: the limits that
 * benchmarks compare with. The second writes what it reads. */
HYPER_HOST_EXPORT int32_t hyper_host_read(const HyperHostTensors* tensors, int32_t num_threads);
HYPER_HOST_EXPORT int32_t hyper_host_read_and_write(const HyperHostTensors* tensors,
                                                    int32_t num_threads);

/* Instruction sets that this processor can run, best first, separated by blanks. */
HYPER_HOST_EXPORT const char* hyper_host_instruction_sets(void);

/* Makes all later calls use one of them, "auto" for the best. For tests: results are the same. */
HYPER_HOST_EXPORT int32_t hyper_host_use_instruction_set(const char* name);

/* Why the last call of this thread that did not return HYPER_HOST_OK did not. */
HYPER_HOST_EXPORT const char* hyper_host_last_error(void);

#ifdef __cplusplus
}
#endif

#endif  /* HYPER_PARALLEL_KERNELS_HOST_HOST_KERNELS_H_ */
