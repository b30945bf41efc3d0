#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace psplus {

/// What the world can do to a call. Misuse is no `Status`: it throws `std::invalid_argument`.
enum class StatusCode : std::uint8_t {
  kOk = 0,
  kTimeout,         ///< a deadline passed; the message names whom was waited for
  kPeerLost,        ///< a worker or server is gone; the message says which and how
  kLayoutMismatch,  ///< workers disagree about parameters; the message names one
  kConfig,          ///< a setting cannot work; the message names it and the fix
  kNoSpace,   ///< memory or descriptors are exhausted; the message says how much was asked for
  kBusy,      ///< try again: nothing happened
  kClosed,    ///< the session or stream was closed, or the worker was expelled
  kInternal,  ///< a defect of psplus or an unexpected errno
};

[[nodiscard]] std::string_view to_string(StatusCode code) noexcept;

/// A result without a value: ok, or a code and a message for people.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  /// `operation` on `what` failed with `error_number`; ENOMEM, ENOSPC, EMFILE, ENFILE and
  /// EFBIG become kNoSpace, everything else kInternal.
  static Status from_errno(std::string_view operation, std::string_view what, int error_number);

  [[nodiscard]] bool ok() const noexcept { return code_ == StatusCode::kOk; }
  [[nodiscard]] StatusCode code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

/// A value, or the `Status` that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}         // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {  // NOLINT: implicit by design
    if (status_.ok()) status_ = {StatusCode::kInternal, "a Result was made from an ok Status"};
  }

  [[nodiscard]] bool ok() const noexcept { return value_.has_value(); }
  [[nodiscard]] const Status& status() const noexcept { return status_; }
  [[nodiscard]] T& value() & { return value_.value(); }
  [[nodiscard]] const T& value() const& { return value_.value(); }
  [[nodiscard]] T&& value() && { return std::move(value_).value(); }
  T* operator->() { return &value_.value(); }
  const T* operator->() const { return &value_.value(); }
  T& operator*() & { return value_.value(); }
  const T& operator*() const& { return value_.value(); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace psplus
