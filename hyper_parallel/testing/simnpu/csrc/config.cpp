#include "config.h"

namespace simnpu {
namespace {

constexpr double kBytesPerMib = 1024.0 * 1024.0;

}  // namespace

Config& Config::Get() {
  static Config* const instance = new Config;
  return *instance;
}

double CopyCostUs(int64_t num_bytes) {
  const Config& config = Config::Get();
  return config.copy_us + config.copy_us_per_mib * (static_cast<double>(num_bytes) / kBytesPerMib);
}

double CollectiveCostUs(int64_t num_bytes) {
  const Config& config = Config::Get();
  return config.collective_us +
         config.collective_us_per_mib * (static_cast<double>(num_bytes) / kBytesPerMib);
}

}  // namespace simnpu
