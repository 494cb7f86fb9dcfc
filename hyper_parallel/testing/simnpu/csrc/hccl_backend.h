// The "hccl" process group backend: gloo underneath, npu tensors only.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simnpu {

c10::intrusive_ptr<c10d::Backend> MakeHcclBackend(const c10::intrusive_ptr<c10d::Backend>& gloo);

}  // namespace simnpu
