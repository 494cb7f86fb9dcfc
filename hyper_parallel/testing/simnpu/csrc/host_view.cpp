#include "host_view.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

#include <utility>

#include "memory.h"

namespace simnpu {
namespace {

at::Tensor TensorOver(c10::Storage storage, c10::DispatchKey key, const at::Tensor& layout) {
  // An inference tensor if the other is one, whatever the mode is now: as views are.
  const c10::InferenceMode as_the_other(layout.is_inference());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), layout.dtype());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(layout.sizes(), layout.strides(), layout.storage_offset());
  impl->_set_conj(layout.is_conj());
  impl->_set_neg(layout.is_neg());
  return tensor;
}

}  // namespace

at::Tensor BackingView(const at::Tensor& npu_tensor) {
  at::Tensor view =
      TensorOver(BackingOf(npu_tensor.storage()), c10::DispatchKey::CPU, npu_tensor);
  if (npu_tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    view.unsafeGetTensorImpl()->set_wrapped_number(true);  // type promotion depends on it
  }
  return view;
}

at::Tensor DetachedView(const at::Tensor& cpu_tensor) {
  return TensorOver(cpu_tensor.storage(), c10::DispatchKey::CPU, cpu_tensor);
}

at::Tensor HostView(const at::Tensor& tensor) {
  return IsNpu(tensor) ? BackingView(tensor) : DetachedView(tensor);
}

at::Tensor NpuTensorOver(c10::Storage storage, const at::Tensor& layout) {
  return TensorOver(std::move(storage), c10::DispatchKey::PrivateUse1, layout);
}

at::Tensor AdoptAsNpuTensor(const at::Tensor& cpu_result, c10::Device device) {
  if (!cpu_result.defined()) {
    return cpu_result;
  }
  return NpuTensorOver(AdoptAsDeviceStorage(cpu_result.storage(), device), cpu_result);
}

}  // namespace simnpu
