// Update kernels of each instruction set beside a plain `a += b` and memcpy.
//
// 16 MiB of float32 storage a turn (64 KiB chunks where the server works by chunks), one
// thread. GB/s counts the payload, 1e9 bytes per second: the bytes of the delta or parameter moved,
// once, whatever the kernel reads and writes around it. The program checks every kernel against the
// scalar reference before it times anything. Spread: --benchmark_repetitions=9
// --benchmark_enable_random_interleaving=true.

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels/relaxed_copy.hpp"

namespace psplus::kernels {
namespace {

constexpr std::size_t kBytes = std::size_t{16} << 20;
constexpr std::size_t kScalars = kBytes / sizeof(float);
constexpr std::size_t kChunk = (std::size_t{64} << 10) / sizeof(float);

/// Page-aligned, as segments are.
template <class T>
struct PageAllocator {
  using value_type = T;
  static constexpr std::align_val_t kPage{4096};
  PageAllocator() = default;
  template <class U>
  explicit PageAllocator(const PageAllocator<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kPage)); }
  void deallocate(T* at, std::size_t) { ::operator delete(at, kPage); }
  bool operator==(const PageAllocator&) const = default;
};
using Floats = std::vector<float, PageAllocator<float>>;

Floats ramp(std::size_t n, float step) {
  Floats values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = 1 + step * static_cast<float>(i % 1021);
  return values;
}

/// `payload` bytes a turn as GB/s.
void report(benchmark::State& state, std::size_t payload) {
  state.counters["GB/s"] = benchmark::Counter(
      static_cast<double>(payload) * 1e-9,
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kAvgThreads);
}

void add_in_place(benchmark::State& state) {
  Floats a = ramp(kScalars, 0.5F);
  const Floats b = ramp(kScalars, 0.25F);
  float* __restrict__ const out = a.data();
  const float* __restrict__ const in = b.data();
  for (auto _ : state) {
    for (std::size_t i = 0; i < kScalars; ++i) out[i] += in[i];
    benchmark::ClobberMemory();
  }
  report(state, kBytes);
}

/// As the server does it: each chunk's result goes into the free unit, the unit it replaces is the
/// next free one.
void apply_chunks(benchmark::State& state, const KernelTable& table, std::size_t terms) {
  const std::size_t chunks = kScalars / kChunk;
  Floats pool = ramp((chunks + 1) * kChunk, 0.5F);
  std::vector<Floats> deltas(terms, ramp(kScalars, 0.25F));
  std::vector<std::size_t> unit_of(chunks);
  for (std::size_t c = 0; c < chunks; ++c) unit_of[c] = c;
  std::size_t free_unit = chunks;
  std::vector<PushTerm<float>> pushes(terms);
  for (auto _ : state) {
    for (std::size_t c = 0; c < chunks; ++c) {
      for (std::size_t t = 0; t < terms; ++t) pushes[t] = {deltas[t].data() + c * kChunk, 0.5F};
      table.float32.apply(pool.data() + free_unit * kChunk, pool.data() + unit_of[c] * kChunk,
                          pushes.data(), terms, kChunk);
      std::swap(unit_of[c], free_unit);
    }
    benchmark::ClobberMemory();
  }
  report(state, kBytes * terms);
}

void delta(benchmark::State& state, const KernelTable& table, DType dtype) {
  const Floats before = ramp(kScalars, 0.5F);
  const Floats after = ramp(kScalars, 0.25F);  // any bits will do as 16-bit values
  Floats out(kScalars);
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        table.float32.delta(dtype, before.data(), after.data(), out.data(), kScalars));
    benchmark::ClobberMemory();
  }
  report(state, kBytes);
}

void pull(benchmark::State& state, const KernelTable& table, DType dtype) {
  const Floats w = ramp(kScalars, 0.5F);
  const Floats change = ramp(kScalars, 0.25F);
  Floats x(kScalars);
  for (auto _ : state) {
    table.float32.pull(dtype, w.data(), change.data(), 0.5F, x.data(), kScalars);
    benchmark::ClobberMemory();
  }
  report(state, kBytes);
}

