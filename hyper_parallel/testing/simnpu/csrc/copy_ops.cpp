// Copies between host and device: what is asynchronous, and what a program can get wrong.
//
// Host to device, from pinned memory: the bytes are read when the copy executes. If the program
// rewrites the buffer first, the device gets the new bytes. If it rewrites it after that but before
// it synchronised with the copy, no byte is wrong here, but some would be on hardware: that counts
// as `early_rewrites`.
//
// Device to host, to pinned memory: the bytes leave the device when the copy executes, and arrive
// when the host synchronises. Until then the buffer shows its old bytes.
//
// Pageable memory, or non_blocking=False: the host waits.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstdint>
#include <memory>
#include <string>

#include "config.h"
#include "counters.h"
#include "devices.h"
#include "host_traffic.h"
#include "host_view.h"
#include "pinned_memory.h"

namespace simnpu {
namespace {

void CopyBytes(const at::Tensor& destination, const at::Tensor& source) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  destination.copy_(source);
}

Command HostToDevice(const at::Tensor& host, const at::Tensor& backing, bool is_async) {
  Command copy;
  auto read = std::make_shared<HostTraffic::ReadPtr>();
  copy.run = [host, backing, is_async, read] {
    HostTraffic::Get().SettleWritesTo(host);
    CopyBytes(backing, host);
    if (is_async) {
      *read = HostTraffic::Get().AddRead(host);
    }
  };
  if (is_async) {
    copy.publish = [read] { HostTraffic::Get().Settle(*read); };
  }
  return copy;
}

Command DeviceToHost(const at::Tensor& backing, const at::Tensor& host) {
  Command copy;
  auto write = std::make_shared<HostTraffic::WritePtr>();
  copy.run = [backing, host, write] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor in_flight = at::empty_like(host);
    in_flight.copy_(backing);
    *write = HostTraffic::Get().AddWrite(in_flight, host);
  };
  copy.publish = [write] { HostTraffic::Get().Settle(*write); };
  return copy;
}

void CopyOnDevice(const at::Tensor& source, const at::Tensor& destination) {
  Counters::Get().Add("kernels");
  Counters::Get().Add("d2d");
  CurrentQueue()->ExecuteAll();
  CopyBytes(BackingView(destination), BackingView(source));
}

// Counts the copy; returns whether the host need not wait for it.
bool CountTransfer(const std::string& direction, const at::Tensor& source, const at::Tensor& host,
                   bool non_blocking) {
  const bool is_async = non_blocking && IsPinned(host.storage().data());
  Counters& counters = Counters::Get();
  counters.Add(direction);
  counters.Add(direction + "_bytes", static_cast<int64_t>(source.nbytes()));
  if (is_async) {
    counters.Add(direction + "_async");
  } else {
    // `_pageable`: the program asked for an asynchronous copy and does not get one.
    const std::string reason = direction + (non_blocking ? "_pageable" : "_blocking");
    CountHostSync(reason.c_str());
  }
  return is_async;
}

// `destination.copy_(source)` where at least one of them is on the device.
at::Tensor CopyFrom(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  if (source.numel() == 0) {
    return destination;
  }
  const c10::DeviceGuard guard((IsNpu(destination) ? destination : source).device());
  if (IsNpu(source) && IsNpu(destination)) {
    CopyOnDevice(source, destination);
    return destination;
  }
  const bool to_host = IsNpu(source);
  const bool is_async = CountTransfer(to_host ? "d2h" : "h2d", source,
                                      to_host ? destination : source, non_blocking);
  const at::Tensor source_view = HostView(source);
  const at::Tensor destination_view = HostView(destination);
  const QueuePtr queue = CurrentQueue();
  queue->Push(to_host ? DeviceToHost(source_view, destination_view)
                      : HostToDevice(source_view, destination_view, is_async),
              CopyCostUs(static_cast<int64_t>(source.nbytes())));
  if (!is_async) {
    queue->Synchronize(queue->Mark());
  }
  return destination;
}

at::Tensor CopyFromAndResize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return CopyFrom(source, destination, /*non_blocking=*/false);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", CopyFrom);
  library.impl("_copy_from_and_resize", CopyFromAndResize);
}

// Lazily conjugated or negated tensors are copied as such (host_view.cpp keeps the bits). By
// default torch would materialise them first, by a copy, which it would materialise first, and so
// on.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace simnpu
