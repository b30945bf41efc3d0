#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.hpp"

namespace psplus::testing {

inline const Status& status_of(const Status& status) { return status; }
template <class T>
const Status& status_of(const Result<T>& result) {
  return result.status();
}

/// Matches an ok `Status` or `Result`; a failure prints code and message.
MATCHER(IsOk, "") {
  const Status& status = status_of(arg);
  *result_listener << to_string(status.code()) << ": " << status.message();
  return status.ok();
}

/// Matches a failure with this code whose message contains `text`.
MATCHER_P2(FailsWith, code, text, "") {
  const Status& status = status_of(arg);
  *result_listener << to_string(status.code()) << ": " << status.message();
  return status.code() == code && status.message().find(text) != std::string::npos;
}

}  // namespace psplus::testing

#define ASSERT_OK(expression) ASSERT_THAT(expression, ::psplus::testing::IsOk())
#define EXPECT_OK(expression) EXPECT_THAT(expression, ::psplus::testing::IsOk())
