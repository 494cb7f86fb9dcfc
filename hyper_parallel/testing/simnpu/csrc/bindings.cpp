// What Python sees.
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>

#include "config.h"
#include "counters.h"
#include "devices.h"
#include "generator.h"
#include "hccl_backend.h"
#include "hooks.h"
#include "memory.h"
#include "pinned_memory.h"
#include "streams.h"

namespace py = pybind11;

namespace {

void Init(int num_devices) {
  simnpu::InitDevices(num_devices);
  simnpu::RegisterHooks();
}

void Configure(double copy_us, double copy_us_per_mib, double collective_us,
               double collective_us_per_mib, bool trace_ops, bool poison) {
  simnpu::Config& config = simnpu::Config::Get();
  config.copy_us = copy_us;
  config.copy_us_per_mib = copy_us_per_mib;
  config.collective_us = collective_us;
  config.collective_us_per_mib = collective_us_per_mib;
  config.trace_ops = trace_ops;
  config.poison = poison;
}

void Synchronize(int device) {
  simnpu::CountHostSync("device_sync");
  simnpu::SynchronizeDevice(static_cast<c10::DeviceIndex>(device));
}

// A kernel that is not one of torch's operators runs now, after whatever its stream still has queued.
void BeginKernel() {
  simnpu::Counters::Get().Add("kernel_launches");
  simnpu::CurrentQueue()->ExecuteAll();
}

// torch.Event.elapsed_time refuses subclasses of torch.Event.
double ElapsedMs(int64_t start_event_id, int64_t end_event_id) {
  const auto* start = reinterpret_cast<const simnpu::Marker*>(start_event_id);
  const auto* end = reinterpret_cast<const simnpu::Marker*>(end_event_id);
  TORCH_CHECK(start != nullptr && end != nullptr, "npu: both events must have been recorded");
  return std::chrono::duration<double, std::milli>(end->finish_time - start->finish_time).count();
}

}  // namespace

PYBIND11_MODULE(hyper_parallel_simnpu, module) {
  module.def("init", &Init);
  module.def("configure", &Configure);
  module.def("counters", [] { return simnpu::Counters::Get().Snapshot(); });
  module.def("reset_counters", [] { simnpu::Counters::Get().Reset(); });

  module.def("device_count", &simnpu::DeviceCount);
  module.def("current_device", [] { return static_cast<int>(simnpu::CurrentDevice()); });
  module.def("set_device", [](int index) {
    simnpu::SetCurrentDevice(static_cast<c10::DeviceIndex>(index));
  });
  module.def("synchronize", &Synchronize, py::call_guard<py::gil_scoped_release>());
  module.def("elapsed_ms", &ElapsedMs);
  module.def("begin_kernel", &BeginKernel, py::call_guard<py::gil_scoped_release>());
  module.def("is_pinned_address", [](uint64_t address) {
    return simnpu::IsPinned(reinterpret_cast<const void*>(address));
  });
  module.attr("DEVICE_ADDRESS_BIT") = static_cast<uint64_t>(simnpu::kDeviceBit);
  module.def("default_generator", [](int device) {
    return simnpu::DefaultGenerator(static_cast<c10::DeviceIndex>(device));
  });

  module.def("make_hccl_backend", &simnpu::MakeHcclBackend);
}
