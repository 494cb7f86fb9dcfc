// Transfers that the device has carried out and that the host has not synchronised with.
//
// All of it happens under the execution lock of streams.cpp: commands call this when they are
// executed or published.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace simnpu {

class HostTraffic {
 public:
  // The device has read `host`. The bytes must not change before the host knows.
  struct Read {
    at::Tensor host;
    uint64_t hash = 0;
    bool is_settled = false;
  };
  // Bytes that left the device and have not arrived in `host`.
  struct Write {
    at::Tensor in_flight;
    at::Tensor host;
    bool is_settled = false;
  };
  using ReadPtr = std::shared_ptr<Read>;
  using WritePtr = std::shared_ptr<Write>;

  static HostTraffic& Get();

  ReadPtr AddRead(const at::Tensor& host);
  WritePtr AddWrite(const at::Tensor& in_flight, const at::Tensor& host);

  // Counts an early rewrite if the bytes have changed since. Does nothing the second time.
  void Settle(const ReadPtr& read);

  // Lets the bytes arrive, after settling what was read from there before. Does nothing the second
  // time.
  void Settle(const WritePtr& write);

  // The device is about to read `host`: it sees what it wrote there itself, which needs no
  // synchronisation of the host.
  void SettleWritesTo(const at::Tensor& host);

 private:
  std::unordered_map<const void*, std::vector<ReadPtr>> reads_by_storage_;
  std::unordered_map<const void*, std::vector<WritePtr>> writes_by_storage_;
};

}  // namespace simnpu
