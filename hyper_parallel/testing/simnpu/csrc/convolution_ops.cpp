// Convolutions. For a device type it does not know, torch picks operators named `overrideable`,
// which have no CPU kernel, so the general fallback cannot serve them.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "counters.h"
#include "devices.h"
#include "host_view.h"

namespace simnpu {
namespace {

void BeginKernel() {
  Counters::Get().Add("kernels");
  CurrentQueue()->ExecuteAll();
}

at::Tensor Convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  BeginKernel();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::optional<at::Tensor> bias_view;
  if (bias && bias->defined()) {
    bias_view = BackingView(*bias);
  }
  const at::Tensor result = at::convolution_symint(
      BackingView(input), BackingView(weight), bias_view, stride, padding, dilation, transposed,
      output_padding, std::move(groups));
  return AdoptAsNpuTensor(result, input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> ConvolutionBackward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> output_mask) {
  BeginKernel();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<c10::SymInt> bias_sizes{transposed ? weight.sym_size(1) * groups
                                                       : weight.sym_size(0)};
  at::OptionalSymIntArrayRef wanted_bias_sizes;
  if (output_mask[2]) {
    wanted_bias_sizes = bias_sizes;
  }
  const auto [grad_input, grad_weight, grad_bias] = at::convolution_backward_symint(
      BackingView(grad_output), BackingView(input), BackingView(weight), wanted_bias_sizes, stride,
      padding, dilation, transposed, output_padding, groups, output_mask);
  const c10::Device device = input.device();
  return {AdoptAsNpuTensor(grad_input, device), AdoptAsNpuTensor(grad_weight, device),
          AdoptAsNpuTensor(grad_bias, device)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", Convolution);
  library.impl("convolution_backward_overrideable", ConvolutionBackward);
}

}  // namespace simnpu
