#include "hccl_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective_buffers.h"
#include "config.h"
#include "counters.h"
#include "devices.h"
#include "hccl_work.h"
#include "one_round.h"
#include "streams.h"

namespace simnpu {
namespace {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// gloo cannot average. Makes `options` a sum; returns whether it was an average.
template <typename Options>
bool ReplaceAverageBySum(Options* options) {
  if (options->reduceOp != c10d::ReduceOp::AVG) {
    return false;
  }
  options->reduceOp = c10d::ReduceOp::SUM;
  return true;
}

void DivideAll(const TensorList& tensors, int divisor) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const at::Tensor& tensor : tensors) {
    if (c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
      tensor.div_(divisor, "trunc");
    } else {
      tensor.div_(divisor);
    }
  }
}

at::Tensor Pack(const TensorList& tensors) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  TensorList flat;
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(tensor.flatten());
  }
  return at::cat(flat);
}

void Unpack(const at::Tensor& packed, const TensorList& tensors) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  int64_t start = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.copy_(packed.narrow(0, start, tensor.numel()).view(tensor.sizes()));
    start += tensor.numel();
  }
}

std::vector<int64_t> Numels(const TensorList& tensors) {
  std::vector<int64_t> numels;
  for (const at::Tensor& tensor : tensors) {
    numels.push_back(tensor.numel());
  }
  return numels;
}

