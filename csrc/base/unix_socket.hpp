#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "base/status.hpp"

namespace psplus {

/// One message of a `UnixSocket`: bytes, and the descriptors that travelled with them.
struct UnixMessage {
  std::vector<std::byte> bytes;
  std::vector<UniqueFd> fds;
};

/// A connected Unix socket that keeps message boundaries (SOCK_SEQPACKET) and passes descriptors.
/// Thread safety: one thread may send while another receives.
class UnixSocket {
 public:
  static constexpr std::size_t kMaxMessageBytes = 64 * 1024;
  static constexpr std::size_t kMaxFds = 16;

  UnixSocket() = default;
  explicit UnixSocket(UniqueFd fd) noexcept : fd_(std::move(fd)) {}

  /// Connects to the socket file `path`. kBusy when nobody listens there (no file, or a stale one).
  static Result<UnixSocket> connect(const std::string& path);
  static Result<std::pair<UnixSocket, UnixSocket>> pair();

  /// Sends one message whole. kPeerLost when the other side is gone, kTimeout when its queue stays
  /// full until `deadline`. Descriptors stay the caller's.
  Status send(std::span<const std::byte> bytes, std::span<const int> fds, Deadline deadline) const;

  /// Receives one message. kBusy when none is there by `deadline`; kPeerLost at end of file.
  Result<UnixMessage> receive(Deadline deadline) const;

  /// User id of the process at the other end when it connected.
  [[nodiscard]] Result<uid_t> peer_uid() const;

  [[nodiscard]] const UniqueFd& fd() const noexcept { return fd_; }

 private:
  UniqueFd fd_;
};

/// A listening Unix socket.
class UnixListener {
 public:
  /// Replaces whatever is at `path`: the caller holds the lock that makes it the only one to.
  static Result<UnixListener> listen(const std::string& path);
  /// Accepts a waiting connection; kBusy when there is none. The peer runs under our user id, else
  /// it is dropped and kBusy is returned.
  Result<UnixSocket> accept() const;
  [[nodiscard]] const UniqueFd& fd() const noexcept { return fd_; }

 private:
  UniqueFd fd_;
};

}  // namespace psplus
