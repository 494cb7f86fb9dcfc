#include "host_traffic.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "counters.h"

namespace simnpu {
namespace {

const void* KeyOf(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

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

template <typename Transfer>
using TransfersByStorage = std::unordered_map<const void*, std::vector<std::shared_ptr<Transfer>>>;

template <typename Transfer>
void Forget(TransfersByStorage<Transfer>* by_storage, const std::shared_ptr<Transfer>& transfer) {
  const auto entry = by_storage->find(KeyOf(transfer->host));
  std::vector<std::shared_ptr<Transfer>>& transfers = entry->second;
  transfers.erase(std::find(transfers.begin(), transfers.end(), transfer));
  if (transfers.empty()) {
    by_storage->erase(entry);
  }
}

// A copy: settling removes from the list.
template <typename Transfer>
std::vector<std::shared_ptr<Transfer>> TransfersOf(const TransfersByStorage<Transfer>& by_storage,
                                                   const at::Tensor& host) {
  const auto entry = by_storage.find(KeyOf(host));
  return entry == by_storage.end() ? std::vector<std::shared_ptr<Transfer>>{} : entry->second;
}

}  // namespace

HostTraffic& HostTraffic::Get() {
  static auto* const traffic = new HostTraffic;
  return *traffic;
}

HostTraffic::ReadPtr HostTraffic::AddRead(const at::Tensor& host) {
  auto read = std::make_shared<Read>(Read{host, HashOf(host)});
  reads_by_storage_[KeyOf(host)].push_back(read);
  return read;
}

HostTraffic::WritePtr HostTraffic::AddWrite(const at::Tensor& in_flight, const at::Tensor& host) {
  auto write = std::make_shared<Write>(Write{in_flight, host});
  writes_by_storage_[KeyOf(host)].push_back(write);
  return write;
}

void HostTraffic::Settle(const ReadPtr& read) {
  if (std::exchange(read->is_settled, true)) {
    return;
  }
  if (HashOf(read->host) != read->hash) {
    Counters::Get().Add("early_rewrites");
  }
  Forget(&reads_by_storage_, read);
}

void HostTraffic::Settle(const WritePtr& write) {
  if (std::exchange(write->is_settled, true)) {
    return;
  }
  for (const ReadPtr& earlier : TransfersOf(reads_by_storage_, write->host)) {
    Settle(earlier);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    write->host.copy_(write->in_flight);
  }
  Forget(&writes_by_storage_, write);
}

void HostTraffic::SettleWritesTo(const at::Tensor& host) {
  for (const WritePtr& write : TransfersOf(writes_by_storage_, host)) {
    Settle(write);
  }
}

}  // namespace simnpu
