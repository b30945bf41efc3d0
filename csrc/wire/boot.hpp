#pragma once

#include <string>
#include <vector>

#include "base/fd.hpp"
#include "base/status.hpp"
#include "base/unix_socket.hpp"

/// What a starting server is told, and what it answers, over a socket pair that it inherits.
namespace psplus::wire {

/// Descriptor number of the inherited socket in a starting server.
inline constexpr int kBootFd = 3;

struct Boot {
  /// Segments of the predecessor; empty for a new job.
  std::vector<UniqueFd> segments;
  /// The predecessor: killed and waited for before its segments are touched. May be unset.
  UniqueFd predecessor;
};

enum class BootResult : unsigned char {
  kReady = 0,     ///< it listens
  kLostRace = 1,  ///< another server of this job is there
  kFailed = 2,    ///< it could not start; the text says why
};
struct BootReply {
  BootResult result = BootResult::kFailed;
  std::string text;
};

Status send_boot(const UnixSocket& socket, const std::vector<int>& segments, int predecessor,
                 Deadline deadline);
Result<Boot> receive_boot(const UnixSocket& socket, Deadline deadline);
Status send_boot_reply(const UnixSocket& socket, const BootReply& reply, Deadline deadline);
/// kPeerLost when the server ended before it answered.
Result<BootReply> receive_boot_reply(const UnixSocket& socket, Deadline deadline);

}  // namespace psplus::wire
