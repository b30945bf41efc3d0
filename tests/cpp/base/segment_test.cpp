#include "base/segment.hpp"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/child_process.hpp"
#include "support/status_matchers.hpp"

namespace psplus {
namespace {

using psplus::testing::ChildProcess;
using psplus::testing::FailsWith;

TEST(Segment, IsZeroedReservedAndOfTheSizeAskedFor) {
  for (const std::size_t size : {std::size_t{1}, std::size_t{4095}, std::size_t{4096},
                                 std::size_t{4097}, std::size_t{1} << 20}) {
    SCOPED_TRACE(size);
    const auto segment = Segment::create("psplus-test", size);
    ASSERT_OK(segment);
    ASSERT_EQ(segment->size(), size);
    EXPECT_TRUE(std::all_of(segment->bytes().begin(), segment->bytes().end(),
                            [](std::byte b) { return b == std::byte{0}; }));
    struct stat info {};
    ASSERT_EQ(::fstat(segment->fd().get(), &info), 0);
    EXPECT_EQ(static_cast<std::size_t>(info.st_size), size);
    EXPECT_GE(static_cast<std::size_t>(info.st_blocks) * 512, size);  // no holes
  }
}

TEST(Segment, APeerCannotResizeIt) {
  const auto segment = Segment::create("psplus-test", 8192);
  ASSERT_OK(segment);
  ChildProcess peer{[&] {
    const int fd = segment->fd().get();
    if (::ftruncate(fd, 4096) == 0 || errno != EPERM) return 1;
    if (::ftruncate(fd, 16384) == 0 || errno != EPERM) return 2;
    if (::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0 || errno != EPERM) return 3;
    segment->bytes()[8191] = std::byte{42};
    return 0;
  }};
  EXPECT_EQ(peer.exit_code(), 0);
  EXPECT_EQ(segment->bytes()[8191], std::byte{42});
}

TEST(Segment, MapsWhatAnotherCreated) {
  const auto made = Segment::create("psplus-test", 5000);
  ASSERT_OK(made);
  made->bytes()[4999] = std::byte{7};
  auto fd = made->fd().duplicate();
  ASSERT_OK(fd);
  const auto mapped = Segment::map(std::move(fd).value(), 5000, Access::kReadOnly);
  ASSERT_OK(mapped);
  EXPECT_EQ(mapped->size(), 5000u);
  EXPECT_EQ(mapped->bytes()[4999], std::byte{7});
  EXPECT_NE(mapped->bytes().data(), made->bytes().data());
}

UniqueFd memfd(off_t size, int seals) {
  UniqueFd fd{::memfd_create("psplus-test", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  EXPECT_EQ(::ftruncate(fd.get(), size), 0);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(Segment, RefusesWhatAPeerCouldShrinkOrGrow) {
  constexpr auto kCode = StatusCode::kInternal;
  const auto text = "not a memfd of sealed size";
  EXPECT_THAT(Segment::map(memfd(8192, 0), 1, Access::kReadOnly), FailsWith(kCode, text));
  EXPECT_THAT(Segment::map(memfd(8192, F_SEAL_SHRINK), 1, Access::kReadOnly),
              FailsWith(kCode, text));
  EXPECT_THAT(Segment::map(memfd(8192, F_SEAL_GROW), 1, Access::kReadOnly), FailsWith(kCode, text));
  EXPECT_OK(Segment::map(memfd(8192, F_SEAL_SHRINK | F_SEAL_GROW), 1, Access::kReadOnly));
  int pipe_ends[2];
  ASSERT_EQ(::pipe2(pipe_ends, O_CLOEXEC), 0);
  const UniqueFd other_end{pipe_ends[1]};
  EXPECT_THAT(Segment::map(UniqueFd{pipe_ends[0]}, 1, Access::kReadOnly), FailsWith(kCode, text));
  EXPECT_THAT(Segment::map(UniqueFd{}, 1, Access::kReadOnly), FailsWith(kCode, text));
}

TEST(Segment, RefusesWhatIsTooShort) {
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW;
  EXPECT_THAT(Segment::map(memfd(4096, seals), 4097, Access::kReadOnly),
              FailsWith(StatusCode::kInternal, "has 4096 bytes, expected at least 4097"));
  EXPECT_THAT(Segment::map(memfd(0, seals), 0, Access::kReadOnly),
              FailsWith(StatusCode::kInternal, "has 0 bytes"));
  EXPECT_OK(Segment::map(memfd(4097, seals), 4097, Access::kReadOnly));
}

TEST(Segment, AbsurdSizesAreRefusedBeforeAnythingIsReserved) {
  EXPECT_THAT(Segment::create("the weights", std::size_t{1} << 62),
              FailsWith(StatusCode::kNoSpace,
                        "no memory for the weights: 4611686018427387904 bytes asked for, "));
  EXPECT_THAT(Segment::create("the weights", ~std::size_t{0}),
              FailsWith(StatusCode::kNoSpace, "18446744073709551615 bytes asked for"));
  EXPECT_THAT(Segment::create("the weights", std::size_t{1} << 62),
              FailsWith(StatusCode::kNoSpace, "bytes left ("));
}

TEST(Segment, OfNoBytesIsADefectOfTheCaller) {
  EXPECT_THAT(Segment::create("nothing", 0), FailsWith(StatusCode::kInternal, "nothing (0 bytes)"));
}

}  // namespace
}  // namespace psplus
