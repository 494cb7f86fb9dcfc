#include "collective_buffers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "devices.h"
#include "host_view.h"

namespace simnpu {

CollectiveBuffers::CollectiveBuffers() { CurrentQueue()->ExecuteAll(); }

at::Tensor CollectiveBuffers::Copy(const at::Tensor& npu_tensor) {
  TORCH_CHECK(IsNpu(npu_tensor), "hccl: expected an npu tensor, got one on ", npu_tensor.device());
  TORCH_CHECK(npu_tensor.is_non_overlapping_and_dense(),
              "hccl: expected a contiguous tensor, got strides ", npu_tensor.strides());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return BackingView(npu_tensor).clone();
}

at::Tensor CollectiveBuffers::Input(const at::Tensor& npu_tensor) {
  num_input_bytes_ += static_cast<int64_t>(npu_tensor.nbytes());
  return Copy(npu_tensor);
}

at::Tensor CollectiveBuffers::Output(const at::Tensor& npu_tensor) {
  num_output_bytes_ += static_cast<int64_t>(npu_tensor.nbytes());
  // Old contents included: a collective may leave part of an output as it was.
  at::Tensor copy = Copy(npu_tensor);
  npu_outputs_.push_back(npu_tensor);
  output_backings_.push_back(BackingView(npu_tensor));
  output_copies_.push_back(copy);
  return copy;
}

TensorList CollectiveBuffers::Inputs(const TensorList& npu_tensors) {
  TensorList copies;
  for (const at::Tensor& tensor : npu_tensors) {
    copies.push_back(Input(tensor));
  }
  return copies;
}

TensorList CollectiveBuffers::Outputs(const TensorList& npu_tensors) {
  TensorList copies;
  for (const at::Tensor& tensor : npu_tensors) {
    copies.push_back(Output(tensor));
  }
  return copies;
}

TensorLists CollectiveBuffers::Inputs(const TensorLists& npu_tensors) {
  TensorLists copies;
  for (const TensorList& list : npu_tensors) {
    copies.push_back(Inputs(list));
  }
  return copies;
}

TensorLists CollectiveBuffers::Outputs(const TensorLists& npu_tensors) {
  TensorLists copies;
  for (const TensorList& list : npu_tensors) {
    copies.push_back(Outputs(list));
  }
  return copies;
}

void CollectiveBuffers::DeliverOutputs() const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i = 0; i < output_copies_.size(); ++i) {
    output_backings_[i].copy_(output_copies_[i]);
  }
}

int64_t CollectiveBuffers::num_bytes() const {
  return std::max(num_input_bytes_, num_output_bytes_);
}

}  // namespace simnpu
