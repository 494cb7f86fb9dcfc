#include "pinned_memory.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "counters.h"

namespace simnpu {
namespace {

constexpr size_t kAlignmentBytes = 64;

// Address ranges, by start. Any pointer inside a range is pinned.
class PinnedRanges {
 public:
  static PinnedRanges& Get() {
    static auto* const ranges = new PinnedRanges;
    return *ranges;
  }

  void Insert(const void* start, size_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    num_bytes_by_start_[reinterpret_cast<uintptr_t>(start)] = num_bytes;
  }

  // Returns the size of the range.
  size_t Erase(const void* start) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto range = num_bytes_by_start_.find(reinterpret_cast<uintptr_t>(start));
    if (range == num_bytes_by_start_.end()) {
      return 0;
    }
    const size_t num_bytes = range->second;
    num_bytes_by_start_.erase(range);
    return num_bytes;
  }

  bool Contain(const void* pointer) const {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> lock(mutex_);
    auto range = num_bytes_by_start_.upper_bound(address);
    if (range == num_bytes_by_start_.begin()) {
      return false;
    }
    --range;
    return address - range->first < range->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uintptr_t, size_t> num_bytes_by_start_;
};

void FreePinned(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  const size_t num_bytes = PinnedRanges::Get().Erase(pointer);
  Counters::Get().AddToGauge("pinned_bytes", -static_cast<int64_t>(num_bytes));
  std::free(pointer);
}

// torch's own caching allocator must not reuse memory that queued copies still name, hence its
// record_event. Here queued copies own a reference to the memory, so there is nothing to record.
class PinnedAllocatorImpl final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    void* pointer = nullptr;
    if (num_bytes > 0) {
      TORCH_CHECK(posix_memalign(&pointer, kAlignmentBytes, num_bytes) == 0,
                  "npu: cannot allocate ", num_bytes, " bytes of pinned memory");
      PinnedRanges::Get().Insert(pointer, num_bytes);
      Counters::Get().AddToGauge("pinned_bytes", static_cast<int64_t>(num_bytes));
      Counters::Get().Add("pinned_allocs");
    }
    return {pointer, pointer, &FreePinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &FreePinned; }
  void copy_data(void* destination, const void* source, size_t num_bytes) const override {
    std::memcpy(destination, source, num_bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

at::HostAllocator* PinnedAllocator() {
  static auto* const allocator = new PinnedAllocatorImpl;
  return allocator;
}

bool IsPinned(const void* pointer) { return PinnedRanges::Get().Contain(pointer); }

}  // namespace simnpu
