// What the simulated device was asked to do, counted. Tests and the demo read these.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace simnpu {

// Thread safe. One instance per process.
class Counters {
 public:
  // Never destroyed: memory is still freed, and counted, while the process exits.
  static Counters& Get();

  void Add(const std::string& name, int64_t amount = 1);

  // A gauge is a level (bytes in use), not a count: it survives Reset(). Its highest value since
  // the last Reset() is reported as `<name>_peak`.
  void AddToGauge(const std::string& name, int64_t amount);

  // Copies out every counter and gauge.
  std::map<std::string, int64_t> Snapshot() const;

  // Sets the counters every caller may rely on to 0, forgets the others, lowers peaks.
  void Reset();

 private:
  Counters();

  mutable std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
  std::map<std::string, int64_t> gauges_;
  std::map<std::string, int64_t> peaks_;
};

// Counts one wait of the host for the device, and its `reason`.
void CountHostSync(const char* reason);

}  // namespace simnpu
