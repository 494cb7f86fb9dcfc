// Checks the host kernels through their C interface alone, so that it can be built for sanitizers
// and for processors that have no Python here: see test-asan, test-tsan and test-aarch64 in the
// Makefile. Prints a digest of all results, which must be the same on every processor, and exits
// with 1 if a result is wrong or differs between instruction sets or numbers of threads.

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../../kernels/host/csrc/host_kernels.h"

namespace {

int num_failures = 0;

void Expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++num_failures;
}

// xorshift64*: the same numbers everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435769u + 1) {}
  uint64_t Next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1dull;
  }

 private:
  uint64_t state_;
};

struct Format {
  HyperHostFormat code;
  const char* name;
  size_t bytes;
  int fraction_bits;
  int exponent_bits;
};

constexpr Format kFormats[] = {
    {HYPER_HOST_FLOAT32, "float32", 4, 23, 8},
    {HYPER_HOST_BFLOAT16, "bfloat16", 2, 7, 8},
    {HYPER_HOST_FLOAT16, "float16", 2, 10, 5},
    {HYPER_HOST_FLOAT64, "float64", 8, 52, 11},
};

uint64_t LoadBits(const uint8_t* at, const Format& format) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, format.bytes);  // both processors are little-endian
  return bits;
}

// A tensor in memory of exactly its size, at an odd address, so that a sanitizer sees every step
// beside it.
class Tensor {
 public:
  Tensor(const Format& format, size_t numel, uint64_t seed, int exponent_range)
      : format_(format), numel_(numel), memory_(kOffset + numel * format.bytes) {
    Random random(seed);
    const int bias = (1 << (format.exponent_bits - 1)) - 1;
    for (size_t i = 0; i < numel; ++i) {
      const int spread = static_cast<int>(random.Next() % static_cast<uint64_t>(exponent_range));
      const int exponent = bias - spread < 0 ? 0 : bias - spread;  // 0: subnormal
      const uint64_t fraction = random.Next() >> (64 - format.fraction_bits);
      const uint64_t sign = random.Next() & 1;
      const uint64_t bits = (sign << format.exponent_bits | static_cast<uint64_t>(exponent))
                                << format.fraction_bits |
                            fraction;
      std::memcpy(data() + i * format.bytes, &bits, format.bytes);
    }
  }

  const Format& format() const { return format_; }
  size_t numel() const { return numel_; }
  size_t num_bytes() const { return numel_ * format_.bytes; }
  uint8_t* data() { return memory_.data() + kOffset; }
  const uint8_t* data() const { return memory_.data() + kOffset; }

  uint64_t Significand(size_t i, int* exponent) const {
    const uint64_t bits = LoadBits(data() + i * format_.bytes, format_);
    const uint64_t fraction = bits & ((uint64_t{1} << format_.fraction_bits) - 1);
    const int biased = static_cast<int>(bits >> format_.fraction_bits &
                                        ((uint64_t{1} << format_.exponent_bits) - 1));
    const int bias = (1 << (format_.exponent_bits - 1)) - 1;
    *exponent = (biased == 0 ? 1 : biased) - bias - format_.fraction_bits;
    return biased == 0 ? fraction : fraction | uint64_t{1} << format_.fraction_bits;
  }

 private:
  static constexpr size_t kOffset = 1;
  const Format& format_;
  size_t numel_;
  std::vector<uint8_t> memory_;
};

class TensorList {
 public:
  explicit TensorList(std::vector<Tensor>& tensors) {
    for (Tensor& tensor : tensors) {
      data_.push_back(tensor.data());
      numel_.push_back(static_cast<int64_t>(tensor.numel()));
      format_.push_back(static_cast<uint8_t>(tensor.format().code));
    }
    list_ = {static_cast<int64_t>(tensors.size()), data_.data(), numel_.data(), format_.data()};
  }
  const HyperHostTensors* get() const { return &list_; }

