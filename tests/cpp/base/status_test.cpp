#include "base/status.hpp"

#include <cerrno>
#include <memory>
#include <set>

#include "support/status_matchers.hpp"

namespace psplus {
namespace {

using psplus::testing::FailsWith;

TEST(Status, ExhaustedResourcesBecomeNoSpaceAndEverythingElseInternal) {
  for (const int error : {ENOMEM, ENOSPC, EMFILE, ENFILE})
    EXPECT_THAT(Status::from_errno("mmap", "the shard", error),
                FailsWith(StatusCode::kNoSpace, "mmap failed for the shard"));
  for (const int error : {EINVAL, EPERM, EBADF, ENOENT, EIO})
    EXPECT_THAT(Status::from_errno("mmap", "the shard", error),
                FailsWith(StatusCode::kInternal, "mmap failed for the shard"));
}

TEST(Status, MessageOfAnErrnoSaysWhatTheSystemSays) {
  EXPECT_THAT(Status::from_errno("bind", "/x/y", EADDRINUSE),
              FailsWith(StatusCode::kInternal, "bind failed for /x/y: Address already in use"));
}

TEST(Status, EveryCodeHasAWordOfItsOwn) {
  std::set<std::string_view> words;
  for (int code = 0; code <= static_cast<int>(StatusCode::kInternal); ++code)
    words.insert(to_string(static_cast<StatusCode>(code)));
  EXPECT_EQ(words.size(), static_cast<std::size_t>(StatusCode::kInternal) + 1);
  EXPECT_FALSE(words.contains("unknown"));
}

TEST(Status, DefaultIsOk) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_EQ(status.message(), "");
}

TEST(Result, HoldsAMoveOnlyValueOrTheReasonWhyThereIsNone) {
  Result<std::unique_ptr<int>> full{std::make_unique<int>(7)};
  ASSERT_OK(full);
  const std::unique_ptr<int> taken = std::move(full).value();
  EXPECT_EQ(*taken, 7);

  Result<std::unique_ptr<int>> empty{Status{StatusCode::kTimeout, "nobody came"}};
  EXPECT_THAT(empty, FailsWith(StatusCode::kTimeout, "nobody came"));
  EXPECT_THROW((void)empty.value(), std::bad_optional_access);
}

TEST(Result, FromAnOkStatusIsADefectAndSaysSo) {
  const Result<int> result{Status{}};
  EXPECT_THAT(result, FailsWith(StatusCode::kInternal, "ok Status"));
}

}  // namespace
}  // namespace psplus
