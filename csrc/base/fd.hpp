#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <utility>

#include <sys/types.h>

#include "base/clock.hpp"
#include "base/status.hpp"

namespace psplus {

/// Owns a file descriptor; closes it once.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) noexcept : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] explicit operator bool() const noexcept { return fd_ >= 0; }
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }
  void reset(int fd = -1) noexcept;
  /// A second descriptor of the same open file, close-on-exec.
  [[nodiscard]] Result<UniqueFd> duplicate() const;

 private:
  int fd_ = -1;
};

enum class Access : unsigned char { kReadOnly, kReadWrite };

/// Owns a shared mapping; unmaps it once.
class UniqueMapping {
 public:
  UniqueMapping() = default;
  UniqueMapping(UniqueMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  UniqueMapping& operator=(UniqueMapping&& other) noexcept {
    if (this != &other) {
      reset();
      bytes_ = std::exchange(other.bytes_, {});
    }
    return *this;
  }
  UniqueMapping(const UniqueMapping&) = delete;
  UniqueMapping& operator=(const UniqueMapping&) = delete;
  ~UniqueMapping() { reset(); }

  /// Maps the first `size` bytes of `fd`, shared.
  static Result<UniqueMapping> map_shared(const UniqueFd& fd, std::size_t size, Access access);

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  void reset() noexcept;
  std::span<std::byte> bytes_;
};

/// Opens a pidfd of `pid`: it becomes readable when that process ends, and a signal sent through it
/// never reaches a later process with the same number.
[[nodiscard]] Result<UniqueFd> open_pidfd(pid_t pid);

/// Whether the process behind `pidfd` has ended (a zombie counts as ended).
[[nodiscard]] bool has_exited(const UniqueFd& pidfd) noexcept;

/// Waits until `fd` is readable; kTimeout names `what`.
Status wait_readable(const UniqueFd& fd, Deadline deadline, std::string_view what);

}  // namespace psplus
