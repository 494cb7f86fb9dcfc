// torch.autocast("npu"): torch's own policy lists, registered for this device type.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace simnpu {

// The signatures in torch's lists are written without their namespace, and each torch version
// names other types in them.
using namespace at;

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

#define SIMNPU_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMNPU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMNPU_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMNPU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

// The macros name their parameter `m`.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIMNPU_LOWER_PRECISION)
  AT_FORALL_FP32(SIMNPU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMNPU_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIMNPU_PROMOTE)
}

}  // namespace simnpu
