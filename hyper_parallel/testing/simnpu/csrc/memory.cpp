#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "config.h"
#include "counters.h"
#include "devices.h"

namespace simnpu {
namespace {

constexpr int kPoisonByte = 0xFF;

void* ToDevicePointer(void* pointer) {
  if (pointer == nullptr) {
    return nullptr;
  }
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) | kDeviceBit);
}

void* ToHostPointer(const void* pointer) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) & ~kDeviceBit);
}

// The context of a device DataPtr: owns the backing.
struct DeviceBlock {
  c10::Storage backing;
};

void CountDeviceBytes(size_t freed, size_t allocated) {
  Counters::Get().AddToGauge("device_bytes",
                             static_cast<int64_t>(allocated) - static_cast<int64_t>(freed));
}

void DeleteDeviceBlock(void* context) {
  auto* block = static_cast<DeviceBlock*>(context);
  CountDeviceBytes(block->backing.nbytes(), 0);
  delete block;
}

c10::Storage NewBacking(size_t num_bytes) {
  c10::Storage backing(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                             num_bytes, c10::GetCPUAllocator(),
                                                             /*resizable=*/true));
  if (num_bytes > 0 && Config::Get().poison) {
    std::memset(backing.mutable_data(), kPoisonByte, num_bytes);
  }
  return backing;
}

void* DeviceAddress(const c10::Storage& backing) {
  return backing.nbytes() == 0 ? nullptr : ToDevicePointer(backing.mutable_data());
}

c10::DataPtr OwnBacking(c10::Storage backing, c10::Device device) {
  CountDeviceBytes(0, backing.nbytes());
  void* address = DeviceAddress(backing);
  return {address, new DeviceBlock{std::move(backing)}, &DeleteDeviceBlock, device};
}

DeviceBlock* BlockOf(const c10::Storage& storage) {
  const c10::DataPtr& data = storage.data_ptr();
  TORCH_CHECK(data.get_deleter() == &DeleteDeviceBlock,
              "npu: this storage was not allocated by the simulated NPU");
  return static_cast<DeviceBlock*>(data.get_context());
}

class DeviceAllocatorImpl final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    return OwnBacking(NewBacking(num_bytes), c10::Device(kNpu, CurrentDevice()));
  }
  // The context is not the pointer, so torch may not free by pointer alone.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* destination, const void* source, size_t num_bytes) const override {
    std::memcpy(ToHostPointer(destination), ToHostPointer(source), num_bytes);
  }
};

}  // namespace

c10::Allocator* DeviceAllocator() {
  static auto* const allocator = new DeviceAllocatorImpl;
  return allocator;
}

bool IsDevicePointer(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & kDeviceBit) != 0;
}

c10::Storage AdoptAsDeviceStorage(c10::Storage backing, c10::Device device) {
  const size_t num_bytes = backing.nbytes();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), num_bytes, OwnBacking(std::move(backing), device),
      DeviceAllocator(), /*resizable=*/true));
}

c10::Storage BackingOf(const c10::Storage& device_storage) {
  return BlockOf(device_storage)->backing;
}

void FollowBacking(const c10::Storage& device_storage) {
  DeviceBlock* block = BlockOf(device_storage);
  c10::StorageImpl* impl = device_storage.unsafeGetStorageImpl();
  const size_t num_bytes = block->backing.nbytes();
  void* address = DeviceAddress(block->backing);
  if (address == device_storage.data() && num_bytes == impl->nbytes()) {
    return;
  }
  CountDeviceBytes(impl->nbytes(), num_bytes);
  c10::DataPtr stale = impl->set_data_ptr(
      c10::DataPtr(address, block, &DeleteDeviceBlock, device_storage.device()));
  stale.release_context();  // the block lives on in the new DataPtr
  impl->set_nbytes(num_bytes);
}

void ResizeDeviceStorage(const c10::Storage& device_storage, size_t num_bytes) {
  DeviceBlock* block = BlockOf(device_storage);
  const size_t num_old_bytes = block->backing.nbytes();
  if (num_bytes == num_old_bytes) {
    return;
  }
  // A fresh backing: queued work keeps the old bytes alive through its own reference.
  c10::Storage backing = NewBacking(num_bytes);
  const size_t num_kept_bytes = std::min(num_bytes, num_old_bytes);
  if (num_kept_bytes > 0) {
    CurrentQueue()->ExecuteAll();
    std::memcpy(backing.mutable_data(), block->backing.data(), num_kept_bytes);
  }
  block->backing = std::move(backing);
  FollowBacking(device_storage);
}

}  // namespace simnpu
