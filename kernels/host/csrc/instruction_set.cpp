#include "instruction_set.h"

#include <atomic>
#include <cstring>
#include <string>

namespace hyper_parallel {
namespace {

constexpr const InstructionSet* kBestFirst[] = {
#if defined(__x86_64__)
    &kAvx512,
    &kAvx2,
#endif
#if defined(__aarch64__)
    &kNeon,
#endif
    &kScalar,
};

const InstructionSet* Best() {
  for (const InstructionSet* set : kBestFirst) {
    if (set->is_supported()) return set;
  }
  return &kScalar;
}

std::atomic<const InstructionSet*> current{nullptr};

}  // namespace

const InstructionSet& CurrentInstructionSet() {
  const InstructionSet* set = current.load(std::memory_order_relaxed);
  if (set == nullptr) {
    set = Best();
    current.store(set, std::memory_order_relaxed);
  }
  return *set;
}

bool UseInstructionSet(const char* name) {
  if (std::strcmp(name, "auto") == 0) {
    current.store(Best());
    return true;
  }
  for (const InstructionSet* set : kBestFirst) {
    if (std::strcmp(name, set->name) == 0 && set->is_supported()) {
      current.store(set);
      return true;
    }
  }
  return false;
}

const char* InstructionSetNames() {
  static const std::string names = [] {
    std::string list;
    for (const InstructionSet* set : kBestFirst) {
      if (!set->is_supported()) continue;
      if (!list.empty()) list += ' ';
      list += set->name;
    }
    return list;
  }();
  return names.c_str();
}

const FormatKernels& KernelsFor(const InstructionSet& set, HyperHostFormat format) {
  switch (format) {
    case HYPER_HOST_FLOAT32:
      return set.float32;
    case HYPER_HOST_BFLOAT16:
      return set.bfloat16;
    case HYPER_HOST_FLOAT16:
      return set.float16;
    case HYPER_HOST_FLOAT64:
      break;
  }
  return set.float64;
}

}  // namespace hyper_parallel
