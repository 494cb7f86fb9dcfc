// Page-locked host memory: ordinary memory, plus the knowledge of which addresses are pinned. Only
// copies from and to pinned memory are asynchronous.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace simnpu {

at::HostAllocator* PinnedAllocator();

bool IsPinned(const void* pointer);

}  // namespace simnpu
