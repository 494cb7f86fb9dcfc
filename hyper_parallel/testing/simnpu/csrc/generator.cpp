#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

#include <utility>
#include <vector>

#include "devices.h"

namespace simnpu {
namespace {

class NpuGenerator final : public c10::GeneratorImpl {
 public:
  NpuGenerator(c10::DeviceIndex device, at::Generator cpu)
      : GeneratorImpl(c10::Device(kNpu, device),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const { return cpu_; }

  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return cpu_.seed(); }
  // A counter-based device generator has an offset; the Mersenne twister behind this one has none.
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  NpuGenerator* clone_impl() const override {
    return new NpuGenerator(device().index(), cpu_.clone());
  }

  at::Generator cpu_;
};

at::Generator MakeGenerator(c10::DeviceIndex device) {
  return at::make_generator<NpuGenerator>(
      device, at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val));
}

}  // namespace

const at::Generator& DefaultGenerator(c10::DeviceIndex device) {
  static const auto* const generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < DeviceCount(); ++index) {
      made->push_back(MakeGenerator(static_cast<c10::DeviceIndex>(index)));
    }
    return made;
  }();
  return generators->at(ResolveDevice(device));
}

at::Generator NewGenerator(c10::DeviceIndex device) { return MakeGenerator(ResolveDevice(device)); }

at::Generator CpuGeneratorOf(const at::Generator& generator) {
  if (!generator.defined() || generator.device().type() != kNpu) {
    return generator;
  }
  return static_cast<NpuGenerator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

}  // namespace simnpu
