#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "job.hpp"
#include "worker/dense_stream.hpp"

/// Workers that push whole numbers without pause and add extents meanwhile, so that what the values
/// must be in the end is known exactly.
namespace psplus::cluster {

inline constexpr std::uint32_t kWorkers = 3;
inline constexpr std::size_t kElements = 800;       // of float64, in chunks of 256 bytes: 25 chunks
inline constexpr std::size_t kAddedElements = 100;  // of each extent that is added on the way
inline constexpr std::size_t kExtents = 30;         // at most
inline constexpr std::uint64_t kGrowEvery = 11;     // steps, and some more for each rank

enum class Scheme : std::uint8_t { kAsp, kPsPlusBuffered, kBsp };

struct Board {
  std::atomic<std::uint64_t> steps[kWorkers];
  std::atomic<std::uint64_t> stop_at;                   ///< 0: go on
  std::atomic<std::uint64_t> sums[kWorkers][kExtents];  ///< of what each has pushed, an element
  std::atomic<std::uint32_t> restarts[kWorkers];
};

/// What worker `rank` pushes at `step`: a multiple of the number of workers, so that a third of it
/// and all sums are whole numbers, exact in float64.
inline std::uint64_t delta_of(std::uint32_t rank, std::uint64_t step) {
  return kWorkers * (1 + (rank * 7 + step * 3) % 11);
}

inline double initial_value(std::size_t extent, std::size_t i) {
  return static_cast<double>(1'000'000'000 + 1'000'003 * extent + 17 * i);
}
inline std::vector<double> initial_values(std::size_t extent) {
  std::vector<double> values(extent == 0 ? kElements : kAddedElements);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = initial_value(extent, i);
  return values;
}

/// One parameter an extent, as its worker holds it.
struct Model {
  std::vector<std::vector<double>> values;

  [[nodiscard]] std::vector<const void*> readable() const {
    std::vector<const void*> pointers;
    for (const auto& extent : values) pointers.push_back(extent.data());
    return pointers;
  }
  [[nodiscard]] std::vector<void*> writable() {
    std::vector<void*> pointers;
    for (auto& extent : values) pointers.push_back(extent.data());
    return pointers;
  }
};

inline void add_extent(worker::DenseStream& stream, Model& model) {
  std::vector<double> values = initial_values(model.values.size());
  const void* const readable[] = {values.data()};
  void* const writable[] = {values.data()};
  require(stream.add_extent({{"a", DType::float64, {kAddedElements}}}, {}, readable, writable));
  model.values.push_back(std::move(values));
}

inline void step_once(worker::DenseStream& stream, Model& model, Scheme scheme,
                      std::uint64_t delta) {
  const auto readable = model.readable();
  const auto writable = model.writable();
  const std::vector<std::uint8_t> carried(readable.size(), 1);
  stream.snapshot(readable);
  for (auto& values : model.values)
    for (double& value : values) value -= static_cast<double>(delta);
  static_cast<void>(require(stream.write_delta(readable, carried)));
  const bool eager = scheme == Scheme::kPsPlusBuffered;
  if (!eager) require(stream.publish(1.0));
  require(stream.wait_round(0));
  require(stream.observe());
  require(stream.pull(writable, eager ? 1.0 : 0.0));
  if (eager) require(stream.publish(1.0));
}

/// Compares the final values and step vector with what the board says; 0, or which is wrong.
inline int check_outcome(std::uint32_t rank, const Model& model,
                         const std::vector<std::uint64_t>& vector, const Board& board) {
  for (std::size_t e = 0; e < model.values.size(); ++e) {
    std::uint64_t sum = 0;
    for (const auto& part : board.sums) sum += part[e].load();
    for (std::size_t i = 0; i < model.values[e].size(); ++i) {
      const double expected = initial_value(e, i) - static_cast<double>(sum / kWorkers);
      if (model.values[e][i] == expected) continue;
      std::fprintf(stderr, "rank %u: element %zu of extent %zu is %.17g, expected %.17g\n", rank, i,
                   e, model.values[e][i], expected);
      return 2;
    }
  }
  for (std::uint32_t r = 0; r < kWorkers; ++r) {
    if (vector[r] == board.steps[r].load()) continue;
    std::fprintf(stderr, "rank %u: clock of rank %u is %zu after %zu steps\n", rank, r,
                 static_cast<std::size_t>(vector[r]),
                 static_cast<std::size_t>(board.steps[r].load()));
    return 3;
  }
  return 0;
}

inline int run_worker(const JobDirectory& job, std::uint32_t rank, Scheme scheme, Board& board) {
  auto session = require(worker::Session::connect(session_options(job, rank, kWorkers)));
  worker::StreamOptions options;
  options.mode = scheme == Scheme::kBsp ? store::Mode::kBsp : store::Mode::kAsync;
  options.pull =
      scheme == Scheme::kPsPlusBuffered ? store::PullMode::kBuffered : store::PullMode::kMapped;
  store::ExtentLayout layout{{{"w", DType::float64, {kElements}}}, 256};
  auto stream = require(worker::DenseStream::open(session, options, layout, {}));
  Model model;
  model.values.push_back(rank == 0 ? initial_values(0) : std::vector<double>(kElements, -1.0));
  while (!require(stream->wait_initialised())) require(stream->publish_values(model.readable()));
  require(stream->observe());
  require(stream->pull(model.writable(), 0.0));
  for (std::uint64_t step = 1;; ++step) {
    const std::uint64_t stop_at = board.stop_at.load();
    if (stop_at != 0 && step > stop_at) break;
    if (model.values.size() < kExtents && step % (kGrowEvery + 5 * rank) == 0)
      add_extent(*stream, model);
    step_once(*stream, model, scheme, delta_of(rank, step));
    for (std::size_t e = 0; e < model.values.size(); ++e)
      board.sums[rank][e] += delta_of(rank, step);
    board.steps[rank] = step;
  }
  require(stream->refresh());
  require(stream->barrier());
  require(stream->refresh());
  require(stream->observe());
  require(stream->pull(model.writable(), 0.0));
  int outcome = check_outcome(rank, model, stream->step_vector(), board);
  if (outcome == 0 && model.values.size() < 2) outcome = 4;
  board.restarts[rank] = session->server_restarts();
  require(stream->close(std::chrono::seconds{5}));
  require(session->close(std::chrono::seconds{5}));
  return outcome;
}

}  // namespace psplus::cluster
