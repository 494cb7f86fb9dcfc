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

// Where the norms of chunks go: of a tensor that is one chunk to its place among the results, as
// most of a long list are; of others to places of their own, to be combined.
class NormPlaces {
 public:
  // A tensor of several chunks, and where their norms are among parts.
  struct CutTensor {
    size_t tensor;
    size_t first_part;
    size_t num_parts;
  };

  NormPlaces(const WorkPlan& plan, HyperHostNorm* results) {
    const std::vector<Chunk>& chunks = plan.chunks;
    size_t num_parts = 0;
    for (size_t begin = 0, end = 0; begin < chunks.size(); begin = end) {
      const size_t tensor = chunks[begin].tensor;
      while (end < chunks.size() && chunks[end].tensor == tensor) ++end;
      if (end - begin == 1) continue;
      cut_tensors_.push_back({tensor, num_parts, end - begin});
      num_parts += end - begin;
    }
    parts_.resize(num_parts);
    of_chunk_.reserve(chunks.size());
    HyperHostNorm* next_part = parts_.data();
    auto cut = cut_tensors_.begin();
    for (const Chunk& chunk : chunks) {
      while (cut != cut_tensors_.end() && cut->tensor < chunk.tensor) ++cut;
      const bool is_cut = cut != cut_tensors_.end() && cut->tensor == chunk.tensor;
      of_chunk_.push_back(is_cut ? next_part++ : &results[chunk.tensor]);
    }
  }

  HyperHostNorm* OfChunk(size_t chunk) const { return of_chunk_[chunk]; }
  const std::vector<CutTensor>& cut_tensors() const { return cut_tensors_; }
  const HyperHostNorm* Parts(const CutTensor& cut) const { return &parts_[cut.first_part]; }

 private:
  std::vector<HyperHostNorm*> of_chunk_;
  std::vector<HyperHostNorm> parts_;
  std::vector<CutTensor> cut_tensors_;
};

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
  for (int64_t i = 0; i < tensors.count; ++i) norms[i] = kNormOfNothing;
  const NormPlaces places(plan, norms);
  ThreadPool::Get().Run(plan.task_ends.size(), num_threads, [&](size_t task, size_t) {
    const DefaultFloatEnvironment environment;
    for (size_t i = plan.TaskBegin(task); i < plan.task_ends[task]; ++i) {
      const FormatKernels& kernels = KernelsFor(set, plan.chunks[i].format);
      *places.OfChunk(i) = MeasureChunk(kernels, plan.chunks[i], wanted, norm_type);
    }
  });
  const DefaultFloatEnvironment environment;
  for (const NormPlaces::CutTensor& cut : places.cut_tensors()) {
    norms[cut.tensor] = Combine(places.Parts(cut), cut.num_parts);
  }
}

}  // namespace hyper_parallel
