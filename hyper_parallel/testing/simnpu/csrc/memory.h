// Device memory that the CPU cannot touch.
//
// The bytes of a device storage live in an ordinary CPU storage, its *backing*. What torch and the
// user see is the backing's address with bit 52 set. No user-space mapping can be there (x86-64
// has 47 or 56 address bits and demands that the bits above are equal; aarch64 has at most 52,
// numbered 0 to 51), so any load or store through it is a SIGSEGV at that instruction, as it is
// for a device pointer. Operators reach the backing through host_view.h.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>

namespace simnpu {

// Set in every device address. Without it, it is where the bytes are.
inline constexpr uintptr_t kDeviceBit = uintptr_t{1} << 52;

// Allocates on the current device.
c10::Allocator* DeviceAllocator();

bool IsDevicePointer(const void* pointer);

// A device storage over bytes that a CPU kernel produced; nothing is copied.
c10::Storage AdoptAsDeviceStorage(c10::Storage backing, c10::Device device);

// The CPU storage behind `device_storage`. An error if this simulator did not allocate it.
c10::Storage BackingOf(const c10::Storage& device_storage);

// Brings address and size up to date after a CPU kernel resized the backing.
void FollowBacking(const c10::Storage& device_storage);

// What `untyped_storage().resize_()` does. FSDP frees unsharded parameters with it.
void ResizeDeviceStorage(const c10::Storage& device_storage, size_t num_bytes);

}  // namespace simnpu
