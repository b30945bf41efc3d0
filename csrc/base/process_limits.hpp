#pragma once

#include <string>
#include <string_view>

#include "base/status.hpp"

/// Limits that the system sets a process: what an exhausted one is called and how it is raised.
namespace psplus {

/// The limit behind EMFILE, ENFILE or EFBIG, its value now and how to raise it; empty for other
/// errors.
[[nodiscard]] std::string limit_behind(int error_number);

/// Raises the soft limit on `resource` (RLIMIT_NOFILE and so on) to the hard one, if it may.
void raise_to_hard_limit(int resource) noexcept;

/// kNoSpace: `what`, a process or thread, could not be started because of `error_number`.
[[nodiscard]] Status cannot_start(std::string_view what, int error_number);

}  // namespace psplus