void all_finite(benchmark::State& state, const KernelTable& table, DType dtype) {
  const std::size_t n = kBytes / element_bytes(dtype);
  const Floats values = ramp(kScalars, 0.5F);
  for (auto _ : state) benchmark::DoNotOptimize(table.all_finite(dtype, values.data(), n));
  report(state, kBytes);
}

using Copy = void (*)(const void* src, void* dst, std::size_t bytes);

void copy_between(benchmark::State& state, Copy copy) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const Floats src = ramp(bytes / sizeof(float), 0.5F);
  Floats dst(bytes / sizeof(float));
  for (auto _ : state) {
    copy(src.data(), dst.data(), bytes);
    benchmark::ClobberMemory();
  }
  report(state, bytes);
}

/// Ends the program when a kernel disagrees with the reference: a time would mean nothing then.
void check(const KernelTable& tested) {
  constexpr std::size_t kCount = 10'007;
  const Floats src = ramp(kCount, 0.3F);
  const Floats change = ramp(kCount, 0.7F);
  const PushTerm<float> terms[] = {{change.data(), 0.1F}, {src.data(), 0.2F}, {src.data(), 0.3F}};
  std::vector<Floats> results;
  for (const KernelTable* kernels : {&table(Isa::scalar), &tested}) {
    Floats all;
    Floats out(kCount, 0);
    const auto keep = [&] { all.insert(all.end(), out.begin(), out.end()); };
    for (std::size_t count = 0; count <= 3; ++count) {
      kernels->float32.apply(out.data(), src.data(), terms, count, kCount);
      keep();
    }
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      kernels->float32.pull(dtype, src.data(), change.data(), 0.1F, out.data(), kCount);
      keep();
    }
    all.push_back(
        kernels->float32.delta(DType::float32, src.data(), change.data(), out.data(), kCount)
            ? 1.0F
            : 0.0F);
    keep();
    results.push_back(std::move(all));
  }
  if (std::memcmp(results[0].data(), results[1].data(), results[0].size() * sizeof(float)) != 0) {
    std::fprintf(stderr, "%s kernels disagree with the reference\n",
                 std::string(name(tested.isa)).c_str());
    std::exit(1);
  }
}

void register_all() {
  benchmark::RegisterBenchmark("add_in_place", add_in_place)->Unit(benchmark::kMillisecond);
  for (const Isa isa : {Isa::scalar, Isa::portable, Isa::avx2, Isa::avx512}) {
    if (!supported(isa)) continue;
    const KernelTable& kernels = table(isa);
    check(kernels);
    const auto add = [&](const std::string& what, auto run, auto... arguments) {
      benchmark::RegisterBenchmark((what + "/" + std::string(name(isa))).c_str(), run,
                                   std::cref(kernels), arguments...)
          ->Unit(benchmark::kMillisecond);
    };
    for (const std::size_t terms : {1U, 2U, 5U}) {
      add("apply_chunks/terms:" + std::to_string(terms), apply_chunks, terms);
    }
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      add("delta/" + std::string(name(dtype)), delta, dtype);
      add("pull/" + std::string(name(dtype)), pull, dtype);
      add("all_finite/" + std::string(name(dtype)), all_finite, dtype);
    }
  }
  const std::pair<const char*, Copy> copies[] = {
      {"memcpy", [](const void* src, void* dst, std::size_t n) { std::memcpy(dst, src, n); }},
      {"copy_words_relaxed", copy_words_relaxed},
      {"store_words_relaxed", store_words_relaxed},
  };
  for (const auto& [label, copy] : copies) {
    benchmark::RegisterBenchmark(label, copy_between, copy)->Arg(64 << 10)->Arg(16 << 20);
  }
}

}  // namespace
}  // namespace psplus::kernels

int main(int argc, char** argv) {
  psplus::kernels::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
