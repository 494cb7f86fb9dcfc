// A list of tensors cut into chunks, and the chunks gathered into tasks of about equal size.
//
// Where the cuts are depends on the tensors alone, so that results, which are combined chunk by
// chunk, do not depend on the number of threads.

#ifndef HYPER_PARALLEL_KERNELS_HOST_WORK_PLAN_H_
#define HYPER_PARALLEL_KERNELS_HOST_WORK_PLAN_H_

#include <cstddef>
#include <vector>

#include "chunk_kernels.h"
#include "host_kernels.h"

namespace hyper_parallel {

// 128 to 512 KiB: a chunk that needs a second look is still in the second-level cache, and lanes
// of 2048 additions keep the error of a sum below 2^-42.
inline constexpr size_t kChunkNumel = size_t{1} << 16;
// Exact sums look twice more often, and their integers hold so many elements.
inline constexpr size_t kExactChunkNumel = size_t{1} << 14;
// Below this much, waking another thread costs more than it saves.
inline constexpr size_t kTaskNumel = size_t{1} << 16;

struct Chunk {
  std::byte* data;
  size_t numel;
  size_t tensor;  // its place in the list
  size_t part;    // among the chunks of tensors that are cut; kWhole if it is all of its tensor
  HyperHostFormat format;
};
inline constexpr size_t kWhole = ~size_t{0};

// A tensor of several chunks, and which parts they are.
struct CutTensor {
  size_t tensor;
  size_t first_part;
  size_t num_parts;
};

struct WorkPlan {
  std::vector<Chunk> chunks;
  std::vector<CutTensor> cut_tensors;
  size_t num_parts = 0;
  std::vector<size_t> task_ends;  // task i has the chunks up to task_ends[i], from task i - 1's

  size_t TaskBegin(size_t task) const { return task == 0 ? 0 : task_ends[task - 1]; }
};

size_t ElementBytes(HyperHostFormat format);

// Throws std::bad_alloc.
WorkPlan MakePlan(const HyperHostTensors& tensors, size_t chunk_numel);

}  // namespace hyper_parallel

#endif  // HYPER_PARALLEL_KERNELS_HOST_WORK_PLAN_H_
