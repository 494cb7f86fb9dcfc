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
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "config.h"
#include "counters.h"
#include "devices.h"
#include "host_view.h"
#include "pinned_memory.h"

namespace simnpu {
namespace {

void CopyBytes(const at::Tensor& destination, const at::Tensor& source) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  destination.copy_(source);
}

// Bytes that left the device and have not arrived in host memory. Created, delivered and searched
// under the execution lock of streams.cpp.
class PendingArrivals {
 public:
  struct Arrival {
    at::Tensor in_flight;
    at::Tensor destination;
    bool delivered = false;
  };
  using ArrivalPtr = std::shared_ptr<Arrival>;

  static PendingArrivals& Get() {
    static auto* const arrivals = new PendingArrivals;
    return *arrivals;
  }

  void Add(ArrivalPtr arrival) { arrivals_.push_back(std::move(arrival)); }

  void Deliver(const ArrivalPtr& arrival) {
    if (arrival->delivered) {
      return;
    }
    CopyBytes(arrival->destination, arrival->in_flight);
    arrival->delivered = true;
    arrivals_.erase(std::find(arrivals_.begin(), arrivals_.end(), arrival));
  }

  // The device reads back host memory that it wrote itself, without the host's help.
  void DeliverInto(const at::Tensor& host) {
    const std::vector<ArrivalPtr> arrivals = arrivals_;
    for (const ArrivalPtr& arrival : arrivals) {
      if (arrival->destination.storage().is_alias_of(host.storage())) {
        Deliver(arrival);
      }
    }
  }

 private:
  std::vector<ArrivalPtr> arrivals_;
};

// A hash of the bytes of `tensor` (FNV-1a over words), or of nothing if they are not one block.
uint64_t HashOf(const at::Tensor& tensor) {
  constexpr uint64_t kOffsetBasis = 0xcbf29ce484222325;
  constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t hash = kOffsetBasis;
  if (!tensor.is_non_overlapping_and_dense()) {
    return hash;
  }
  const auto* bytes = static_cast<const char*>(tensor.const_data_ptr());
  const size_t num_bytes = tensor.nbytes();
  for (size_t offset = 0; offset < num_bytes; offset += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + offset, std::min(sizeof(word), num_bytes - offset));
    hash = (hash ^ word) * kPrime;
    hash ^= hash >> 32;
  }
  return hash;
}

Command HostToDevice(const at::Tensor& host, const at::Tensor& backing, bool is_async) {
  Command copy;
  auto hash = std::make_shared<uint64_t>(0);
  copy.run = [host, backing, is_async, hash] {
    PendingArrivals::Get().DeliverInto(host);
    CopyBytes(backing, host);
    if (is_async) {
      *hash = HashOf(host);
    }
  };
  if (is_async) {
    copy.publish = [host, hash] {
      if (HashOf(host) != *hash) {
        Counters::Get().Add("early_rewrites");
      }
    };
  }
  return copy;
}

Command DeviceToHost(const at::Tensor& backing, const at::Tensor& host) {
  auto arrival = std::make_shared<PendingArrivals::Arrival>();
  arrival->destination = host;
  Command copy;
  copy.run = [backing, arrival] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    arrival->in_flight = at::empty_like(arrival->destination);
    CopyBytes(arrival->in_flight, backing);
    PendingArrivals::Get().Add(arrival);
  };
  copy.publish = [arrival] { PendingArrivals::Get().Deliver(arrival); };
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

// Lazily conjugated or negated tensors are copied as such (host_view.cpp keeps the bits). By default
// torch would materialise them first, by a copy, which it would materialise first, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace simnpu
