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

#include "integer_worker.hpp"

namespace psplus::cluster {
namespace {

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

/// A server that a sanitizer ends is replaced like a killed one, so its log is looked at.
std::string complaints_of_sanitizers(const JobDirectory& job) {
  std::ifstream log(job.path() / "server.log");
  std::string line;
  std::string found;
  while (std::getline(log, line))
    if (line.find("Sanitizer") != std::string::npos ||
        line.find("runtime error") != std::string::npos)
      found += line + "\n";
  return found;
}

/// Kills a scheme: a third of what PSPLUS_TEST_KILLS says, but not fewer than the build says.
int kills_wanted() {
  constexpr int kLeast = PSPLUS_TEST_LEAST_KILLS;
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
  EXPECT_EQ(complaints_of_sanitizers(job), "");
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
