#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "base/fd.hpp"
#include "base/status.hpp"

namespace psplus {

/// A piece of memory that processes share: a `memfd`, sealed against resizing, its pages reserved.
/// It has no name, so nothing is left behind when the last process drops it. Contents hold no
/// pointers: whoever maps it can go on with it.
class Segment {
 public:
  /// Creates and maps `size` zeroed bytes; `label` only shows in /proc. The request is compared
  /// with the memory that the machine and the process's control group have left first, because a
  /// group kills instead of failing. Errors: kNoSpace (says how much was asked for), kInternal.
  static Result<Segment> create(std::string_view label, std::size_t size);

  /// Maps a segment that another process created. Refuses a descriptor that is not a memfd sealed
  /// against resizing (a peer could make us die of SIGBUS) or smaller than `minimum_size`.
  static Result<Segment> map(UniqueFd fd, std::size_t minimum_size, Access access);

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return mapping_.bytes(); }
  [[nodiscard]] std::size_t size() const noexcept { return mapping_.bytes().size(); }
  [[nodiscard]] const UniqueFd& fd() const noexcept { return fd_; }

 private:
  Segment(UniqueFd fd, UniqueMapping mapping) noexcept
      : fd_(std::move(fd)), mapping_(std::move(mapping)) {}
  UniqueFd fd_;
  UniqueMapping mapping_;
};

}  // namespace psplus
