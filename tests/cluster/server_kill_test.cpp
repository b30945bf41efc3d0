// SIGKILLs of the real server under constant pushes of three workers, which add extents meanwhile:
// the final values are exact.

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "job.hpp"
#include "worker/dense_stream.hpp"

namespace psplus::cluster {
namespace {

constexpr std::uint32_t kWorkers = 3;
constexpr std::size_t kElements = 800;       // of float64, in chunks of 256 bytes: 25 chunks
constexpr std::size_t kAddedElements = 100;  // of each extent that is added on the way
constexpr std::size_t kExtents = 30;         // at most
constexpr std::uint64_t kGrowEvery = 11;     // steps, and some more for each rank

enum class Scheme : std::uint8_t { kAsp, kPsPlusBuffered, kBsp };

struct Board {
  std::atomic<std::uint64_t> steps[kWorkers];
  std::atomic<std::uint64_t> stop_at;                   ///< 0: go on
  std::atomic<std::uint64_t> sums[kWorkers][kExtents];  ///< of what each has pushed, an element
  std::atomic<std::uint32_t> restarts[kWorkers];
};

/// What worker `rank` pushes at `step`: a multiple of the number of workers, so that a third of it
/// and all sums are whole numbers, exact in float64.
std::uint64_t delta_of(std::uint32_t rank, std::uint64_t step) {
  return kWorkers * (1 + (rank * 7 + step * 3) % 11);
}

double initial_value(std::size_t extent, std::size_t i) {
  return static_cast<double>(1'000'000'000 + 1'000'003 * extent + 17 * i);
}
std::vector<double> initial_values(std::size_t extent) {
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

void add_extent(worker::DenseStream& stream, Model& model) {
  std::vector<double> values = initial_values(model.values.size());
  const void* const readable[] = {values.data()};
  void* const writable[] = {values.data()};
  require(stream.add_extent({{"a", DType::float64, {kAddedElements}}}, {}, readable, writable));
  model.values.push_back(std::move(values));
}

void step_once(worker::DenseStream& stream, Model& model, Scheme scheme, std::uint64_t delta) {
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
int check_outcome(std::uint32_t rank, const Model& model, const std::vector<std::uint64_t>& vector,
                  const Board& board) {
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

int run_worker(const JobDirectory& job, std::uint32_t rank, Scheme scheme, Board& board) {
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

/// Process id of the newest server, from its log; 0 before there is one.
pid_t newest_server(const JobDirectory& job) {
  std::ifstream log(job.path() / "server.log");
  std::string line;
  pid_t newest = 0;
  const std::regex started{R"(psplus-server\[(\d+)\]: (started|took over))"};
  while (std::getline(log, line)) {
    std::smatch match;
    if (std::regex_search(line, match, started)) newest = std::stoi(match[1]);
  }
  return newest;
}

/// Kills a scheme: 330 in all, or as many more as PSPLUS_TEST_KILLS says.
int kills_wanted() {
  constexpr int kLeast = 110;
  const char* const text = std::getenv("PSPLUS_TEST_KILLS");
  return text == nullptr ? kLeast : std::max(kLeast, std::atoi(text) / 3);
}

class ServerKillTest : public ::testing::TestWithParam<Scheme> {};

TEST_P(ServerKillTest, EveryPushIsAppliedExactlyOnce) {
  const JobDirectory job;
  const Shared<Board> board;
  const Scheme scheme = GetParam();
  std::vector<pid_t> workers;
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank)
    workers.push_back(start_process([&, rank] { return run_worker(job, rank, scheme, *board); }));

  std::mt19937 random{7};
  const int wanted = kills_wanted();
  const Deadline limit = Deadline::after(std::chrono::seconds{60 + wanted / 5});
  const auto pushes_so_far = [&] {
    std::uint64_t sum = 0;
    for (const auto& steps : board->steps) sum += steps.load();
    return sum;
  };
  const auto all_step = [&] {
    return std::all_of(std::begin(board->steps), std::end(board->steps),
                       [](const auto& steps) { return steps.load() > 0; });
  };
  while (!all_step() && !limit.passed()) ::usleep(1000);
  int kills = 0;
  pid_t last = 0;
  while (kills < wanted && !limit.passed()) {
    const pid_t server = newest_server(job);
    if (server == 0 || server == last) {
      ::usleep(500);
      continue;
    }
    // Any moment of its life: each third while it starts, the others after somebody's step.
    const std::uint64_t before = pushes_so_far();
    while (kills % 3 != 0 && pushes_so_far() == before && !limit.passed()) ::usleep(100);
    ::usleep(std::uniform_int_distribution<useconds_t>(0, kills % 3 == 0 ? 300 : 6000)(random));
    ASSERT_EQ(::kill(server, SIGKILL), 0);
    last = server;
    ++kills;
  }
  EXPECT_EQ(kills, wanted) << "servers were not replaced in time";
  std::uint64_t furthest = 0;
  for (const auto& steps : board->steps) furthest = std::max(furthest, steps.load());
  board->stop_at = furthest + 5;

  std::uint64_t pushes = 0;
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
    const int status = wait_process(workers[rank], Deadline::after(std::chrono::seconds{60}));
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << ": " << status;
    // A server that dies before a worker has come back to it is none that the worker lost.
    EXPECT_GT(board->restarts[rank].load(), 0U) << rank;
    pushes += board->steps[rank].load();
  }
  // A server that ends in peace removes its job.
  const Deadline gone = Deadline::after(std::chrono::seconds{5});
  while (std::filesystem::exists(job.path()) && !gone.passed()) ::usleep(1000);
  EXPECT_FALSE(std::filesystem::exists(job.path()));
  EXPECT_GE(3 * pushes, static_cast<std::uint64_t>(2 * kills)) << "kills without pushes";
  std::printf("%d kills, %zu pushes\n", kills, static_cast<std::size_t>(pushes));
}

INSTANTIATE_TEST_SUITE_P(All, ServerKillTest,
                         ::testing::Values(Scheme::kAsp, Scheme::kPsPlusBuffered, Scheme::kBsp));

}  // namespace
}  // namespace psplus::cluster
