#include "base/memory_limits.hpp"

#include "support/scratch_folder.hpp"
#include "support/status_matchers.hpp"

namespace psplus {
namespace {

using psplus::testing::FailsWith;
using psplus::testing::ScratchFolder;

constexpr std::size_t kMiB = 1024 * 1024;

/// A machine with 1,000 MiB available, described by files in a folder.
class MemoryLimits : public ::testing::Test {
 protected:
  MemoryLimits() {
    machine_.write("proc/meminfo",
                   "MemTotal:        4096000 kB\nMemFree:          100000 kB\n"
                   "HugePages_Total:       0\nMemAvailable:    1024000 kB\nBuffers: 5 kB\n");
  }
  void groups(std::string_view text) { machine_.write("proc/self/cgroup", text); }
  void v2(const std::string& group, const std::string& limit, std::size_t used,
          std::size_t file_cache = 0) {
    const std::string folder = "sys/fs/cgroup" + group;
    machine_.write(folder + "/memory.max", limit + "\n");
    machine_.write(folder + "/memory.current", std::to_string(used) + "\n");
    machine_.write(folder + "/memory.stat", "anon 17\nactive_file 99999\ninactive_file " +
                                                std::to_string(file_cache) + "\nslab 3\n");
  }
  Status check(std::size_t size) {
    return check_memory_available("the shard", size, machine_.path().string());
  }
  ScratchFolder machine_;
};

TEST_F(MemoryLimits, TheMachineLimitsWhenNoGroupDoes) {
  EXPECT_OK(check(1000 * kMiB));
  EXPECT_THAT(check(1000 * kMiB + 1),
              FailsWith(StatusCode::kNoSpace,
                        "no memory for the shard: 1048576001 bytes asked for, 1048576000 bytes "
                        "left (the machine's MemAvailable)"));
}

TEST_F(MemoryLimits, AGroupsLimitLessItsUseHolds) {
  groups("0::/job\n");
  v2("/job", std::to_string(300 * kMiB), 100 * kMiB);
  EXPECT_OK(check(200 * kMiB));
  EXPECT_THAT(check(200 * kMiB + 1),
              FailsWith(StatusCode::kNoSpace, "209715200 bytes left (control group /job)"));
}

TEST_F(MemoryLimits, ALimitOfAnAncestorHoldsToo) {
  groups("0::/slice/job/task\n");
  v2("/slice/job/task", "max", 10 * kMiB);
  v2("/slice/job", std::to_string(900 * kMiB), 100 * kMiB);
  v2("/slice", std::to_string(500 * kMiB), 450 * kMiB);
  EXPECT_OK(check(50 * kMiB));
  EXPECT_THAT(check(50 * kMiB + 1), FailsWith(StatusCode::kNoSpace, "(control group /slice)"));
}

TEST_F(MemoryLimits, InactivePageCacheIsFreeToTake) {
  groups("0::/job\n");
  v2("/job", std::to_string(300 * kMiB), 280 * kMiB, 80 * kMiB);
  EXPECT_OK(check(100 * kMiB));
  EXPECT_FALSE(check(100 * kMiB + 1).ok());
}

TEST_F(MemoryLimits, AGroupOverItsLimitHasNothingLeft) {
  groups("0::/job\n");
  v2("/job", std::to_string(100 * kMiB), 101 * kMiB);
  EXPECT_THAT(check(1), FailsWith(StatusCode::kNoSpace, " 0 bytes left (control group /job)"));
  EXPECT_OK(check(0));
}

TEST_F(MemoryLimits, VersionOneGroupsAreRead) {
  groups("5:cpu,cpuacct:/other\n4:hugetlb,memory:/docker/x\n1:name=systemd:/docker/x\n");
  const std::string folder = "sys/fs/cgroup/memory/docker/x";
  machine_.write(folder + "/memory.limit_in_bytes", std::to_string(64 * kMiB));
  machine_.write(folder + "/memory.usage_in_bytes", std::to_string(24 * kMiB));
  EXPECT_OK(check(40 * kMiB));
  EXPECT_THAT(check(40 * kMiB + 1), FailsWith(StatusCode::kNoSpace, "(control group /docker/x)"));
}

TEST_F(MemoryLimits, APathThatAContainerDoesNotSeeFallsBackToItsRoot) {
  groups("0::/../../outside\n");
  v2("", std::to_string(70 * kMiB), 60 * kMiB);
  EXPECT_OK(check(10 * kMiB));
  EXPECT_THAT(check(10 * kMiB + 1), FailsWith(StatusCode::kNoSpace, "(control group /)"));
}

TEST_F(MemoryLimits, DamagedLinesAreSkipped) {
  groups("nonsense\n:\n0\n0::no-slash\n\n");
  EXPECT_OK(check(1000 * kMiB));
  EXPECT_FALSE(check(1000 * kMiB + 1).ok());
}

TEST(MemoryLimitsOfThisMachine, AFewBytesFitAndAnExabyteDoesNot) {
  EXPECT_OK(check_memory_available("a test", 4096));
  EXPECT_THAT(check_memory_available("a test", std::size_t{1} << 60),
              FailsWith(StatusCode::kNoSpace, "1152921504606846976 bytes asked for"));
}

}  // namespace
}  // namespace psplus
