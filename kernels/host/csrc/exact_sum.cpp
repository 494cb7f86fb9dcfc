#include "exact_sum.h"

#include <mutex>
#include <vector>

#include "exact_window.h"
#include "float_environment.h"
#include "grid_sum.h"
#include "instruction_set.h"
#include "nonfinite.h"
#include "thread_pool.h"
#include "work_plan.h"

namespace hyper_parallel {
namespace {

struct TensorTotal {
  GridSum sum;
  NonfiniteCounts nonfinite;
};

// One per worker, on cache lines of its own.
struct alignas(64) Windows {
  ExactWindow of_format[3];
};

SquareExponents ExponentsOf(const Extremes& extremes, HyperHostFormat format) {
  switch (format) {
    case HYPER_HOST_BFLOAT16:
      return SquareExponents::Of(BFloat16{}, extremes);
    case HYPER_HOST_FLOAT16:
      return SquareExponents::Of(Float16{}, extremes);
    default:
      return SquareExponents::Of(Float32{}, extremes);
  }
}

void AddUnits(const LeveledSum& leveled, const ExactWindow& window, GridSum* sum) {
  for (int k = 0; k < kLevelChoices[window.choice()]; ++k) {
    if (leveled.units[k] != 0) sum->Add(leveled.units[k], window.top() - (k + 1) * kLevelBits);
  }
}

void AddChunk(const FormatKernels& kernels, const Chunk& chunk, ExactWindow* window,
              TensorTotal* total) {
  LeveledSum leveled;
  if (window->is_set()) {
    kernels.sum_exactly[window->choice()](chunk.data, chunk.numel, window->top(), &leveled);
  } else {
    leveled.extremes = kernels.find_extremes(chunk.data, chunk.numel);
  }
  if (leveled.extremes.max_magnitude == 0) return;
  if (!IsFiniteMagnitude(leveled.extremes.max_magnitude, chunk.format)) {
    const NonfiniteCounts counts = CountNonfinite(chunk);
    total->nonfinite.num_nan += counts.num_nan;
    total->nonfinite.num_inf += counts.num_inf;
    return;
  }
  const SquareExponents squares = ExponentsOf(leveled.extremes, chunk.format);
  if (!window->is_set() || !window->Holds(squares)) {
    window->Fit(squares);
    kernels.sum_exactly[window->choice()](chunk.data, chunk.numel, window->top(), &leveled);
  }
  AddUnits(leveled, *window, &total->sum);
  window->Notice(squares);
}

}  // namespace

void SumSquaresExactly(const HyperHostTensors& tensors, size_t num_threads,
                       HyperHostExactSum* sums) {
  const InstructionSet& set = CurrentInstructionSet();
  const WorkPlan plan = MakePlan(tensors, kExactChunkNumel);
  const size_t num_workers = std::min(num_threads, std::max<size_t>(plan.task_ends.size(), 1));
  std::vector<TensorTotal> totals(static_cast<size_t>(tensors.count));
  std::vector<Windows> windows(num_workers);
  std::mutex totals_mutex;
  ThreadPool::Get().Run(plan.task_ends.size(), num_workers, [&](size_t task, size_t worker) {
    const DefaultFloatEnvironment environment;
    size_t i = plan.TaskBegin(task);
    while (i < plan.task_ends[task]) {
      const size_t tensor = plan.chunks[i].tensor;
      const bool begins_here = i == 0 || plan.chunks[i - 1].tensor != tensor;
      TensorTotal part;
      for (; i < plan.task_ends[task] && plan.chunks[i].tensor == tensor; ++i) {
        const Chunk& chunk = plan.chunks[i];
        AddChunk(KernelsFor(set, chunk.format), chunk, &windows[worker].of_format[chunk.format],
                 &part);
      }
      const bool ends_here = i == plan.chunks.size() || plan.chunks[i].tensor != tensor;
      if (begins_here && ends_here) {
        totals[tensor] = part;  // nobody else has to do with it
        continue;
      }
      // In any order: integers do not mind.
      const std::lock_guard<std::mutex> lock(totals_mutex);
      totals[tensor].sum.Add(part.sum);
      totals[tensor].nonfinite.num_nan += part.nonfinite.num_nan;
      totals[tensor].nonfinite.num_inf += part.nonfinite.num_inf;
    }
  });
  for (size_t i = 0; i < totals.size(); ++i) {
    const NonfiniteCounts& nonfinite = totals[i].nonfinite;
    sums[i] = {{}, nonfinite.num_nan, nonfinite.num_inf};
    if (nonfinite.num_nan + nonfinite.num_inf == 0) totals[i].sum.CopyTo(sums[i].words);
  }
}

}  // namespace hyper_parallel
