#include "base/fd.hpp"

#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "support/child_process.hpp"
#include "support/status_matchers.hpp"

namespace psplus {
namespace {

using psplus::testing::ChildProcess;
using psplus::testing::FailsWith;

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) != -1 || errno != EBADF; }

UniqueFd some_fd() { return UniqueFd{::memfd_create("psplus-test", MFD_CLOEXEC)}; }

TEST(UniqueFd, ClosesOnceWhenItGoes) {
  int number = -1;
  {
    const UniqueFd fd = some_fd();
    number = fd.get();
    ASSERT_TRUE(fd);
    EXPECT_TRUE(is_open(number));
  }
  EXPECT_FALSE(is_open(number));
}

TEST(UniqueFd, MovingHandsOver) {
  UniqueFd first = some_fd();
  const int number = first.get();
  UniqueFd second = std::move(first);
  EXPECT_FALSE(first);  // NOLINT: a moved-from owner is empty by contract
  EXPECT_EQ(second.get(), number);

  UniqueFd third = some_fd();
  const int overwritten = third.get();
  third = std::move(second);
  EXPECT_FALSE(is_open(overwritten));
  EXPECT_EQ(third.get(), number);
  EXPECT_TRUE(is_open(number));

  UniqueFd& same = third;
  third = std::move(same);
  EXPECT_EQ(third.get(), number);
  EXPECT_TRUE(is_open(number));
}

TEST(UniqueFd, ReleaseKeepsItOpenAndResetCloses) {
  UniqueFd fd = some_fd();
  const int number = fd.release();
  EXPECT_FALSE(fd);
  EXPECT_TRUE(is_open(number));
  fd.reset(number);
  EXPECT_EQ(fd.get(), number);
  fd.reset();
  EXPECT_FALSE(is_open(number));
}

TEST(UniqueFd, DuplicateIsASecondDescriptorOfTheSameFile) {
  UniqueFd fd = some_fd();
  auto copy = fd.duplicate();
  ASSERT_OK(copy);
  EXPECT_NE(copy->get(), fd.get());
  EXPECT_EQ(::fcntl(copy->get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  ASSERT_EQ(::write(fd.get(), "abc", 3), 3);
  fd.reset();
  char text[4] = {};
  EXPECT_EQ(::pread(copy->get(), text, 3, 0), 3);
  EXPECT_STREQ(text, "abc");
  EXPECT_THAT(UniqueFd{}.duplicate(), FailsWith(StatusCode::kInternal, "F_DUPFD_CLOEXEC"));
}

TEST(UniqueMapping, IsSharedAndUnmappedOnce) {
  const UniqueFd fd = some_fd();
  ASSERT_EQ(::ftruncate(fd.get(), 8192), 0);
  auto writer = UniqueMapping::map_shared(fd, 8192, Access::kReadWrite);
  auto reader = UniqueMapping::map_shared(fd, 8192, Access::kReadOnly);
  ASSERT_OK(writer);
  ASSERT_OK(reader);
  writer->bytes()[8191] = std::byte{0x5a};
  EXPECT_EQ(reader->bytes()[8191], std::byte{0x5a});

  void* const at = writer->bytes().data();
  UniqueMapping moved = std::move(writer).value();
  EXPECT_TRUE(writer->bytes().empty());
  EXPECT_EQ(moved.bytes().data(), at);
  EXPECT_EQ(moved.bytes().size(), 8192u);
  moved = UniqueMapping{};
  // msync says ENOMEM exactly when the pages are not mapped.
  EXPECT_EQ(::msync(at, 8192, MS_ASYNC), -1);
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(reader->bytes()[8191], std::byte{0x5a});
}

TEST(UniqueMapping, FailureNamesTheSize) {
  EXPECT_THAT(UniqueMapping::map_shared(UniqueFd{}, 12345, Access::kReadOnly),
              FailsWith(StatusCode::kInternal, "12345 bytes"));
  EXPECT_THAT(UniqueMapping::map_shared(some_fd(), 0, Access::kReadOnly),
              FailsWith(StatusCode::kInternal, "mmap"));
}

TEST(Pidfd, BecomesReadableWhenTheProcessEnds) {
  int pipe_ends[2];
  ASSERT_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  const UniqueFd read_end{pipe_ends[0]};
  UniqueFd write_end{pipe_ends[1]};
  ChildProcess child{[&] {
    write_end.reset();
    char ignored = 0;
    return ::read(read_end.get(), &ignored, 1) == 0 ? 3 : 4;  // end of file: the parent says go
  }};
  const auto pidfd = open_pidfd(child.pid());
  ASSERT_OK(pidfd);
  EXPECT_FALSE(has_exited(*pidfd));
  EXPECT_THAT(wait_readable(*pidfd, Deadline::after(milliseconds{20}), "process 'x'"),
              FailsWith(StatusCode::kTimeout, "timed out waiting for process 'x'"));
  write_end.reset();
  ASSERT_OK(wait_readable(*pidfd, Deadline::after(std::chrono::seconds{30}), "the child"));
  EXPECT_TRUE(has_exited(*pidfd));  // a zombie: nobody has reaped it yet
  EXPECT_EQ(child.exit_code(), 3);
}

TEST(Pidfd, OfNoProcessFailsAndNamesTheNumber) {
  EXPECT_THAT(open_pidfd(0x3fffffff), FailsWith(StatusCode::kInternal, "process 1073741823"));
}

TEST(WaitReadable, ReturnsAtOnceWhenSomethingIsThere) {
  int pipe_ends[2];
  ASSERT_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  const UniqueFd read_end{pipe_ends[0]};
  const UniqueFd write_end{pipe_ends[1]};
  ASSERT_EQ(::write(write_end.get(), "x", 1), 1);
  EXPECT_OK(wait_readable(read_end, Deadline::after(nanoseconds{0}), "a pipe"));
}

}  // namespace
}  // namespace psplus
