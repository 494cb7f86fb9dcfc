// Device indices, and which stream each thread currently uses on each device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>

#include "streams.h"

namespace simnpu {

// torch keeps this slot for device types it does not know; install() names it "npu".
constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;

using QueuePtr = std::shared_ptr<CommandQueue>;

// Called once, before any other function here.
void InitDevices(int num_devices);
int DeviceCount() noexcept;

// The current device is a property of the calling thread.
c10::DeviceIndex CurrentDevice() noexcept;
void SetCurrentDevice(c10::DeviceIndex index);           // checks the range
void SetCurrentDeviceUnchecked(c10::DeviceIndex index) noexcept;
// `index` itself, or the current device if it is negative (torch's "unspecified").
c10::DeviceIndex ResolveDevice(c10::DeviceIndex index);

c10::Stream CurrentStream(c10::DeviceIndex device);
c10::Stream DefaultStream(c10::DeviceIndex device);
c10::Stream NewStream(c10::DeviceIndex device);
// Makes `stream` current on its device and returns the one it replaces.
c10::Stream ExchangeStream(c10::Stream stream);

QueuePtr QueueOf(const c10::Stream& stream);
// The queue of the current stream of the current device.
QueuePtr CurrentQueue();
// A queue with no c10::Stream, for a backend's communication. Belongs to every device, since a
// backend may be made before its rank picks a device.
QueuePtr NewInternalQueue();

// The host waits for all streams of `device` and for all internal queues.
void SynchronizeDevice(c10::DeviceIndex device);

}  // namespace simnpu