 private:
  std::vector<void*> data_;
  std::vector<int64_t> numel_;
  std::vector<uint8_t> format_;
  HyperHostTensors list_;
};

std::vector<Tensor> MakeTensors(size_t num_formats) {
  constexpr size_t kSizes[] = {0,  1,  7,  8,   9,    31,    32,    33,    63,
                               64, 65, 97, 129, 1000, 16384, 16385, 65537, 140'000};
  std::vector<Tensor> tensors;
  uint64_t seed = 0;
  for (size_t f = 0; f < num_formats; ++f) {
    for (const size_t numel : kSizes) {
      tensors.emplace_back(kFormats[f], numel, ++seed, 12);    // as gradients are
      tensors.emplace_back(kFormats[f], numel, ++seed, 1000);  // wide, and many subnormal
    }
  }
  return tensors;
}

uint64_t Digest(uint64_t digest, const void* data, size_t num_bytes) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < num_bytes; ++i) digest = (digest ^ bytes[i]) * 1099511628211u;
  return digest;
}

void ExpectSum(const Tensor& tensor, const HyperHostNorm& norm) {
  long double sum = 0;
  long double largest = 0;
  for (size_t i = 0; i < tensor.numel(); ++i) {
    int exponent;
    const uint64_t significand = tensor.Significand(i, &exponent);
    const long double magnitude = std::ldexp(static_cast<long double>(significand), exponent);
    sum += magnitude * magnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  const long double error = std::fabs(norm.sum_of_squares - sum);
  const std::string name = tensor.format().name + (" of " + std::to_string(tensor.numel()));
  Expect(error <= sum * 1e-12L + 1e-300L, "sum of squares of " + name);
  Expect(norm.max_abs == static_cast<double>(largest), "largest magnitude of " + name);
  Expect(norm.num_nan == 0 && norm.num_inf == 0, "counts of " + name);
}

// One bit at a time, as slow and plain as can be.
void ExpectExactSum(const Tensor& tensor, const HyperHostExactSum& sum) {
  uint64_t words[HYPER_HOST_EXACT_WORDS] = {};
  for (size_t i = 0; i < tensor.numel(); ++i) {
    int exponent;
    const uint64_t significand = tensor.Significand(i, &exponent);
    const uint64_t square = significand * significand;
    const int shift = 2 * exponent - HYPER_HOST_EXACT_EXPONENT;
    for (int bit = 0; bit < 48; ++bit) {
      if ((square >> bit & 1) == 0) continue;
      size_t word = static_cast<size_t>((shift + bit) / 64);
      uint64_t carry = uint64_t{1} << ((shift + bit) % 64);
      while (carry != 0 && word < HYPER_HOST_EXACT_WORDS) {
        words[word] += carry;
        carry = words[word] < carry ? 1 : 0;
        ++word;
      }
    }
  }
  Expect(std::memcmp(words, sum.words, sizeof words) == 0,
         std::string("exact sum of ") + tensor.format().name + " of " +
             std::to_string(tensor.numel()));
}

std::vector<std::string> InstructionSets() {
  std::vector<std::string> names(1);
  for (const char* c = hyper_host_instruction_sets(); *c != '\0'; ++c) {
    if (*c == ' ') {
      names.emplace_back();
    } else {
      names.back() += *c;
    }
  }
  return names;
}

uint64_t CheckNorms(int num_threads, bool compare) {
  std::vector<Tensor> tensors = MakeTensors(4);
  const TensorList list(tensors);
  std::vector<HyperHostNorm> norms(tensors.size());
  uint64_t digest = 0;
  // Whole powers only: the C library's pow may differ between processors.
  for (const double norm_type : {2.0, 1.0, 3.0, 0.0, HUGE_VAL, -HUGE_VAL}) {
    Expect(hyper_host_partial_norms(list.get(), norm_type, num_threads, norms.data()) ==
               HYPER_HOST_OK,
           hyper_host_last_error());
    digest = Digest(digest, norms.data(), norms.size() * sizeof norms[0]);
    for (size_t i = 0; compare && norm_type == 2.0 && i < tensors.size(); ++i) {
      ExpectSum(tensors[i], norms[i]);
    }
  }
  return digest;
}

uint64_t CheckExactSums(int num_threads, bool compare) {
  std::vector<Tensor> tensors = MakeTensors(3);
  const TensorList list(tensors);
  std::vector<HyperHostExactSum> sums(tensors.size());
  Expect(hyper_host_exact_sums_of_squares(list.get(), num_threads, sums.data()) == HYPER_HOST_OK,
         hyper_host_last_error());
  for (size_t i = 0; compare && i < tensors.size(); ++i) ExpectExactSum(tensors[i], sums[i]);
  return Digest(0, sums.data(), sums.size() * sizeof sums[0]);
}

uint64_t CheckScaling(int num_threads) {
  std::vector<Tensor> tensors = MakeTensors(4);
  const TensorList list(tensors);
  Expect(hyper_host_scale(list.get(), 0.3, num_threads) == HYPER_HOST_OK, hyper_host_last_error());
  Expect(hyper_host_read_and_write(list.get(), num_threads) == HYPER_HOST_OK, "read and write");
  Expect(hyper_host_read(list.get(), num_threads) == HYPER_HOST_OK, "read");
  uint64_t digest = 0;
  for (const Tensor& tensor : tensors) {
    digest = Digest(digest, tensor.data(), tensor.num_bytes());
  }
  return digest;
}

uint64_t CheckAll(int num_threads, bool compare) {
  uint64_t digest = CheckNorms(num_threads, compare);
  digest ^= 3 * CheckExactSums(num_threads, compare);
  return digest ^ 5 * CheckScaling(num_threads);
}

void CheckErrors() {
  HyperHostTensors none = {-1, nullptr, nullptr, nullptr};
  Expect(hyper_host_scale(&none, 0.5, 1) == HYPER_HOST_INVALID_ARGUMENT, "negative count");
  Expect(std::strstr(hyper_host_last_error(), "count") != nullptr, "message of negative count");
  Expect(hyper_host_scale(nullptr, 0.5, 1) == HYPER_HOST_INVALID_ARGUMENT, "no list");
  Expect(hyper_host_use_instruction_set("mmx") == HYPER_HOST_INVALID_ARGUMENT, "unknown set");
}

void CheckCallersAtOnce(uint64_t expected) {
  std::vector<std::thread> callers;
  std::vector<uint64_t> digests(3);
  for (uint64_t& digest : digests) {
    callers.emplace_back([&digest] { digest = CheckAll(3, false); });
  }
  for (std::thread& caller : callers) caller.join();
  for (const uint64_t digest : digests) Expect(digest == expected, "callers at the same time");
}

void CheckFork(uint64_t expected) {
  const pid_t child = fork();
  if (child == 0) _exit(CheckAll(4, false) == expected ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  Expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "forked child");
}

}  // namespace

int main(int argc, char** argv) {
  const bool with_fork = argc < 2 || std::strcmp(argv[1], "--no-fork") != 0;
  const uint64_t expected = CheckAll(1, true);
  for (const std::string& name : InstructionSets()) {
    Expect(hyper_host_use_instruction_set(name.c_str()) == HYPER_HOST_OK, "use " + name);
    for (const int num_threads : {1, 2, 5}) {
      Expect(CheckAll(num_threads, false) == expected,
             name + " with " + std::to_string(num_threads) + " thread(s)");
    }
  }
  hyper_host_use_instruction_set("auto");
  CheckErrors();
  CheckCallersAtOnce(expected);
  if (with_fork) CheckFork(expected);
  std::fprintf(stderr, "checked %s\n", hyper_host_instruction_sets());
  std::printf("digest %016llx\n", static_cast<unsigned long long>(expected));
  return num_failures == 0 ? 0 : 1;
}
