// Random number generators of device type npu. Each wraps a CPU generator, since CPU kernels run.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace simnpu {

const at::Generator& DefaultGenerator(c10::DeviceIndex device);

at::Generator NewGenerator(c10::DeviceIndex device);

// The CPU generator behind an npu generator; any other generator as it is.
at::Generator CpuGeneratorOf(const at::Generator& generator);

}  // namespace simnpu
