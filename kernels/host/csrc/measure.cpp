#include "measure.h"

#include <cmath>
#include <vector>

#include "float_environment.h"
#include "instruction_set.h"
#include "nonfinite.h"
#include "thread_pool.h"
#include "work_plan.h"

namespace hyper_parallel {
namespace {

// A sum that remembers what its additions rounded off (Neumaier 1974), so that the number of
// chunks does not matter.
class CarefulSum {
 public:
  void Add(double x) {
    const double next = sum_ + x;
    const bool x_is_smaller = std::fabs(sum_) >= std::fabs(x);
    rounded_off_ += x_is_smaller ? (sum_ - next) + x : (x - next) + sum_;
    sum_ = next;
  }
  // Once the sum is infinite or NaN, so is what was rounded off, and means nothing.
  double Get() const { return std::isfinite(sum_) ? sum_ + rounded_off_ : sum_; }

 private:
  double sum_ = 0.0;
  double rounded_off_ = 0.0;
};

constexpr HyperHostNorm kNormOfNothing = {0.0, 0.0, 0.0, HUGE_VAL, 0, 0, 0};

// What the norm type needs besides sum of squares and largest magnitude.
struct Wanted {
  explicit Wanted(double norm_type)
      : census(norm_type == 0.0 || norm_type == -HUGE_VAL),
        powers(!census && norm_type != 2.0 && norm_type != HUGE_VAL),
        min_abs(norm_type == -HUGE_VAL) {}

  bool census;
  bool powers;
  bool min_abs;
};

// The norm of one chunk; all passes but the first find it in the cache.
HyperHostNorm MeasureChunk(const FormatKernels& kernels, const Chunk& chunk, const Wanted& wanted,
                           double norm_type) {
  HyperHostNorm norm = kNormOfNothing;
  const SquareSum squares = kernels.sum_squares(chunk.data, chunk.numel);
  norm.sum_of_squares = squares.sum;
  norm.max_abs = MagnitudeValue(squares.max_magnitude, chunk.format);
  if (wanted.powers) norm.pow_sum = kernels.sum_powers(chunk.data, chunk.numel, norm_type);
  if (wanted.census) {
    const Census census = kernels.take_census(chunk.data, chunk.numel);
    norm.num_nonzero = wanted.min_abs ? 0 : census.num_nonzero;
    if (wanted.min_abs) norm.min_abs = MagnitudeValue(census.min_magnitude, chunk.format);
  }
  if (IsFiniteMagnitude(squares.max_magnitude, chunk.format)) return norm;
  const NonfiniteCounts counts = CountNonfinite(chunk);
  norm.num_nan = counts.num_nan;
  norm.num_inf = counts.num_inf;
  norm.sum_of_squares = counts.num_nan != 0 ? NAN : HUGE_VAL;
  if (wanted.powers) norm.pow_sum = norm.sum_of_squares;
  if (wanted.min_abs && counts.num_nan != 0) norm.min_abs = NAN;
  return norm;
}

double MaxKeepingNan(double a, double b) { return std::isnan(a) || a >= b ? a : b; }
double MinKeepingNan(double a, double b) { return std::isnan(a) || a <= b ? a : b; }

// Combines chunks in their order. Not inlined: the caller sets the floating point environment,
// across which the compiler might move arithmetic.
__attribute__((noinline)) HyperHostNorm Combine(const HyperHostNorm* parts, size_t num_parts) {
  HyperHostNorm total = kNormOfNothing;
  CarefulSum squares;
  CarefulSum powers;
  for (size_t i = 0; i < num_parts; ++i) {
    const HyperHostNorm& part = parts[i];
    squares.Add(part.sum_of_squares);
    powers.Add(part.pow_sum);
    total.max_abs = MaxKeepingNan(total.max_abs, part.max_abs);
    total.min_abs = MinKeepingNan(total.min_abs, part.min_abs);
    total.num_nonzero += part.num_nonzero;
    total.num_nan += part.num_nan;
    total.num_inf += part.num_inf;
  }
  total.sum_of_squares = squares.Get();
  total.pow_sum = powers.Get();
  return total;
}

}  // namespace

void Measure(const HyperHostTensors& tensors, double norm_type, size_t num_threads,
             HyperHostNorm* norms) {
  const InstructionSet& set = CurrentInstructionSet();
  const WorkPlan plan = MakePlan(tensors, kChunkNumel);
  const Wanted wanted(norm_type);
  for (int64_t i = 0; i < tensors.count; ++i) {
    if (tensors.numel[i] == 0) norms[i] = kNormOfNothing;
  }
  // The norm of a whole tensor goes to its place among the results; parts are combined.
  std::vector<HyperHostNorm> parts(plan.num_parts);
  ThreadPool::Get().Run(plan.task_ends.size(), num_threads, [&](size_t task, size_t) {
    const DefaultFloatEnvironment environment;
    for (size_t i = plan.TaskBegin(task); i < plan.task_ends[task]; ++i) {
      const Chunk& chunk = plan.chunks[i];
      HyperHostNorm* norm = chunk.part == kWhole ? &norms[chunk.tensor] : &parts[chunk.part];
      *norm = MeasureChunk(KernelsFor(set, chunk.format), chunk, wanted, norm_type);
    }
  });
  const DefaultFloatEnvironment environment;
  for (const CutTensor& cut : plan.cut_tensors) {
    norms[cut.tensor] = Combine(&parts[cut.first_part], cut.num_parts);
  }
}

}  // namespace hyper_parallel
