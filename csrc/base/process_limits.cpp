#include "base/process_limits.hpp"

#include <cerrno>
#include <system_error>

#include <sys/resource.h>

#include "base/format.hpp"

namespace psplus {
namespace {

std::string value_of(decltype(RLIMIT_NOFILE) resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : formatted("{}", limit.rlim_cur);
}

}  // namespace

std::string limit_behind(int error_number) {
  switch (error_number) {
    case EMFILE:
      return formatted(
          "a process may have {} open files (RLIMIT_NOFILE); raise it with `ulimit -n`",
          value_of(RLIMIT_NOFILE));
    case ENFILE:
      return "the machine's limit on open files is reached; raise it with `sysctl fs.file-max`";
    case EFBIG:
      return formatted(
          "a file, and so a segment of shared memory, may have {} bytes (RLIMIT_FSIZE); raise it "
          "with `ulimit -f unlimited`",
          value_of(RLIMIT_FSIZE));
    default:
      return "";
  }
}

void raise_to_hard_limit(int resource) noexcept {
  const auto which = static_cast<decltype(RLIMIT_NOFILE)>(resource);
  rlimit limit{};
  if (::getrlimit(which, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(which, &limit);
}

Status cannot_start(std::string_view what, int error_number) {
  std::string text =
      formatted("{} could not be started: {}", what, std::generic_category().message(error_number));
  if (error_number == EAGAIN)
    text += formatted(
        "; this user may have {} processes and threads (RLIMIT_NPROC): end some, or raise it with "
        "`ulimit -u`; a container may have a limit of its own (pids.max)",
        value_of(RLIMIT_NPROC));
  return {StatusCode::kNoSpace, std::move(text)};
}

}  // namespace psplus
