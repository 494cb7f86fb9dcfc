#include "devices.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <vector>

namespace simnpu {
namespace {

constexpr c10::StreamId kDefaultStreamId = 0;

// Every queue ever made. A stream's id is its place in its device's list; queues are small and
// are kept for the life of the process, as ids must never be reused.
struct Registry {
  std::mutex mutex;
  std::vector<std::vector<QueuePtr>> by_device;
  std::vector<QueuePtr> internal;
};

Registry& GetRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

int g_num_devices = 0;
thread_local c10::DeviceIndex tls_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> tls_current_stream;

c10::Stream MakeStream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, device), id);
}

}  // namespace

void InitDevices(int num_devices) {
  TORCH_CHECK(g_num_devices == 0, "npu: initialised twice");
  g_num_devices = num_devices;
  Registry& registry = GetRegistry();
  registry.by_device.resize(num_devices);
  for (std::vector<QueuePtr>& queues : registry.by_device) {
    queues.push_back(std::make_shared<CommandQueue>());
  }
}

int DeviceCount() noexcept { return g_num_devices; }

c10::DeviceIndex CurrentDevice() noexcept { return tls_device; }

void SetCurrentDevice(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < g_num_devices, "npu: device index ",
              static_cast<int>(index), " is not below the number of simulated devices, ",
              g_num_devices, "; simnpu.install(num_devices=...) sets it");
  tls_device = index;
}

void SetCurrentDeviceUnchecked(c10::DeviceIndex index) noexcept { tls_device = index; }

c10::DeviceIndex ResolveDevice(c10::DeviceIndex index) { return index < 0 ? tls_device : index; }

c10::Stream CurrentStream(c10::DeviceIndex device) {
  const c10::DeviceIndex index = ResolveDevice(device);
  return MakeStream(index, tls_current_stream[index]);
}

c10::Stream DefaultStream(c10::DeviceIndex device) {
  return MakeStream(ResolveDevice(device), kDefaultStreamId);
}

c10::Stream NewStream(c10::DeviceIndex device) {
  const c10::DeviceIndex index = ResolveDevice(device);
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<QueuePtr>& queues = registry.by_device.at(index);
  queues.push_back(std::make_shared<CommandQueue>());
  return MakeStream(index, static_cast<c10::StreamId>(queues.size()) - 1);
}

c10::Stream ExchangeStream(c10::Stream stream) {
  const c10::DeviceIndex index = ResolveDevice(stream.device_index());
  const c10::Stream previous = CurrentStream(index);
  tls_current_stream[index] = stream.id();
  return previous;
}

QueuePtr QueueOf(const c10::Stream& stream) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  return registry.by_device.at(ResolveDevice(stream.device_index())).at(stream.id());
}

QueuePtr CurrentQueue() { return QueueOf(CurrentStream(tls_device)); }

QueuePtr NewInternalQueue() {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.internal.push_back(std::make_shared<CommandQueue>());
  return registry.internal.back();
}

void SynchronizeDevice(c10::DeviceIndex device) {
  std::vector<QueuePtr> queues;
  {
    Registry& registry = GetRegistry();
    std::lock_guard<std::mutex> lock(registry.mutex);
    queues = registry.by_device.at(ResolveDevice(device));
    queues.insert(queues.end(), registry.internal.begin(), registry.internal.end());
  }
  for (const QueuePtr& queue : queues) {
    queue->Synchronize(queue->Mark());
  }
}

}  // namespace simnpu
