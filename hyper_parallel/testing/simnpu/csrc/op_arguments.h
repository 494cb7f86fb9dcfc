// The arguments of one operator call, turned into what a CPU kernel takes, and its results turned
// back.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <unordered_map>

namespace simnpu {

// Results keep identity: a result that is one of the arguments (in-place, out=) comes back as the
// very same npu tensor, a result that views an argument shares its device storage, and a new
// result is adopted without a copy.
class OpArguments {
 public:
  // `may_mix_devices`: CPU tensors with dimensions are legal arguments of this operator.
  OpArguments(const std::string& op_name, bool may_mix_devices)
      : op_name_(op_name), may_mix_devices_(may_mix_devices) {}

  c10::IValue ToCpu(const c10::IValue& argument);
  c10::IValue ToNpu(const c10::IValue& result);

  // Carries over what the kernel resized although it did not return it.
  void UpdateResizedArguments();

 private:
  at::Tensor TensorToCpu(const at::Tensor& tensor);
  at::Tensor TensorToNpu(const at::Tensor& tensor);
  void RejectHostTensor(const at::Tensor& tensor) const;
  void UpdateMetadata(const at::Tensor& npu_tensor, const at::Tensor& view) const;

  const std::string& op_name_;
  const bool may_mix_devices_;
  std::optional<c10::Device> device_;  // of the first npu argument: where new results live
  std::unordered_map<c10::TensorImpl*, at::Tensor> view_of_argument_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> argument_of_view_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> device_storage_of_backing_;
};

}  // namespace simnpu
