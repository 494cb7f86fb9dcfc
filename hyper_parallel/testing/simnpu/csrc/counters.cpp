#include "counters.h"

#include <algorithm>

namespace simnpu {
namespace {

// Present from the start, so that a test can compare them without asking whether they exist.
constexpr const char* kAlwaysPresent[] = {
    "collective_bytes", "collectives", "d2h",        "d2h_async",  "d2h_bytes",
    "device_sync",      "early_rewrites", "event_sync", "h2d",     "h2d_async",
    "h2d_bytes",        "host_syncs",  "kernel_launches", "kernels", "pinned_allocs",
    "stream_sync",
};

}  // namespace

Counters& Counters::Get() {
  static Counters* const instance = new Counters;
  return *instance;
}

Counters::Counters() {
  gauges_ = {{"device_bytes", 0}, {"pinned_bytes", 0}};
  Reset();
}

void Counters::Add(const std::string& name, int64_t amount) {
  std::lock_guard<std::mutex> lock(mutex_);
  counts_[name] += amount;
}

void Counters::AddToGauge(const std::string& name, int64_t amount) {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t& level = gauges_[name];
  level += amount;
  int64_t& peak = peaks_[name];
  peak = std::max(peak, level);
}

std::map<std::string, int64_t> Counters::Snapshot() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, int64_t> all = counts_;
  all.insert(gauges_.begin(), gauges_.end());
  for (const auto& [name, peak] : peaks_) {
    all[name + "_peak"] = peak;
  }
  return all;
}

void Counters::Reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  counts_.clear();
  for (const char* name : kAlwaysPresent) {
    counts_[name] = 0;
  }
  peaks_ = gauges_;
}

void CountHostSync(const char* reason) {
  Counters::Get().Add("host_syncs");
  Counters::Get().Add(reason);
}

}  // namespace simnpu
