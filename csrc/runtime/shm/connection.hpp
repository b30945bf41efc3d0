#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "base/fd.hpp"
#include "base/status.hpp"
#include "base/unix_socket.hpp"

namespace psplus::shm {

/// One worker's socket as its server sees it, with what could not be sent yet: a worker that does
/// not read its socket must not hold up the others.
class Connection {
 public:
  explicit Connection(UnixSocket socket) noexcept : socket_(std::move(socket)) {}

  /// Sends now or queues. `owners` keep the descriptors open until they have been sent.
  Status send(std::vector<std::byte> bytes, std::vector<int> fds,
              std::vector<std::shared_ptr<const void>> owners);
  /// Sends what is queued, as far as the socket takes it.
  Status flush();
  [[nodiscard]] bool has_queued() const noexcept { return !queue_.empty(); }

  [[nodiscard]] const UnixSocket& socket() const noexcept { return socket_; }
  /// Death notice of the process behind it; unset until it has attached.
  UniqueFd process;
  /// Close once the queue is empty.
  bool closing = false;

 private:
  struct Queued {
    std::vector<std::byte> bytes;
    std::vector<int> fds;
    std::vector<std::shared_ptr<const void>> owners;
  };
  UnixSocket socket_;
  std::deque<Queued> queue_;
};

}  // namespace psplus::shm
