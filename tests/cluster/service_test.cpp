// Server, sessions and streams as threads of one process, so that sanitizers see all of them: the
// server's socket and doorbell, the sessions' own threads, and the calls of the workers.

#include <stop_token>
#include <thread>

#include "integer_worker.hpp"
#include "runtime/shm/job_files.hpp"
#include "runtime/shm/server.hpp"
#include "support/status_matchers.hpp"

namespace psplus::cluster {
namespace {

constexpr std::uint64_t kSteps = 200;

class ServiceTest : public ::testing::Test {
 protected:
  ServiceTest() {
    auto lock = shm::take_server_lock(job_.path().string());
    EXPECT_OK(lock.status());
    lock_ = std::move(lock).value();
    auto server = shm::Server::open(job_.path().string(), {}, server::Config{},
                                    [](const std::string& line) { ADD_FAILURE() << line; });
    EXPECT_OK(server.status());
    server_ = std::move(server).value();
    thread_ = std::jthread([this](std::stop_token stop) { ended_ = server_->run(stop); });
  }

  const JobDirectory job_;
  UniqueFd lock_;
  std::unique_ptr<shm::Server> server_;
  Status ended_{StatusCode::kInternal, "the server has not ended"};
  std::jthread thread_;
};

class ServiceWorkersTest : public ServiceTest, public ::testing::WithParamInterface<Scheme> {};

TEST_P(ServiceWorkersTest, PushesOfThreadsAreAppliedExactlyOnce) {
  Board board{};
  board.stop_at = kSteps;
  int outcomes[kWorkers] = {};
  {
    std::vector<std::jthread> workers;
    for (std::uint32_t rank = 0; rank < kWorkers; ++rank)
      workers.emplace_back([&, rank] {
        try {
          outcomes[rank] = run_worker(job_, rank, GetParam(), board);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
  }
  thread_.join();  // ends by itself when the last worker has gone
  EXPECT_OK(ended_);
  for (std::uint32_t rank = 0; rank < kWorkers; ++rank) {
    EXPECT_EQ(outcomes[rank], 0) << rank;
    EXPECT_EQ(board.steps[rank].load(), kSteps) << rank;
    EXPECT_EQ(board.restarts[rank].load(), 0u) << rank;
  }
  EXPECT_FALSE(std::filesystem::exists(job_.path()));
}

TEST_F(ServiceTest, AServerThatIsStoppedIsMissed) {
  auto options = session_options(job_, 0, 1);
  options.server_path = "/nonexistent/psplus-server";  // nobody can replace it
  options.timeout = std::chrono::seconds{1};
  const auto session = require(worker::Session::connect(options));
  thread_.request_stop();
  thread_.join();
  EXPECT_OK(ended_);
  server_.reset();
  const Deadline limit = Deadline::after(std::chrono::seconds{60});
  while (session->failure().ok() && !limit.passed()) ::usleep(1000);
  EXPECT_FALSE(session->failure().ok());
  EXPECT_NE(session->failure().message().find("/nonexistent/psplus-server"), std::string::npos)
      << session->failure().message();
  EXPECT_FALSE(session->close(std::chrono::seconds{5}).ok());
}

INSTANTIATE_TEST_SUITE_P(All, ServiceWorkersTest,
                         ::testing::Values(Scheme::kAsp, Scheme::kPsPlusBuffered, Scheme::kBsp));

}  // namespace
}  // namespace psplus::cluster
