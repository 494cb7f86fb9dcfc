#include "op_arguments.h"

#include <ATen/core/List.h>
#include <c10/util/Exception.h>

#include "devices.h"
#include "generator.h"
#include "host_view.h"
#include "memory.h"

namespace simnpu {

c10::IValue OpArguments::ToCpu(const c10::IValue& argument) {
  if (argument.isTensor()) {
    return TensorToCpu(argument.toTensor());
  }
  if (argument.isTensorList()) {
    c10::List<at::Tensor> views;
    for (const at::Tensor& tensor : argument.toTensorVector()) {
      views.push_back(TensorToCpu(tensor));
    }
    return views;
  }
  if (argument.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> views;
    for (const std::optional<at::Tensor>& tensor : argument.toOptionalTensorVector()) {
      views.push_back(tensor ? std::optional<at::Tensor>(TensorToCpu(*tensor)) : std::nullopt);
    }
    return views;
  }
  if (argument.isDevice() && argument.toDevice().type() == kNpu) {
    device_ = argument.toDevice();
    return c10::Device(c10::kCPU);
  }
  if (argument.isGenerator()) {
    return CpuGeneratorOf(argument.toGenerator());
  }
  return argument;
}

c10::IValue OpArguments::ToNpu(const c10::IValue& result) {
  if (result.isTensor()) {
    return TensorToNpu(result.toTensor());
  }
  if (result.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : result.toTensorVector()) {
      tensors.push_back(TensorToNpu(tensor));
    }
    return tensors;
  }
  return result;
}

void OpArguments::UpdateResizedArguments() {
  for (const auto& [impl, view] : view_of_argument_) {
    UpdateMetadata(argument_of_view_.at(view.unsafeGetTensorImpl()), view);
  }
}

at::Tensor OpArguments::TensorToCpu(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  if (!IsNpu(tensor)) {
    RejectHostTensor(tensor);
    return tensor;
  }
  if (!device_) {
    device_ = tensor.device();
  }
  const auto known = view_of_argument_.find(tensor.unsafeGetTensorImpl());
  if (known != view_of_argument_.end()) {
    return known->second;  // the same tensor twice must stay the same tensor
  }
  at::Tensor view = BackingView(tensor);
  view_of_argument_.emplace(tensor.unsafeGetTensorImpl(), view);
  argument_of_view_.emplace(view.unsafeGetTensorImpl(), tensor);
  device_storage_of_backing_.emplace(view.storage().unsafeGetStorageImpl(), tensor.storage());
  return view;
}

void OpArguments::RejectHostTensor(const at::Tensor& tensor) const {
  // A 0-dim host tensor is passed by value, as to any device kernel.
  const bool is_allowed = may_mix_devices_ || tensor.dim() == 0 || !tensor.device().is_cpu();
  TORCH_CHECK(is_allowed,
              "Expected all tensors to be on the same device, but found at least two devices, "
              "npu and ",
              tensor.device(), "! (", op_name_, ")");
}

at::Tensor OpArguments::TensorToNpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) {
    return tensor;
  }
  const auto argument = argument_of_view_.find(tensor.unsafeGetTensorImpl());
  if (argument != argument_of_view_.end()) {
    UpdateMetadata(argument->second, tensor);
    return argument->second;
  }
  const auto storage = device_storage_of_backing_.find(tensor.storage().unsafeGetStorageImpl());
  if (storage != device_storage_of_backing_.end()) {
    return NpuTensorOver(storage->second, tensor);
  }
  return AdoptAsNpuTensor(tensor, device_.value_or(c10::Device(kNpu, CurrentDevice())));
}

void OpArguments::UpdateMetadata(const at::Tensor& npu_tensor, const at::Tensor& view) const {
  FollowBacking(npu_tensor.storage());
  if (npu_tensor.sizes() != view.sizes() || npu_tensor.strides() != view.strides()) {
    npu_tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(),
                                                            view.storage_offset());
  }
}

}  // namespace simnpu
