// SIGKILLs of the real server under constant pushes of three workers: the final values are exact.

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
constexpr std::size_t kElements = 800;  // of float64, in chunks of 256 bytes: 25 chunks

enum class Scheme : std::uint8_t { kAsp, kPsPlusBuffered, kBsp };

struct Board {
  std::atomic<std::uint64_t> steps[kWorkers];
  std::atomic<std::uint64_t> stop_at;         ///< 0: go on
  std::atomic<std::uint64_t> sums[kWorkers];  ///< of what each has pushed, an element
  std::atomic<std::uint32_t> restarts[kWorkers];
};

/// What worker `rank` pushes at `step`: a multiple of the number of workers, so that a third of it
/// and all sums are whole numbers, exact in float64.
std::uint64_t delta_of(std::uint32_t rank, std::uint64_t step) {
  return kWorkers * (1 + (rank * 7 + step * 3) % 11);
}

double initial_value(std::size_t i) { return static_cast<double>(1'000'000'000 + 17 * i); }

void step_once(worker::DenseStream& stream, std::vector<double>& values, Scheme scheme,
               std::uint64_t delta) {
  const void* const readable[] = {values.data()};
  void* const writable[] = {values.data()};
  const std::uint8_t carried[] = {1};
  stream.snapshot(readable);
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
int check_outcome(std::uint32_t rank, const std::vector<double>& values,
                  const std::vector<std::uint64_t>& vector, const Board& board) {
  std::uint64_t sum = 0;
  for (const auto& part : board.sums) sum += part.load();
  for (std::size_t i = 0; i < kElements; ++i) {
    const double expected = initial_value(i) - static_cast<double>(sum / kWorkers);
    if (values[i] == expected) continue;
    std::fprintf(stderr, "rank %u: element %zu is %.17g, expected %.17g\n", rank, i, values[i],
                 expected);
    return 2;
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
  std::vector<double> values(kElements);
  for (std::size_t i = 0; i < kElements; ++i) values[i] = rank == 0 ? initial_value(i) : -1.0;
  const void* const readable[] = {values.data()};
  void* const writable[] = {values.data()};
  while (!require(stream->wait_initialised())) require(stream->publish_values(readable));
  require(stream->observe());
  require(stream->pull(writable, 0.0));
  for (std::uint64_t step = 1;; ++step) {
    const std::uint64_t stop_at = board.stop_at.load();
    if (stop_at != 0 && step > stop_at) break;
    step_once(*stream, values, scheme, delta_of(rank, step));
    board.sums[rank] += delta_of(rank, step);
    board.steps[rank] = step;
  }
  require(stream->refresh());
  require(stream->barrier());
  require(stream->refresh());
  require(stream->observe());
  require(stream->pull(writable, 0.0));
  const int outcome = check_outcome(rank, values, stream->step_vector(), board);
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

int kills_wanted() {
  const char* const text = std::getenv("PSPLUS_TEST_KILLS");
  return text == nullptr ? 110 : std::max(1, std::atoi(text) / 3);
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
    // Any moment of its life, its first batches too.
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
  std::printf("%d kills, %zu pushes\n", kills, static_cast<std::size_t>(pushes));
}

INSTANTIATE_TEST_SUITE_P(All, ServerKillTest,
                         ::testing::Values(Scheme::kAsp, Scheme::kPsPlusBuffered, Scheme::kBsp));

}  // namespace
}  // namespace psplus::cluster
