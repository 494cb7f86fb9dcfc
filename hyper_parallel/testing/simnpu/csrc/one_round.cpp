#include "one_round.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/fmax.h>
#include <ATen/ops/fmin.h>
#include <c10/core/ScalarType.h>

namespace simnpu {
namespace {

constexpr int64_t kMostBytesInOneRound = 1 << 20;  // that a rank sends to all together

using Combine = at::Tensor& (*)(at::Tensor& total, const at::Tensor& addend);

// Null for what gloo alone combines.
Combine CombinerOf(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return [](at::Tensor& total, const at::Tensor& addend) -> at::Tensor& {
        return total.add_(addend);
      };
    case c10d::ReduceOp::PRODUCT:
      return [](at::Tensor& total, const at::Tensor& addend) -> at::Tensor& {
        return total.mul_(addend);
      };
    case c10d::ReduceOp::MIN:
      return [](at::Tensor& total, const at::Tensor& addend) -> at::Tensor& {
        return at::fmin_out(total, total, addend);
      };
    case c10d::ReduceOp::MAX:
      return [](at::Tensor& total, const at::Tensor& addend) -> at::Tensor& {
        return at::fmax_out(total, total, addend);  // drops NaN, as devices may
      };
    default:
      return nullptr;
  }
}

}  // namespace

bool CanReduceInOneRound(const TensorList& tensors, const c10d::ReduceOp& op, int size) {
  if (CombinerOf(op) == nullptr || tensors.size() != 1) {
    return false;
  }
  const at::Tensor& tensor = tensors[0];
  const bool is_number = c10::isFloatingType(tensor.scalar_type()) ||
                         c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
  return is_number && tensor.numel() > 0 &&
         static_cast<int64_t>(tensor.nbytes()) * size <= kMostBytesInOneRound;
}

void CombineRows(const at::Tensor& rows, const c10d::ReduceOp& op, at::Tensor total) {
  const Combine combine = CombinerOf(op);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  total.copy_(rows[0].view(total.sizes()));
  for (int64_t rank = 1; rank < rows.size(0); ++rank) {
    combine(total, rows[rank].view(total.sizes()));
  }
}

}  // namespace simnpu