class HcclBackend final : public c10d::Backend {
 public:
  explicit HcclBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        stream_(NewInternalQueue()) {}

  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  // Operations run as they come; the group of them is what the stream holds at its end.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override {
    return c10::make_intrusive<HcclWork>(rank_, OpType::COALESCED, nullptr, stream_->Mark(),
                                         TensorList{}, WaitMode::kStream);
  }

  WorkPtr broadcast(TensorList& tensors, const c10d::BroadcastOptions& options) override {
    CollectiveBuffers buffers;
    TensorList copies = buffers.InOuts(tensors);
    return Launch("broadcast", OpType::BROADCAST, buffers,
                  [&] { return gloo_->broadcast(copies, options); });
  }

  WorkPtr allreduce(TensorList& tensors, const c10d::AllreduceOptions& options) override {
    CollectiveBuffers buffers;
    TensorList copies = buffers.InOuts(tensors);
    c10d::AllreduceOptions gloo_options = options;
    const bool is_average = ReplaceAverageBySum(&gloo_options);
    if (CanReduceInOneRound(copies, gloo_options.reduceOp, size_)) {
      return ReduceInOneRound(buffers, copies[0], gloo_options, AverageOver(is_average, copies));
    }
    return Launch("allreduce", OpType::ALLREDUCE, buffers,
                  [&] { return gloo_->allreduce(copies, gloo_options); },
                  AverageOver(is_average, copies));
  }

  WorkPtr allreduce_coalesced(TensorList& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    CollectiveBuffers buffers;
    TensorList copies = buffers.InOuts(tensors);
    c10d::AllreduceCoalescedOptions gloo_options = options;
    const bool is_average = ReplaceAverageBySum(&gloo_options);
    return Launch("allreduce_coalesced", OpType::ALLREDUCE_COALESCED, buffers,
                  [&] { return gloo_->allreduce_coalesced(copies, gloo_options); },
                  AverageOver(is_average, copies));
  }

  WorkPtr reduce(TensorList& tensors, const c10d::ReduceOptions& options) override {
    CollectiveBuffers buffers;
    TensorList copies = buffers.InOuts(tensors);
    c10d::ReduceOptions gloo_options = options;
    const bool is_average = ReplaceAverageBySum(&gloo_options);
    return Launch("reduce", OpType::REDUCE, buffers,
                  [&] { return gloo_->reduce(copies, gloo_options); },
                  AverageOver(is_average, copies));
  }

  WorkPtr allgather(TensorLists& outputs, TensorList& inputs,
                    const c10d::AllgatherOptions& options) override {
    CollectiveBuffers buffers;
    TensorLists output_copies = buffers.Outputs(outputs);
    TensorList input_copies = buffers.Inputs(inputs);
    return Launch("allgather", OpType::ALLGATHER, buffers,
                  [&] { return gloo_->allgather(output_copies, input_copies, options); });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    CollectiveBuffers buffers;
    at::Tensor output_copy = buffers.Output(output);
    at::Tensor input_copy = buffers.Input(input);
    return Launch("allgather_base", OpType::_ALLGATHER_BASE, buffers,
                  [&] { return gloo_->_allgather_base(output_copy, input_copy, options); });
  }

  WorkPtr allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::AllgatherOptions& options) override {
    CollectiveBuffers buffers;
    TensorList output_copies = buffers.Outputs(outputs);
    TensorList input_copies = buffers.Inputs(inputs);
    return Launch("allgather_coalesced", OpType::COALESCED, buffers, [&] {
      return gloo_->allgather_into_tensor_coalesced(output_copies, input_copies, options);
    });
  }

  WorkPtr gather(TensorLists& outputs, TensorList& inputs,
                 const c10d::GatherOptions& options) override {
    CollectiveBuffers buffers;
    TensorLists output_copies = buffers.Outputs(outputs);
    TensorList input_copies = buffers.Inputs(inputs);
    return Launch("gather", OpType::GATHER, buffers,
                  [&] { return gloo_->gather(output_copies, input_copies, options); });
  }

  WorkPtr scatter(TensorList& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override {
    CollectiveBuffers buffers;
    TensorList output_copies = buffers.Outputs(outputs);
    TensorLists input_copies = buffers.Inputs(inputs);
    return Launch("scatter", OpType::SCATTER, buffers,
                  [&] { return gloo_->scatter(output_copies, input_copies, options); });
  }

  WorkPtr reduce_scatter(TensorList& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    CollectiveBuffers buffers;
    TensorList output_copies = buffers.Outputs(outputs);
    TensorLists input_copies = buffers.Inputs(inputs);
    c10d::ReduceScatterOptions gloo_options = options;
    const bool is_average = ReplaceAverageBySum(&gloo_options);
    return Launch("reduce_scatter", OpType::REDUCE_SCATTER, buffers,
                  [&] { return gloo_->reduce_scatter(output_copies, input_copies, gloo_options); },
                  AverageOver(is_average, output_copies));
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    CollectiveBuffers buffers;
    at::Tensor output_copy = buffers.Output(output);
    at::Tensor input_copy = buffers.Input(input);
    c10d::ReduceScatterOptions gloo_options = options;
    const bool is_average = ReplaceAverageBySum(&gloo_options);
    return Launch(
        "reduce_scatter_base", OpType::_REDUCE_SCATTER_BASE, buffers,
        [&] { return gloo_->_reduce_scatter_base(output_copy, input_copy, gloo_options); },
        AverageOver(is_average, {output_copy}));
  }

  WorkPtr reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    CollectiveBuffers buffers;
    TensorList output_copies = buffers.Outputs(outputs);
    TensorList input_copies = buffers.Inputs(inputs);
    c10d::ReduceScatterOptions gloo_options = options;
    const bool is_average = ReplaceAverageBySum(&gloo_options);
    return Launch(
        "reduce_scatter_coalesced", OpType::COALESCED, buffers,
        [&] {
          return gloo_->reduce_scatter_tensor_coalesced(output_copies, input_copies, gloo_options);
        },
        AverageOver(is_average, output_copies));
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& output_split_sizes,
                        std::vector<int64_t>& input_split_sizes,
                        const c10d::AllToAllOptions& options) override {
    CollectiveBuffers buffers;
    at::Tensor output_copy = buffers.Output(output);
    at::Tensor input_copy = buffers.Input(input);
    return Launch("alltoall_base", OpType::ALLTOALL_BASE, buffers, [&] {
      return gloo_->alltoall_base(output_copy, input_copy, output_split_sizes, input_split_sizes,
                                  options);
    });
  }

  // gloo has it for single tensors alone in torch 2.9: the lists travel packed into one each.
  WorkPtr alltoall(TensorList& outputs, TensorList& inputs,
                   const c10d::AllToAllOptions& options) override {
    CollectiveBuffers buffers;
    const TensorList output_copies = buffers.Outputs(outputs);
    at::Tensor packed_output = Pack(output_copies);
    at::Tensor packed_input = Pack(buffers.Inputs(inputs));
    std::vector<int64_t> output_split_sizes = Numels(outputs);
    std::vector<int64_t> input_split_sizes = Numels(inputs);
    return Launch(
        "alltoall", OpType::ALLTOALL, buffers,
        [&] {
          return gloo_->alltoall_base(packed_output, packed_input, output_split_sizes,
                                      input_split_sizes, options);
        },
        [packed_output, output_copies] { Unpack(packed_output, output_copies); });
  }

  WorkPtr send(TensorList& tensors, int destination_rank, int tag) override {
    CollectiveBuffers buffers;
    TensorList copies = buffers.Inputs(tensors);
    return Launch("send", OpType::SEND, buffers,
                  [&] { return gloo_->send(copies, destination_rank, tag); });
  }

  WorkPtr recv(TensorList& tensors, int source_rank, int tag) override {
    CollectiveBuffers buffers;
    TensorList copies = buffers.Outputs(tensors);
    return Launch("recv", OpType::RECV, buffers,
                  [&] { return gloo_->recv(copies, source_rank, tag); });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions gloo_options;  // the caller's names devices, which mean nothing to gloo
    gloo_options.timeout = options.timeout;
    return Launch(
        "barrier", OpType::BARRIER, CollectiveBuffers(),
        [&] { return gloo_->barrier(gloo_options); }, {}, WaitMode::kHost);
  }

 private:
  // `start` starts gloo; `finish` runs on the communication stream when gloo is done, before the
  // outputs are delivered.
  WorkPtr Launch(const std::string& name, OpType op_type, const CollectiveBuffers& buffers,
                 const std::function<WorkPtr()>& start, std::function<void()> finish = {},
                 WaitMode wait_mode = WaitMode::kStream) {
    const int64_t num_bytes = buffers.num_bytes();
    Counters& counters = Counters::Get();
    counters.Add("collectives");
    counters.Add("collective." + name);
    counters.Add("collective_bytes", num_bytes);

    stream_->WaitFor(CurrentQueue()->Mark());
    WorkPtr gloo_work;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      gloo_work = start();
    }
    Command command;
    command.run = [gloo_work, finish = std::move(finish), buffers] {
      gloo_work->wait();  // throws if a peer failed or the group's timeout passed
      if (finish) {
        finish();
      }
      buffers.DeliverOutputs();
    };
    // gloo never marks point-to-point work as complete before it is waited for.
    if (!c10d::isP2POp(op_type)) {
      command.ready = [gloo_work] { return gloo_work->isCompleted(); };
    }
    stream_->Push(std::move(command), CollectiveCostUs(num_bytes));
    return c10::make_intrusive<HcclWork>(rank_, op_type, std::move(gloo_work), stream_->Mark(),
                                         buffers.npu_outputs(), wait_mode);
  }

  WorkPtr ReduceInOneRound(const CollectiveBuffers& buffers, const at::Tensor& total,
                        const c10d::AllreduceOptions& options, std::function<void()> average) {
    at::Tensor sent;
    at::Tensor received;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      sent = total.flatten().expand({size_, total.numel()}).contiguous();
      received = at::empty_like(sent);
    }
    c10d::AllToAllOptions all_to_all_options;
    all_to_all_options.timeout = options.timeout;
    std::vector<int64_t> equal_shares;
    return Launch(
        "allreduce", OpType::ALLREDUCE, buffers,
        [&] {
          return gloo_->alltoall_base(received, sent, equal_shares, equal_shares,
                                      all_to_all_options);
        },
        [received, total, op = options.reduceOp, average = std::move(average)] {
          CombineRows(received, op, total);
          if (average) {
            average();
          }
        });
  }

  std::function<void()> AverageOver(bool is_average, TensorList tensors) const {
    if (!is_average) {
      return {};
    }
    return [tensors = std::move(tensors), size = size_] { DivideAll(tensors, size); };
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const QueuePtr stream_;  // the communication stream: one per group, so order is the same on all
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> MakeHcclBackend(const c10::intrusive_ptr<c10d::Backend>& gloo) {
  return c10::make_intrusive<HcclBackend>(gloo);
}

}  // namespace simnpu
