// The CPU tensors that gloo works on while a collective is in flight.
//
// gloo starts at once, in its own threads, because a device makes progress without its host: were
// it started late, two ranks that synchronise different groups first would deadlock. If gloo worked
// on device memory itself, a program that reads a result too early would see old or new bytes by
// chance. So it works on copies, and results reach device memory when the communication stream
// executes the collective: a program that forgets to wait sees the old bytes every time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace simnpu {

using TensorList = std::vector<at::Tensor>;
using TensorLists = std::vector<TensorList>;

class CollectiveBuffers {
 public:
  // First executes the current stream, since the collective reads what was queued there.
  CollectiveBuffers();

  // Each returns the CPU copies to give to gloo. Throws if a tensor is not on the device.
  at::Tensor Input(const at::Tensor& npu_tensor);
  at::Tensor Output(const at::Tensor& npu_tensor);
  TensorList Inputs(const TensorList& npu_tensors);
  TensorList Outputs(const TensorList& npu_tensors);
  TensorLists Inputs(const TensorLists& npu_tensors);
  TensorLists Outputs(const TensorLists& npu_tensors);
  // Read and overwritten.
  TensorList InOuts(const TensorList& npu_tensors) { return Outputs(npu_tensors); }

  // Copies the outputs to device memory.
  void DeliverOutputs() const;

  const TensorList& npu_outputs() const { return npu_outputs_; }
  // What goes over the wire, roughly: the bigger of all inputs and all outputs.
  int64_t num_bytes() const;

 private:
  at::Tensor Copy(const at::Tensor& npu_tensor);

  TensorList npu_outputs_;
  TensorList output_backings_;
  TensorList output_copies_;
  int64_t num_input_bytes_ = 0;
  int64_t num_output_bytes_ = 0;
};

}  // namespace simnpu
