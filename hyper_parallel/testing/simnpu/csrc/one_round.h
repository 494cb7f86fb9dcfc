// All-reduces in one round: every rank sends all it has to every other, as HCCL does between the
// cards of a server. gloo's ring takes 2 (size - 1) rounds one after the other; with more ranks than
// cores each of those waits for a core, which no NPU does.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "collective_buffers.h"

namespace simnpu {

// Whether an all-reduce of these tensors is small enough. Does not tell the operations that are made
// so apart: ranks that ask for different ones do not hang, as they do not on a ring.
bool CanReduceInOneRound(const TensorList& tensors, const c10d::ReduceOp& op, int size);

// Reduces rows, one per rank, in their order into `total`.
void CombineRows(const at::Tensor& rows, const c10d::ReduceOp& op, at::Tensor total);

}  // namespace simnpu
