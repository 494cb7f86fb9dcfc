#include "hccl_work.h"

#include <ATen/core/ivalue.h>

#include <utility>

#include "counters.h"
#include "devices.h"

namespace simnpu {

HcclWork::HcclWork(int rank, c10d::OpType op_type, c10::intrusive_ptr<c10d::Work> gloo_work,
                   Marker end, TensorList outputs, WaitMode wait_mode)
    : Work(rank, op_type),
      gloo_work_(std::move(gloo_work)),
      end_(std::move(end)),
      outputs_(std::move(outputs)),
      wait_mode_(wait_mode) {}

bool HcclWork::isCompleted() { return end_.queue->Query(end_); }

bool HcclWork::isSuccess() const { return gloo_work_ == nullptr || gloo_work_->isSuccess(); }

std::exception_ptr HcclWork::exception() const {
  return gloo_work_ == nullptr ? nullptr : gloo_work_->exception();
}

void HcclWork::synchronize() { CurrentQueue()->WaitFor(end_); }

// The timeout is the one gloo was given: the caller's stream waits, not the caller.
bool HcclWork::wait(std::chrono::milliseconds) {
  synchronize();
  if (wait_mode_ == WaitMode::kHost) {
    CountHostSync("barrier_sync");
    end_.queue->Synchronize(end_);
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> HcclWork::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{});
  CountHostSync("future_sync");
  try {
    end_.queue->Synchronize(end_);
    future->markCompleted(c10::IValue(outputs_));
  } catch (const std::exception&) {
    future->setError(std::current_exception());
  }
  return future;
}

}  // namespace simnpu
