// The C interface: arguments checked, work handed on, exceptions turned into a status.

#include "host_kernels.h"

#include <cmath>
#include <exception>
#include <new>
#include <string>

#include "exact_sum.h"
#include "float_environment.h"
#include "instruction_set.h"
#include "measure.h"
#include "thread_pool.h"
#include "work_plan.h"

namespace hyper_parallel {
namespace {

thread_local std::string last_error;

struct InvalidArgument {
  std::string message;
};

std::string InTensor(int64_t i) { return "tensor " + std::to_string(i) + ": "; }

void ValidateTensors(const HyperHostTensors* tensors) {
  if (tensors == nullptr) throw InvalidArgument{"expected a list of tensors, got null"};
  const int64_t count = tensors->count;
  if (count < 0) throw InvalidArgument{"expected count >= 0, got " + std::to_string(count)};
  if (count == 0) return;
  if (tensors->data == nullptr || tensors->numel == nullptr || tensors->format == nullptr) {
    throw InvalidArgument{"expected addresses, sizes and formats of tensors, got null"};
  }
  for (int64_t i = 0; i < count; ++i) {
    if (tensors->numel[i] < 0) {
      throw InvalidArgument{InTensor(i) + "expected numel >= 0, got " +
                            std::to_string(tensors->numel[i])};
    }
    if (tensors->data[i] == nullptr && tensors->numel[i] != 0) {
      throw InvalidArgument{InTensor(i) + "expected an address, got null"};
    }
    if (tensors->format[i] > HYPER_HOST_FLOAT64) {
      throw InvalidArgument{InTensor(i) + "expected a format from 0 to 3, got " +
                            std::to_string(tensors->format[i])};
    }
  }
}

size_t ValidatedThreads(int32_t num_threads) {
  if (num_threads < 1) {
    throw InvalidArgument{"expected num_threads >= 1, got " + std::to_string(num_threads)};
  }
  return static_cast<size_t>(num_threads);
}

void ValidateResults(const HyperHostTensors* tensors, const void* results) {
  if (results == nullptr && tensors->count != 0) {
    throw InvalidArgument{"expected room for results, got null"};
  }
}

// Runs body() and returns its status; what it throws is told by hyper_host_last_error.
template <typename Body>
int32_t Guarded(const Body& body) noexcept {
  try {
    body();
    return HYPER_HOST_OK;
  } catch (const InvalidArgument& error) {
    last_error = error.message;
    return HYPER_HOST_INVALID_ARGUMENT;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";  // short enough to need none
    return HYPER_HOST_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    last_error = error.what();
    return HYPER_HOST_INTERNAL;
  }
}

// Calls visit(instruction set, chunk) for every chunk of the tensors.
template <typename Visit>
void ForEachChunk(const HyperHostTensors& tensors, size_t num_threads, const Visit& visit) {
  const InstructionSet& set = CurrentInstructionSet();
  const WorkPlan plan = MakePlan(tensors, kChunkNumel);
  ThreadPool::Get().Run(plan.task_ends.size(), num_threads, [&](size_t task, size_t) {
    const DefaultFloatEnvironment environment;
    for (size_t i = plan.TaskBegin(task); i < plan.task_ends[task]; ++i) {
      visit(set, plan.chunks[i]);
    }
  });
}

}  // namespace
}  // namespace hyper_parallel

using hyper_parallel::Chunk;
using hyper_parallel::InstructionSet;

int32_t hyper_host_partial_norms(const HyperHostTensors* tensors, double norm_type,
                                 int32_t num_threads, HyperHostNorm* norms) {
  return hyper_parallel::Guarded([=] {
    hyper_parallel::ValidateTensors(tensors);
    hyper_parallel::ValidateResults(tensors, norms);
    if (!(norm_type >= 0.0) && norm_type != -HUGE_VAL) {
      throw hyper_parallel::InvalidArgument{"expected norm_type >= 0, inf or -inf, got " +
                                            std::to_string(norm_type)};
    }
    hyper_parallel::Measure(*tensors, norm_type, hyper_parallel::ValidatedThreads(num_threads),
                            norms);
  });
}

int32_t hyper_host_exact_sums_of_squares(const HyperHostTensors* tensors, int32_t num_threads,
                                         HyperHostExactSum* sums) {
  return hyper_parallel::Guarded([=] {
    hyper_parallel::ValidateTensors(tensors);
    hyper_parallel::ValidateResults(tensors, sums);
    for (int64_t i = 0; i < tensors->count; ++i) {
      if (tensors->format[i] == HYPER_HOST_FLOAT64) {
        throw hyper_parallel::InvalidArgument{
            hyper_parallel::InTensor(i) +
            "expected float32, bfloat16 or float16 for an exact sum, got float64"};
      }
    }
    hyper_parallel::SumSquaresExactly(*tensors, hyper_parallel::ValidatedThreads(num_threads),
                                      sums);
  });
}

int32_t hyper_host_scale(const HyperHostTensors* tensors, double factor, int32_t num_threads) {
  return hyper_parallel::Guarded([=] {
    hyper_parallel::ValidateTensors(tensors);
    hyper_parallel::ForEachChunk(
        *tensors, hyper_parallel::ValidatedThreads(num_threads),
        [=](const InstructionSet& set, const Chunk& chunk) {
          hyper_parallel::KernelsFor(set, chunk.format).scale(chunk.data, chunk.numel, factor);
        });
  });
}

int32_t hyper_host_read(const HyperHostTensors* tensors, int32_t num_threads) {
  return hyper_parallel::Guarded([=] {
    hyper_parallel::ValidateTensors(tensors);
    hyper_parallel::ForEachChunk(
        *tensors, hyper_parallel::ValidatedThreads(num_threads),
        [](const InstructionSet& set, const Chunk& chunk) {
          const size_t num_bytes = chunk.numel * hyper_parallel::ElementBytes(chunk.format);
          volatile uint64_t sum = set.read(chunk.data, num_bytes);
          static_cast<void>(sum);
        });
  });
}

int32_t hyper_host_read_and_write(const HyperHostTensors* tensors, int32_t num_threads) {
  return hyper_parallel::Guarded([=] {
    hyper_parallel::ValidateTensors(tensors);
    hyper_parallel::ForEachChunk(
        *tensors, hyper_parallel::ValidatedThreads(num_threads),
        [](const InstructionSet& set, const Chunk& chunk) {
          set.read_and_write(chunk.data, chunk.numel * hyper_parallel::ElementBytes(chunk.format));
        });
  });
}

const char* hyper_host_instruction_sets(void) { return hyper_parallel::InstructionSetNames(); }

int32_t hyper_host_use_instruction_set(const char* name) {
  return hyper_parallel::Guarded([=] {
    if (name == nullptr || !hyper_parallel::UseInstructionSet(name)) {
      throw hyper_parallel::InvalidArgument{
          "expected auto or one of the instruction sets of this processor (" +
          std::string(hyper_parallel::InstructionSetNames()) + "), got " +
          (name == nullptr ? "null" : name)};
    }
  });
}

const char* hyper_host_last_error(void) { return hyper_parallel::last_error.c_str(); }
