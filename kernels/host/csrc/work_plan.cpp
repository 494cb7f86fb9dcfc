#include "work_plan.h"

#include <algorithm>

namespace hyper_parallel {

size_t ElementBytes(HyperHostFormat format) {
  switch (format) {
    case HYPER_HOST_FLOAT32:
      return 4;
    case HYPER_HOST_BFLOAT16:
    case HYPER_HOST_FLOAT16:
      return 2;
    case HYPER_HOST_FLOAT64:
      break;
  }
  return 8;
}

WorkPlan MakePlan(const HyperHostTensors& tensors, size_t chunk_numel) {
  WorkPlan plan;
  const auto count = static_cast<size_t>(tensors.count);
  plan.chunks.reserve(count);
  size_t task_numel = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto format = static_cast<HyperHostFormat>(tensors.format[i]);
    auto* data = static_cast<std::byte*>(tensors.data[i]);
    auto numel_left = static_cast<size_t>(tensors.numel[i]);
    const bool is_cut = numel_left > chunk_numel;
    if (is_cut) {
      const size_t num_parts = (numel_left - 1) / chunk_numel + 1;
      plan.cut_tensors.push_back({i, plan.num_parts, num_parts});
    }
    while (numel_left != 0) {
      const size_t numel = std::min(numel_left, chunk_numel);
      plan.chunks.push_back({data, numel, i, is_cut ? plan.num_parts++ : kWhole, format});
      data += numel * ElementBytes(format);
      numel_left -= numel;
      task_numel += numel;
      if (task_numel >= kTaskNumel) {
        plan.task_ends.push_back(plan.chunks.size());
        task_numel = 0;
      }
    }
  }
  if (task_numel != 0) plan.task_ends.push_back(plan.chunks.size());
  return plan;
}

}  // namespace hyper_parallel
