// What `configure()` sets: injected latencies and debugging aids.
#pragma once

#include <atomic>
#include <cstdint>

namespace simnpu {

// Read on every copy and collective, from any thread.
struct Config {
  static Config& Get();

  std::atomic<double> copy_us{0};
  std::atomic<double> copy_us_per_mib{0};
  std::atomic<double> collective_us{0};
  std::atomic<double> collective_us_per_mib{0};
  // Count each operator under `op.<name>`.
  std::atomic<bool> trace_ops{false};
  // Fill fresh device memory with 0xFF (NaN in every float format), so that a read of memory
  // nobody wrote shows.
  std::atomic<bool> poison{false};
};

// Simulated microseconds that a transfer of `num_bytes` takes.
double CopyCostUs(int64_t num_bytes);
double CollectiveCostUs(int64_t num_bytes);

}  // namespace simnpu
