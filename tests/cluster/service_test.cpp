// Server, sessions and streams as threads of one process, so that sanitizers see all of them: the
// server's socket and doorbell, the sessions' own threads, and the calls of the workers.

#include <mutex>
#include <stop_token>
#include <thread>

#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

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
                                    [this](const std::string& line) {
                                      const std::scoped_lock lock(log_mutex_);
                                      log_.push_back(line);
                                    });
    EXPECT_OK(server.status());
    server_ = std::move(server).value();
    thread_ = std::jthread([this](std::stop_token stop) { ended_ = server_->run(stop); });
  }

  ~ServiceTest() override {
    if (thread_.joinable()) thread_.request_stop(), thread_.join();
    EXPECT_THAT(log_, ::testing::Each(::testing::HasSubstr(expected_in_log_)));
  }
  std::size_t lines_in_log() {
    const std::scoped_lock lock(log_mutex_);
    return log_.size();
  }

  std::string expected_in_log_ = "nothing at all";
  const JobDirectory job_;
  std::mutex log_mutex_;
  std::vector<std::string> log_;
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

TEST_F(ServiceTest, AServerWithoutDescriptorsGoesOnLater) {
  expected_in_log_ = "RLIMIT_NOFILE";
  const UniqueFd client{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = shm::socket_path(job_.path().string());
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  std::copy(path.begin(), path.end(), address.sun_path);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit exhausted = limit;
  {
    const UniqueFd lowest{::dup(0)};
    exhausted.rlim_cur = static_cast<rlim_t>(lowest.get());
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &exhausted), 0);
  EXPECT_EQ(::connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
            0);
  const Deadline first = Deadline::after(std::chrono::seconds{60});
  while (lines_in_log() == 0 && !first.passed()) ::usleep(1000);
  const std::size_t before = lines_in_log();
  ::usleep(500'000);
  const std::size_t after = lines_in_log();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_LE(after, before + 6);  // a try at each tick, or two
  const auto session = require(worker::Session::connect(session_options(job_, 0, 1)));
  EXPECT_OK(session->close(std::chrono::seconds{30}));
}

/// What a worker that is no psplus might send; the server ends its connection and goes on.
TEST_F(ServiceTest, WhatAClientSendsEndsItsConnectionOnly) {
  expected_in_log_ = "";
  const auto session = require(worker::Session::connect(session_options(job_, 0, 2)));
  const Deadline limit = Deadline::after(std::chrono::seconds{60});
  const std::string path = shm::socket_path(job_.path().string());
  const UniqueFd self = require(open_pidfd(::getpid()));
  const UniqueFd tiny{::memfd_create("tiny", MFD_CLOEXEC)};
  ASSERT_EQ(::ftruncate(tiny.get(), 1), 0);
  const wire::Attach attach{
      .rank = Rank{1}, .world_size = 2, .process = static_cast<std::uint32_t>(::getpid())};
  const auto ends = [&](const UnixSocket& client) {
    for (;;) {
      const auto message = client.receive(limit);
      if (message.ok()) continue;
      return message.status().code() == StatusCode::kPeerLost;
    }
  };
  const auto open = [](std::uint64_t layout_bytes, std::uint64_t blob_bytes) {
    return wire::encode(
        wire::OpenStream{.layout_bytes = layout_bytes, .blob_bytes = blob_bytes, .has_blob = true});
  };
  const std::vector<int> no_fds;
  const std::vector<int> one{tiny.get()};
  const std::vector<int> two{tiny.get(), tiny.get()};
  const std::vector<std::byte> garbage(100, std::byte{0xa5});
  struct Sent {
    bool attaches;
    std::vector<std::byte> bytes;
    const std::vector<int>& fds;
    const char* told;
  };
  const std::vector<Sent> cases{
      {false, garbage, no_fds, ""},
      {false, wire::encode(attach), no_fds, "without its pidfd"},
      {true, garbage, no_fds, ""},
      {true, open(1, 1), one, "a damaged request to open a stream"},
      {true, open(1, std::uint64_t{1} << 41), two, "a damaged request to open a stream"},
      {true, open(1, std::uint64_t{1} << 39), two, "a blob is cut short"},
      {true, open(std::uint64_t{1} << 29, 1), two, "a layout is cut short"},
  };
  for (const Sent& sent : cases) {
    const std::size_t lines = lines_in_log();
    const UnixSocket client = require(UnixSocket::connect(path));
    if (sent.attaches) {
      const std::vector<int> fds{self.get()};
      ASSERT_OK(client.send(wire::encode(attach), fds, limit));
    }
    ASSERT_OK(client.send(sent.bytes, sent.fds, limit));
    EXPECT_TRUE(ends(client)) << sent.told;
    const std::scoped_lock lock(log_mutex_);
    const std::vector<std::string> told(log_.begin() + static_cast<std::ptrdiff_t>(lines),
                                        log_.end());
    EXPECT_THAT(told, ::testing::Contains(::testing::HasSubstr(sent.told)));
  }
  EXPECT_OK(session->failure());
  EXPECT_OK(session->close(std::chrono::seconds{30}));
}

/// Its segments are not touched either: a stream is registered whose shard is not handed over.
TEST_F(ServiceTest, WhoHoldsTheLockIsNotReplaced) {
  expected_in_log_ = "";
  const auto session = require(worker::Session::connect(session_options(job_, 0, 1)));
  auto stream = require(worker::DenseStream::open(
      session, {}, store::ExtentLayout{{{"w", DType::float64, {4}}}, 256}, {}));
  const auto control = session->segment(store::SegmentKind::kControl, ExtentId{});
  ASSERT_NE(control, nullptr);
  std::vector<UniqueFd> segments;
  segments.emplace_back(::dup(control->fd().get()));
  const auto successor = shm::Server::open(job_.path().string(), std::move(segments),
                                           server::Config{}, [](const std::string&) {});
  EXPECT_THAT(successor, testing::FailsWith(StatusCode::kPeerLost, "still holds its segments"));
  EXPECT_OK(stream->close(std::chrono::seconds{30}));
  EXPECT_OK(session->close(std::chrono::seconds{30}));
}

INSTANTIATE_TEST_SUITE_P(All, ServiceWorkersTest,
                         ::testing::Values(Scheme::kAsp, Scheme::kPsPlusBuffered, Scheme::kBsp));

}  // namespace
}  // namespace psplus::cluster
