#include "base/unix_socket.hpp"

#include "base/format.hpp"
#include "base/process_limits.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace psplus {
namespace {

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path))
    return Status{
        StatusCode::kConfig,
        formatted("socket path {} is longer than {} bytes; set TMPDIR to a shorter folder", path,
                  sizeof(address.sun_path) - 1)};
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

Status wait_writable(int fd, Deadline deadline) {
  for (;;) {
    pollfd entry{.fd = fd, .events = POLLOUT, .revents = 0};
    const auto left = std::chrono::ceil<milliseconds>(deadline.left()).count();
    const int ready = ::poll(&entry, 1, static_cast<int>(std::min<long>(left, 60'000)));
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return Status::from_errno("poll", "a Unix socket", errno);
    if (deadline.passed())
      return {StatusCode::kTimeout, "timed out sending to a process that does not read its socket"};
  }
}

}  // namespace

Result<UnixSocket> UnixSocket::connect(const std::string& path) {
  auto address = address_of(path);
  if (!address.ok()) return address.status();
  UniqueFd fd{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  if (!fd) return Status::from_errno("socket", path, errno);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(sockaddr_un)) != 0) {
    if (errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN)
      return Status{StatusCode::kBusy, formatted("nobody listens at {}", path)};
    return Status::from_errno("connect", path, errno);
  }
  return UnixSocket{std::move(fd)};
}

Result<std::pair<UnixSocket, UnixSocket>> UnixSocket::pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0)
    return Status::from_errno("socketpair", "a Unix socket", errno);
  return std::pair{UnixSocket{UniqueFd{fds[0]}}, UnixSocket{UniqueFd{fds[1]}}};
}

Status UnixSocket::send(std::span<const std::byte> bytes, std::span<const int> fds,
                        Deadline deadline) const {
  if (bytes.size() > kMaxMessageBytes || fds.size() > kMaxFds)
    return {StatusCode::kInternal, "a message is larger than the socket allows"};
  iovec part{.iov_base = const_cast<std::byte*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  for (;;) {
    const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (sent >= 0) return {};
    switch (errno) {
      case EINTR:
        break;
      case EAGAIN:
        if (Status status = wait_writable(fd_.get(), deadline); !status.ok()) return status;
        break;
      case ENOBUFS:
      case ETOOMANYREFS:
        return {StatusCode::kNoSpace,
                "the kernel has no room for a message: too many descriptors are on their way to "
                "processes that do not read their sockets"};
      case EPIPE:
      case ECONNRESET:
      case ENOTCONN:
        return {StatusCode::kPeerLost, "the other end of the socket is gone"};
      default:
        return Status::from_errno("sendmsg", "a Unix socket", errno);
    }
  }
}

Result<UnixMessage> UnixSocket::receive(Deadline deadline) const {
  UnixMessage result;
  result.bytes.resize(kMaxMessageBytes);
  iovec part{.iov_base = result.bytes.data(), .iov_len = result.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  for (;;) {
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t received = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
    if (received < 0) {
      if (errno == EINTR) continue;
      if (errno == ECONNRESET) return Status{StatusCode::kPeerLost, "the connection was reset"};
      if (errno != EAGAIN) return Status::from_errno("recvmsg", "a Unix socket", errno);
      if (deadline.passed()) return Status{StatusCode::kBusy, "no message is waiting"};
      Status ready = wait_readable(fd_, deadline, "a message");
      if (ready.code() == StatusCode::kTimeout)
        return Status{StatusCode::kBusy, "no message is waiting"};
      if (!ready.ok()) return ready;
      continue;
    }
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
        result.fds.emplace_back(fd);
      }
    }
    if (received == 0 && result.fds.empty())
      return Status{StatusCode::kPeerLost, "the other end closed the connection"};
    if ((message.msg_flags & MSG_CTRUNC) != 0)
      return Status{StatusCode::kNoSpace,
                    formatted("descriptors of a message were lost: {}", limit_behind(EMFILE))};
    if ((message.msg_flags & MSG_TRUNC) != 0)
      return Status{StatusCode::kInternal, "a message was longer than the protocol allows"};
    result.bytes.resize(static_cast<std::size_t>(received));
    return result;
  }
}

Result<uid_t> UnixSocket::peer_uid() const {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    return Status::from_errno("SO_PEERCRED", "a Unix socket", errno);
  return credentials.uid;
}

Result<UnixListener> UnixListener::listen(const std::string& path) {
  auto address = address_of(path);
  if (!address.ok()) return address.status();
  UnixListener listener;
  listener.fd_ = UniqueFd{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  if (!listener.fd_) return Status::from_errno("socket", path, errno);
  ::unlink(path.c_str());
  if (::bind(listener.fd_.get(), reinterpret_cast<const sockaddr*>(&*address),
             sizeof(sockaddr_un)) != 0)
    return Status::from_errno("bind", path, errno);
  if (::listen(listener.fd_.get(), 512) != 0) return Status::from_errno("listen", path, errno);
  return listener;
}

Result<UnixSocket> UnixListener::accept() const {
  UniqueFd fd{::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)};
  if (!fd) {
    if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)
      return Status{StatusCode::kBusy, "no connection is waiting"};
    return Status::from_errno("accept4", "the server's socket", errno);
  }
  UnixSocket socket{std::move(fd)};
  const auto uid = socket.peer_uid();
  if (!uid.ok() || *uid != ::geteuid())
    return Status{StatusCode::kBusy, "a connection from another user was dropped"};
  return socket;
}

}  // namespace psplus
