#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "support/server_harness.hpp"
#include "support/status_matchers.hpp"

namespace psplus::testing {

inline constexpr StreamId kStream{0};
inline constexpr ExtentId kExtent{0};

/// Initial value of scalar i of parameter p: distinct, exact in float32 for i < 1024.
inline double initial_value(std::size_t p, std::size_t i) {
  return static_cast<double>(p * 1024 + i);
}
/// Delta of push `number` (from 1) of a rank: distinct, exact in float32, and still exact when
/// divided by 2 or 4 and summed.
inline double delta_value(std::uint32_t rank, std::uint64_t number, std::size_t p, std::size_t i) {
  return static_cast<double>((rank + 1) * 131'072 + number * 16'384 + p * 1024 + i);
}

/// A job whose workers have attached and registered stream 0, and whose values are initial_value.
/// The workers are `workers[rank]`.
class FoundedJob : public ServerHarness {
 public:
  explicit FoundedJob(std::uint32_t world, store::ExtentLayout extent, wire::OpenStream how = {},
                      server::Config config = {}, Pushes pushes = in_slots)
      : ServerHarness(config, std::move(pushes)), layout(std::move(extent)), how(how) {
    for (std::uint32_t rank = 0; rank < world; ++rank) attach(rank, world);
    for (TestWorker& worker : workers) open(worker, kStream, layout, how);
    fill(workers[0], [](std::size_t p, std::size_t i) { return initial_value(p, i); });
    EXPECT_OK(
        publish(workers[0], {.flags = store::kPushSet | store::kPushAllParams, .extents = 1}));
    run();
  }

  /// Fills the slot of the worker's next push: NaN everywhere, then `value` (of parameter and
  /// scalar) for every parameter that `carried` has.
  void fill(TestWorker& worker, const std::function<double(std::size_t, std::size_t)>& value,
            std::span<const std::size_t> carried) {
    const auto bytes = slot(worker, kStream);
    std::fill(bytes.begin(), bytes.end(), std::byte{0xff});
    const auto bits = bitmap(worker, kStream);
    std::fill(bits.begin(), bits.end(), 0);
    for (const std::size_t p : carried) {
      bits[p / 64] |= std::uint64_t{1} << p % 64;
      std::vector<double> scalars(layout.places()[p].scalar_count);
      for (std::size_t i = 0; i < scalars.size(); ++i) scalars[i] = value(p, i);
      write(layout, p, scalars, bytes);
    }
  }
  void fill(TestWorker& worker, const std::function<double(std::size_t, std::size_t)>& value) {
    std::vector<std::size_t> all(layout.places().size());
    for (std::size_t p = 0; p < all.size(); ++p) all[p] = p;
    fill(worker, value, all);
  }
  Status publish(TestWorker& worker, worker::PushInfo info) {
    return worker.queues.at(kStream).publish(info);
  }

  /// Publishes a whole push of delta_value, numbered as in `number`.
  void push_whole(std::uint32_t rank, std::uint64_t number, double lambda = 1.0) {
    fill(workers[rank],
         [&](std::size_t p, std::size_t i) { return delta_value(rank, number, p, i); });
    EXPECT_OK(
        publish(workers[rank], {.flags = store::kPushAllParams, .extents = 1, .lambda = lambda}));
  }
  /// The same with the parameters in `carried` only; everything else in the slot is NaN.
  void push_part(std::uint32_t rank, std::uint64_t number, std::span<const std::size_t> carried,
                 double lambda = 1.0) {
    fill(
        workers[rank],
        [&](std::size_t p, std::size_t i) { return delta_value(rank, number, p, i); }, carried);
    EXPECT_OK(publish(workers[rank], {.flags = 0, .extents = 1, .lambda = lambda}));
  }

  /// Compares every scalar of the shard with `expected` (of parameter and scalar).
  void expect_values(const std::function<double(std::size_t, std::size_t)>& expected) {
    for (std::size_t p = 0; p < layout.places().size(); ++p) {
      const std::vector<double> found = values(kExtent, p);
      for (std::size_t i = 0; i < found.size(); ++i)
        ASSERT_EQ(found[i], expected(p, i)) << "parameter " << p << ", scalar " << i;
    }
  }

  const store::ExtentLayout layout;
  const wire::OpenStream how;
};

/// Several chunks of both storages, odd sizes, a parameter over three chunks, an empty one.
inline store::ExtentLayout mixed_layout() {
  return store::ExtentLayout{{{"a", DType::float32, {5, 3}},
                              {"b", DType::float64, {37}},
                              {"c", DType::float32, {97}},
                              {"d", DType::complex64, {3, 3}},
                              {"e", DType::float32, {0}},
                              {"f", DType::bfloat16, {7}},
                              {"g", DType::complex128, {}}},
                             192};
}

}  // namespace psplus::testing
