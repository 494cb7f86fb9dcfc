// Operators that make tensors, or change which storage a tensor shows.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "devices.h"
#include "host_view.h"
#include "memory.h"

namespace simnpu {
namespace {

constexpr c10::DispatchKeySet kNpuKeySet(c10::DispatchKey::PrivateUse1);

at::Tensor Empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> memory_format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, DeviceAllocator(), kNpuKeySet,
                                   c10::dtype_or_default(dtype), memory_format);
}

at::Tensor EmptyStrided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, DeviceAllocator(), kNpuKeySet,
                                           c10::dtype_or_default(dtype));
}

std::vector<int64_t> ContiguousStrides(c10::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) {
    strides[dim - 1] = strides[dim] * std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

at::Tensor& SetStorageAndLayout(at::Tensor& self, at::Storage source, int64_t storage_offset,
                                c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, storage_offset);
  } else {  // strides left out
    impl->set_sizes_and_strides(sizes, ContiguousStrides(sizes), storage_offset);
  }
  return self;
}

at::Tensor& SetStorage(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return SetStorageAndLayout(self, std::move(source), 0, {numel}, {1});
}

at::Tensor& SetTensor(at::Tensor& self, const at::Tensor& source) {
  return SetStorageAndLayout(self, source.storage(), source.storage_offset(), source.sizes(),
                             source.strides());
}

at::Tensor& SetEmpty(at::Tensor& self) {
  const at::Tensor empty = at::detail::empty_generic({0}, DeviceAllocator(), kNpuKeySet,
                                                     self.scalar_type(), std::nullopt);
  return SetStorageAndLayout(self, empty.storage(), 0, {0}, {1});
}

// Lets `cpu_parameter.data = npu_tensor` work; nn.Module.to and FSDP2 rely on it.
bool HaveCompatibleShallowCopyType(const at::Tensor& self, const at::Tensor& other) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == c10::kStrided && (IsNpu(tensor) || tensor.device().is_cpu());
  };
  return is_dense(self) && is_dense(other);
}

// Queued work owns what it reads and writes: there is nothing to record.
void RecordStream(at::Tensor&, c10::Stream) {}

// Scaled dot product attention by its decomposition, the only form that has kernels here.
int64_t ChooseFusedSdp(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                       bool) {
  constexpr int64_t kMathBackend = 0;  // at::SDPBackend::math
  return kMathBackend;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", Empty);
  library.impl("empty_strided", EmptyStrided);
  library.impl("set_.source_Storage_storage_offset", SetStorageAndLayout);
  library.impl("set_.source_Storage", SetStorage);
  library.impl("set_.source_Tensor", SetTensor);
  library.impl("set_", SetEmpty);
  library.impl("_has_compatible_shallow_copy_type", HaveCompatibleShallowCopyType);
  library.impl("record_stream", RecordStream);
  library.impl("_fused_sdp_choice", ChooseFusedSdp);
}

}  // namespace simnpu
