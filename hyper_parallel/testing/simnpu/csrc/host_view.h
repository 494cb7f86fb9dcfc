// CPU tensors over device bytes and back. Nothing here copies.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "devices.h"

namespace simnpu {

inline bool IsNpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kNpu;
}

// A CPU tensor over the backing of `npu_tensor`, of the same shape, strides and dtype.
at::Tensor BackingView(const at::Tensor& npu_tensor);

// A CPU tensor over the same bytes as `cpu_tensor`, for work that runs later: it keeps the bytes
// alive, and does not notice when the program resizes or re-points the original meanwhile.
at::Tensor DetachedView(const at::Tensor& cpu_tensor);

// BackingView or DetachedView, whichever fits.
at::Tensor HostView(const at::Tensor& tensor);

// An npu tensor over `storage` with the shape, strides and dtype of `layout`.
at::Tensor NpuTensorOver(c10::Storage storage, const at::Tensor& layout);

// The npu tensor that owns what a CPU kernel returned.
at::Tensor AdoptAsNpuTensor(const at::Tensor& cpu_result, c10::Device device);

}  // namespace simnpu
