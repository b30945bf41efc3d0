#include "base/status.hpp"

#include "base/format.hpp"
#include "base/process_limits.hpp"

#include <cerrno>
#include <system_error>

namespace psplus {

std::string_view to_string(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kTimeout:
      return "timeout";
    case StatusCode::kPeerLost:
      return "peer lost";
    case StatusCode::kLayoutMismatch:
      return "layout mismatch";
    case StatusCode::kConfig:
      return "configuration";
    case StatusCode::kNoSpace:
      return "no space";
    case StatusCode::kBusy:
      return "busy";
    case StatusCode::kClosed:
      return "closed";
    case StatusCode::kInternal:
      return "internal";
  }
  return "unknown";
}

Status Status::from_errno(std::string_view operation, std::string_view what, int error_number) {
  const bool exhausted = error_number == ENOMEM || error_number == ENOSPC ||
                         error_number == EMFILE || error_number == ENFILE || error_number == EFBIG;
  const std::string limit = limit_behind(error_number);
  return {
      exhausted ? StatusCode::kNoSpace : StatusCode::kInternal,
      formatted("{} failed for {}: {}{}{}", operation, what,
                std::generic_category().message(error_number), limit.empty() ? "" : "; ", limit)};
}

}  // namespace psplus
