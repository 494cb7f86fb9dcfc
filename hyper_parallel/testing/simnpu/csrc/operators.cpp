// Every operator without a kernel of its own: the CPU kernel, run on the device's bytes.
//
// Kernels run when they are called, after whatever their stream still has queued: torch needs the
// shapes of their results. Only copies and collectives, whose hazards this simulator exists to
// show, stay queued.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "config.h"
#include "counters.h"
#include "devices.h"
#include "generator.h"
#include "host_view.h"
#include "op_arguments.h"

namespace simnpu {
namespace {

constexpr std::string_view kAtenPrefix = "aten::";
constexpr std::string_view kForeachPrefix = "aten::_foreach_";
constexpr std::string_view kFusedPrefix = "aten::_fused_";

// Operators whose result depends on device data in a way the host must know at once: a number, or
// the shape of the result. On every accelerator they block.
constexpr std::string_view kBlockingOps[] = {
    "aten::_unique2",      "aten::bincount",    "aten::masked_select",
    "aten::nonzero",       "aten::unique_dim",  "aten::unique_consecutive",
};

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool IsIndexOp(std::string_view name) {
  return name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
         name == "aten::_index_put_impl_";
}

// Index tensors, step counts and learning rates may live on the host.
bool MayMixDevices(std::string_view name) {
  return IsIndexOp(name) || StartsWith(name, kForeachPrefix) || StartsWith(name, kFusedPrefix);
}

// `view(Tensor(a) self) -> Tensor(a)`: an alias that is not written. It moves no data, so it is no
// kernel and waits for nothing.
bool IsView(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) {
    return false;
  }
  const c10::AliasInfo* alias = schema.returns()[0].alias_info();
  return alias != nullptr && !alias->isWrite();
}

bool ReadsOneScalar(std::string_view name) {
  return name == "aten::_local_scalar_dense" || name == "aten::equal";
}

// A boolean mask stands for as many indices as it has true elements. (Reading by mask needs no such
// check: torch finds the shape of its result by calling aten::nonzero.)
bool WritesByMask(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  if (schema.name() != "aten::_index_put_impl_") {
    return false;
  }
  const c10::IValue& indices = stack[stack.size() - schema.arguments().size() + 1];
  if (!indices.isOptionalTensorList()) {
    return false;
  }
  const auto tensors = indices.toOptionalTensorVector();
  return std::any_of(tensors.begin(), tensors.end(), [](const std::optional<at::Tensor>& index) {
    return index && IsNpu(*index) && index->scalar_type() == at::kBool;
  });
}

bool BlocksHost(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto* end = std::end(kBlockingOps);
  return std::find(std::begin(kBlockingOps), end, schema.name()) != end ||
         WritesByMask(schema, stack);
}

void SynchronizeCurrentQueue() {
  const QueuePtr queue = CurrentQueue();
  queue->Synchronize(queue->Mark());
}

void CopyScalarToHost() {
  constexpr int64_t kScalarBytes = 8;
  Counters::Get().Add("d2h");
  Counters::Get().Add("d2h_bytes", kScalarBytes);
  CountHostSync("scalar_sync");
  CurrentQueue()->Push({}, CopyCostUs(kScalarBytes));
  SynchronizeCurrentQueue();
}

// Counts the call and runs what it must come after.
void PrepareStream(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  if (IsView(schema)) {
    return;
  }
  Counters& counters = Counters::Get();
  counters.Add("kernels");
  if (Config::Get().trace_ops) {
    counters.Add("op." + schema.name());
  }
  if (ReadsOneScalar(schema.name())) {
    CopyScalarToHost();
  } else if (BlocksHost(schema, stack)) {
    CountHostSync("shape_sync");
    SynchronizeCurrentQueue();
  } else {
    CurrentQueue()->ExecuteAll();
  }
}

// The device of the first tensor on one, whose stream an operator runs on.
std::optional<c10::Device> DeviceOfArguments(const c10::FunctionSchema& schema,
                                             const torch::jit::Stack& stack) {
  for (size_t i = stack.size() - schema.arguments().size(); i < stack.size(); ++i) {
    if (stack[i].isTensor() && IsNpu(stack[i].toTensor())) {
      return stack[i].toTensor().device();
    }
  }
  return std::nullopt;
}

void RunCpuKernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const c10::OptionalDeviceGuard guard(DeviceOfArguments(schema, *stack));
  PrepareStream(schema, *stack);

  OpArguments arguments(schema.name(), MayMixDevices(schema.name()));
  const size_t num_arguments = schema.arguments().size();
  const size_t first_argument = stack->size() - num_arguments;
  for (size_t i = 0; i < num_arguments; ++i) {
    c10::IValue& argument = (*stack)[first_argument + i];
    if (argument.isNone() && schema.arguments()[i].name() == "generator") {
      argument = CpuGeneratorOf(DefaultGenerator(CurrentDevice()));
    } else {
      argument = arguments.ToCpu(argument);
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(stack);
  }
  const size_t num_results = schema.returns().size();
  const size_t first_result = stack->size() - num_results;
  for (size_t i = 0; i < num_results; ++i) {
    c10::IValue& result = (*stack)[first_result + i];
    result = arguments.ToNpu(result);
  }
  arguments.UpdateResizedArguments();
}

// The composite foreach kernels are loops over tensors. Registering the fallback for each by name
// makes one call one kernel, as it is on a device.
void RegisterForeachKernels(torch::Library& library) {
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_out_variant = op.overload_name.find("out") != std::string::npos;
    if (!StartsWith(op.name, kForeachPrefix) || is_out_variant) {
      continue;
    }
    std::string name = op.name.substr(kAtenPrefix.size());
    if (!op.overload_name.empty()) {
      name += "." + op.overload_name;
    }
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&RunCpuKernel>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&RunCpuKernel>());
}

// Operators without an autograd kernel, all of c10d's among them: what torch itself does for every
// other device type, and from 2.10 on for this one.
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) {
  constexpr auto kKey = c10::DispatchKey::AutogradPrivateUse1;
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kKey)) {
    library.fallback(torch::autograd::basicAutogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { RegisterForeachKernels(library); }

}  // namespace simnpu
