// A collective in flight on a communication stream.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>

#include "collective_buffers.h"
#include "streams.h"

namespace simnpu {

// What wait() does. A device collective only orders the caller's stream; a barrier holds the host.
enum class WaitMode { kStream, kHost };

class HcclWork final : public c10d::Work {
 public:
  // `end`: the point of the communication stream at which the outputs are in device memory.
  HcclWork(int rank, c10d::OpType op_type, c10::intrusive_ptr<c10d::Work> gloo_work, Marker end,
           TensorList outputs, WaitMode wait_mode);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  TensorList result() override { return outputs_; }

  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override;

  // Complete when it is returned: the host waits.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const c10::intrusive_ptr<c10d::Work> gloo_work_;  // null for a group of coalesced operations
  const Marker end_;
  const TensorList outputs_;
  const WaitMode wait_mode_;
};

}  // namespace simnpu
