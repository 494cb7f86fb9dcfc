#include "hooks.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include "devices.h"
#include "generator.h"
#include "memory.h"
#include "pinned_memory.h"

namespace simnpu {
namespace {

class NpuHooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(DeviceCount());
  }
  c10::DeviceIndex getCurrentDevice() const override { return CurrentDevice(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { SetCurrentDevice(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex previous = CurrentDevice();
    SetCurrentDevice(index);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? CurrentDevice() : exchangeDevice(index);
  }

  bool isPinnedPtr(const void* pointer) const override { return IsPinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return PinnedAllocator(); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    TORCH_CHECK(IsDevicePointer(pointer), "npu: ", pointer, " is not a device address");
    return c10::Device(kNpu, CurrentDevice());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    ResizeDeviceStorage(storage, num_bytes);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return DefaultGenerator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return NewGenerator(index);
  }
};

}  // namespace

void RegisterHooks() {
  c10::SetAllocator(kNpu, DeviceAllocator());
  at::setHostAllocator(kNpu, PinnedAllocator());
  at::RegisterPrivateUse1HooksInterface(new NpuHooks);  // torch keeps it for good
}

}  // namespace simnpu
