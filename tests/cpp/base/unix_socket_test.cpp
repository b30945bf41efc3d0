#include "base/unix_socket.hpp"

#include <array>
#include <cstring>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/child_process.hpp"
#include "support/scratch_folder.hpp"
#include "support/status_matchers.hpp"

namespace psplus {
namespace {

using psplus::testing::ChildProcess;
using psplus::testing::FailsWith;
using psplus::testing::ScratchFolder;
using std::chrono::seconds;

Deadline soon() { return Deadline::after(seconds{30}); }
Deadline now() { return Deadline::after(nanoseconds{0}); }

/// Distinct bytes for a message of `size` and a number.
std::vector<std::byte> text(std::size_t size, std::size_t number) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>((i * 31 + number * 7 + 1) & 0xff);
  return bytes;
}

std::pair<UnixSocket, UnixSocket> connected() {
  auto made = UnixSocket::pair();
  EXPECT_OK(made);
  return std::move(made).value();
}

TEST(UnixSocket, KeepsMessageBoundariesAndOrder) {
  const auto [a, b] = connected();
  const std::size_t sizes[] = {1, 7, 8, 9, 4096, UnixSocket::kMaxMessageBytes};
  for (std::size_t i = 0; i < std::size(sizes); ++i)
    ASSERT_OK(a.send(text(sizes[i], i), {}, soon()));
  for (std::size_t i = 0; i < std::size(sizes); ++i) {
    const auto got = b.receive(soon());
    ASSERT_OK(got);
    EXPECT_EQ(got->bytes, text(sizes[i], i)) << "message " << i;
    EXPECT_TRUE(got->fds.empty());
  }
  EXPECT_THAT(b.receive(now()), FailsWith(StatusCode::kBusy, "no message"));
}

TEST(UnixSocket, DescriptorsArriveWithTheirMessage) {
  const auto [a, b] = connected();
  std::vector<UniqueFd> files;
  std::vector<int> numbers;
  for (std::size_t i = 0; i < UnixSocket::kMaxFds; ++i) {
    files.emplace_back(::memfd_create("psplus-test", MFD_CLOEXEC));
    const std::string content = "file " + std::to_string(i);
    ASSERT_EQ(::pwrite(files.back().get(), content.data(), content.size(), 0),
              static_cast<ssize_t>(content.size()));
    numbers.push_back(files.back().get());
  }
  ASSERT_OK(a.send(text(3, 1), std::span{numbers}.first(1), soon()));
  ASSERT_OK(a.send(text(4, 2), {}, soon()));
  ASSERT_OK(a.send(text(5, 3), numbers, soon()));
  for (const int number : numbers) EXPECT_NE(::fcntl(number, F_GETFD), -1) << "still the caller's";
  files.clear();

  const auto one = b.receive(soon());
  const auto none = b.receive(soon());
  const auto all = b.receive(soon());
  ASSERT_OK(one);
  ASSERT_OK(none);
  ASSERT_OK(all);
  EXPECT_EQ(one->fds.size(), 1u);
  EXPECT_EQ(none->fds.size(), 0u);
  ASSERT_EQ(all->fds.size(), UnixSocket::kMaxFds);
  for (std::size_t i = 0; i < UnixSocket::kMaxFds; ++i) {
    char content[16] = {};
    ASSERT_GT(::pread(all->fds[i].get(), content, sizeof(content) - 1, 0), 0);
    EXPECT_EQ(std::string{content}, "file " + std::to_string(i));
    EXPECT_EQ(::fcntl(all->fds[i].get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
}

TEST(UnixSocket, TooLargeAMessageIsRefusedWhereItIsSent) {
  const auto [a, b] = connected();
  EXPECT_THAT(a.send(text(UnixSocket::kMaxMessageBytes + 1, 1), {}, soon()),
              FailsWith(StatusCode::kInternal, "larger than the socket allows"));
  const std::vector<int> fds(UnixSocket::kMaxFds + 1, 0);
  EXPECT_THAT(a.send(text(1, 1), fds, soon()),
              FailsWith(StatusCode::kInternal, "larger than the socket allows"));
  EXPECT_THAT(b.receive(now()), FailsWith(StatusCode::kBusy, ""));
}

TEST(UnixSocket, TooLargeAMessageOfAnotherProgramIsRefusedWhereItArrives) {
  const auto [a, b] = connected();
  const auto large = text(UnixSocket::kMaxMessageBytes + 1, 1);
  ASSERT_EQ(::send(a.fd().get(), large.data(), large.size(), 0),
            static_cast<ssize_t>(large.size()));
  ASSERT_OK(a.send(text(5, 2), {}, soon()));
  EXPECT_THAT(b.receive(soon()), FailsWith(StatusCode::kInternal, "longer than the protocol"));
  const auto after = b.receive(soon());
  ASSERT_OK(after);
  EXPECT_EQ(after->bytes, text(5, 2));
}

TEST(UnixSocket, PeerGoneIsPeerLostInBothDirections) {
  auto [a, b] = connected();
  ASSERT_OK(a.send(text(9, 4), {}, soon()));
  a = UnixSocket{};
  const auto last = b.receive(soon());  // what was sent before it went still arrives
  ASSERT_OK(last);
  EXPECT_EQ(last->bytes, text(9, 4));
  EXPECT_THAT(b.receive(soon()), FailsWith(StatusCode::kPeerLost, ""));
  EXPECT_THAT(b.send(text(1, 1), {}, soon()), FailsWith(StatusCode::kPeerLost, ""));
}

TEST(UnixSocket, AKilledPeerIsPeerLost) {
  auto [a, b] = connected();
  ChildProcess peer{[&a = a, &b = b] {
    b = UnixSocket{};
    return a.receive(Deadline::after(seconds{60})).ok() ? 1 : 2;
  }};
  a = UnixSocket{};
  peer.kill();
  EXPECT_THAT(b.receive(soon()), FailsWith(StatusCode::kPeerLost, ""));
}

TEST(UnixSocket, ReceiveWaitsUntilTheDeadline) {
  const auto [a, b] = connected();
  const TimePoint before = Clock::now();
  EXPECT_THAT(b.receive(Deadline::after(milliseconds{30})), FailsWith(StatusCode::kBusy, ""));
  EXPECT_GE(Clock::now() - before, milliseconds{30});
  std::thread sender{[&a = a] { EXPECT_OK(a.send(text(6, 6), {}, soon())); }};
  const auto got = b.receive(soon());
  sender.join();
  ASSERT_OK(got);
  EXPECT_EQ(got->bytes, text(6, 6));
}

TEST(UnixSocket, AFullQueueTimesOutAndLaterDrains) {
  const auto [a, b] = connected();
  std::size_t sent = 0;
  Status status;
  while ((status = a.send(text(16'384, sent), {}, Deadline::after(milliseconds{30}))).ok()) {
    ++sent;
    ASSERT_LT(sent, 10'000u);
  }
  EXPECT_THAT(status, FailsWith(StatusCode::kTimeout, "does not read its socket"));
  std::thread sender{[&a = a, sent] { EXPECT_OK(a.send(text(16'384, sent), {}, soon())); }};
  for (std::size_t i = 0; i <= sent; ++i) {
    const auto got = b.receive(soon());
    ASSERT_OK(got);
    EXPECT_EQ(got->bytes, text(16'384, i)) << "message " << i;
  }
  sender.join();
}

// Regression: sending spun past its deadline while the kernel refused more descriptors in flight.
TEST(UnixSocket, TooManyDescriptorsInFlightIsNoSpaceAtOnce) {
  ChildProcess child{[] {
    if (::geteuid() == 0 && ::setresuid(65'534, 65'534, 65'534) != 0)
      return 1;  // root has no limit
    const rlimit limit{.rlim_cur = 64, .rlim_max = 64};
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return 2;
    const auto [a, b] = std::move(UnixSocket::pair()).value();
    const std::vector<int> fds(UnixSocket::kMaxFds, a.fd().get());
    for (int i = 0; i < 100; ++i) {
      const Status status = a.send(text(1, 1), fds, Deadline::after(seconds{10}));
      if (status.code() == StatusCode::kNoSpace) return 0;
      if (!status.ok()) return 3;
    }
    return 4;
  }};
  EXPECT_EQ(child.exit_code(seconds{8}), 0);
}

TEST(UnixSocket, LostDescriptorsAreReportedAndNothingLeaks) {
  const auto [a, b] = connected();
  std::vector<int> fds(8, a.fd().get());
  ASSERT_OK(a.send(text(2, 2), fds, soon()));
  ChildProcess child{[&b = b] {
    const rlimit limit{.rlim_cur = static_cast<rlim_t>(b.fd().get()) + 1 + 3,
                       .rlim_max = static_cast<rlim_t>(b.fd().get()) + 1 + 3};
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
    const auto got = b.receive(soon());
    if (got.ok() || got.status().code() != StatusCode::kNoSpace) return 2;
    return ::dup(0) >= 0 ? 0 : 3;  // those that did arrive are closed again
  }};
  EXPECT_EQ(child.exit_code(), 0);
}

TEST(UnixListener, ConnectsAcceptsAndKnowsWhoIsThere) {
  const ScratchFolder folder;
  const std::string path = folder.path() / "socket";
  EXPECT_THAT(UnixSocket::connect(path), FailsWith(StatusCode::kBusy, "nobody listens at " + path));
  const auto listener = UnixListener::listen(path);
  ASSERT_OK(listener);
  EXPECT_THAT(listener->accept(), FailsWith(StatusCode::kBusy, "no connection"));
  const auto client = UnixSocket::connect(path);
  ASSERT_OK(client);
  ASSERT_OK(wait_readable(listener->fd(), soon(), "a connection"));
  const auto served = listener->accept();
  ASSERT_OK(served);
  for (const UnixSocket* socket : {&*client, &*served}) {
    const auto uid = socket->peer_uid();
    ASSERT_OK(uid);
    EXPECT_EQ(*uid, ::geteuid());
  }
  ASSERT_OK(client->send(text(10, 1), {}, soon()));
  ASSERT_OK(served->send(text(11, 2), {}, soon()));
  EXPECT_EQ(served->receive(soon())->bytes, text(10, 1));
  EXPECT_EQ(client->receive(soon())->bytes, text(11, 2));
}

TEST(UnixListener, AStaleSocketFileIsBusyForClientsAndReplacedByAListener) {
  const ScratchFolder folder;
  const std::string path = folder.path() / "socket";
  { ASSERT_OK(UnixListener::listen(path)); }
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);  // nobody has removed the file
  EXPECT_THAT(UnixSocket::connect(path), FailsWith(StatusCode::kBusy, "nobody listens"));
  const auto listener = UnixListener::listen(path);
  ASSERT_OK(listener);
  EXPECT_OK(UnixSocket::connect(path));
}

TEST(UnixListener, TooLongAPathNamesItAndTheFix) {
  const std::string path = "/tmp/" + std::string(120, 'x');
  EXPECT_THAT(UnixListener::listen(path), FailsWith(StatusCode::kConfig, path));
  EXPECT_THAT(UnixSocket::connect(path), FailsWith(StatusCode::kConfig, "TMPDIR"));
  const ScratchFolder folder;
  std::string longest = folder.path().string() + "/";
  longest.append(107 - longest.size(), 'y');
  const auto listener = UnixListener::listen(longest);
  ASSERT_OK(listener);
  EXPECT_OK(UnixSocket::connect(longest));
}

TEST(UnixListener, AFolderThatDoesNotExistFailsAndNamesThePath) {
  EXPECT_THAT(UnixListener::listen("/nonexistent-psplus/socket"),
              FailsWith(StatusCode::kInternal, "/nonexistent-psplus/socket"));
}

TEST(UnixListener, AConnectionOfAnotherUserIsDropped) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can play two users";
  const ScratchFolder folder;
  const std::string path = folder.path() / "socket";
  const auto listener = UnixListener::listen(path);
  ASSERT_OK(listener);
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0777), 0);
  ChildProcess stranger{[&] {
    if (::setresuid(65'534, 65'534, 65'534) != 0) return 1;
    const auto socket = UnixSocket::connect(path);
    if (!socket.ok()) return 2;
    return socket->receive(soon()).status().code() == StatusCode::kPeerLost ? 0 : 3;
  }};
  ASSERT_OK(wait_readable(listener->fd(), soon(), "a connection"));
  EXPECT_THAT(listener->accept(), FailsWith(StatusCode::kBusy, "another user"));
  EXPECT_EQ(stranger.exit_code(), 0);
}

}  // namespace
}  // namespace psplus
