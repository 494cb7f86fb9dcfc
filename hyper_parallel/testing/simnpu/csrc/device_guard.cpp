// How torch reaches devices, streams and events of a device type it does not know.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "counters.h"
#include "devices.h"
#include "streams.h"

namespace simnpu {
namespace {

// torch's opaque event pointer. Null until the event is first recorded.
const Marker* AsMarker(const void* event) { return static_cast<const Marker*>(event); }

class NpuGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kNpu; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    if (device.index() >= 0) {
      SetCurrentDevice(device.index());
    }
    return previous;
  }
  c10::Device getDevice() const override { return c10::Device(kNpu, CurrentDevice()); }
  void setDevice(c10::Device device) const override { SetCurrentDevice(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    SetCurrentDeviceUnchecked(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(DeviceCount());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    CountHostSync("device_sync");
    SynchronizeDevice(device);
  }

  c10::Stream getStream(c10::Device device) const override { return CurrentStream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return DefaultStream(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return NewStream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return NewStream(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return ExchangeStream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    const QueuePtr queue = QueueOf(stream);
    return queue->Query(queue->Mark());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    CountHostSync("stream_sync");
    const QueuePtr queue = QueueOf(stream);
    queue->Synchronize(queue->Mark());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Marker marker = QueueOf(stream)->Mark();
    if (*event == nullptr) {
      *event = new Marker;
    }
    *static_cast<Marker*>(*event) = std::move(marker);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      QueueOf(stream)->WaitFor(*AsMarker(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || AsMarker(event)->queue->Query(*AsMarker(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;  // never recorded: nothing to wait for
    }
    CountHostSync("event_sync");
    AsMarker(event)->queue->Synchronize(*AsMarker(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Marker*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    const std::chrono::duration<double, std::milli> elapsed =
        AsMarker(end)->finish_time - AsMarker(start)->finish_time;
    return elapsed.count();
  }

  // Queued work owns what it reads and writes, so nothing needs to outlive its last reference.
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

const c10::impl::DeviceGuardImplRegistrar g_registrar(kNpu, new NpuGuard);

}  // namespace
}  // namespace simnpu
