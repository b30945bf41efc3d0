// The locks that keep two servers of a job apart, each held by a description of its own as another
// process would hold it.

#include "runtime/shm/job_files.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/scratch_folder.hpp"
#include "support/status_matchers.hpp"

namespace psplus::shm {
namespace {

using psplus::testing::FailsWith;
using psplus::testing::ScratchFolder;

UniqueFd control_segment() {
  UniqueFd fd{::memfd_create("control", MFD_CLOEXEC)};
  EXPECT_TRUE(fd);
  EXPECT_EQ(::ftruncate(fd.get(), 4096), 0);
  return fd;
}

TEST(LockControl, WhoHoldsTheSegmentsIsNeverReplaced) {
  const UniqueFd control = control_segment();
  auto predecessor = lock_control(control, Deadline::after(milliseconds{0}));
  ASSERT_OK(predecessor);
  EXPECT_THAT(lock_control(control, Deadline::after(milliseconds{20})),
              FailsWith(StatusCode::kPeerLost,
                        "the previous server still holds its segments and cannot be ended"));
  predecessor->reset();
  EXPECT_OK(lock_control(control, Deadline::after(milliseconds{0})));
}

TEST(LockControl, ADescriptorThatIsPassedOnDoesNotShareTheLock) {
  const UniqueFd control = control_segment();
  const auto held = lock_control(control, Deadline::after(milliseconds{0}));
  ASSERT_OK(held);
  // Closing what another process was given must not let go, as it would of a lock on `control`.
  UniqueFd passed{::fcntl(control.get(), F_DUPFD_CLOEXEC, 0)};
  passed.reset();
  EXPECT_THAT(lock_control(control, Deadline::after(milliseconds{5})),
              FailsWith(StatusCode::kPeerLost, "still holds its segments"));
}

TEST(ServerLock, OneServerServesAJobDirectory) {
  const ScratchFolder folder;
  const std::string job = folder.path().string();
  auto first = take_server_lock(job);
  ASSERT_OK(first);
  EXPECT_THAT(take_server_lock(job),
              FailsWith(StatusCode::kBusy, "another server of this job is running"));
  first->reset();
  EXPECT_OK(take_server_lock(job));
}

TEST(ServerLock, ALockOnARemovedFileKeepsNobodyOut) {
  const ScratchFolder folder;
  const std::string job = folder.path().string();
  const auto first = take_server_lock(job);
  ASSERT_OK(first);
  remove_job(job);
  ASSERT_OK(make_job_directory(job));
  EXPECT_OK(take_server_lock(job));
}

TEST(ServerLock, ADirectoryThatIsMissingIsNamed) {
  EXPECT_THAT(take_server_lock("/nonexistent-job"),
              FailsWith(StatusCode::kInternal, "/nonexistent-job/lock"));
}

}  // namespace
}  // namespace psplus::shm
