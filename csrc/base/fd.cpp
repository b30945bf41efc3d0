#include "base/fd.hpp"

#include "base/format.hpp"

#include <cerrno>
#include <climits>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace psplus {

void UniqueFd::reset(int fd) noexcept {
  if (fd_ >= 0) ::close(fd_);  // Linux releases the descriptor whatever close() returns
  fd_ = fd;
}

Result<UniqueFd> UniqueFd::duplicate() const {
  const int copy = ::fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return Status::from_errno("F_DUPFD_CLOEXEC", "a descriptor", errno);
  return UniqueFd{copy};
}

Result<UniqueMapping> UniqueMapping::map_shared(const UniqueFd& fd, std::size_t size,
                                                Access access) {
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const at = ::mmap(nullptr, size, protection, MAP_SHARED, fd.get(), 0);
  if (at == MAP_FAILED)
    return Status::from_errno("mmap", formatted("a segment of {} bytes", size), errno);
  UniqueMapping mapping;
  mapping.bytes_ = {static_cast<std::byte*>(at), size};
  return mapping;
}

void UniqueMapping::reset() noexcept {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
  bytes_ = {};
}

Result<UniqueFd> open_pidfd(pid_t pid) {
  UniqueFd fd{static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))};
  if (!fd) return Status::from_errno("pidfd_open", formatted("process {}", pid), errno);
  return fd;
}

bool has_exited(const UniqueFd& pidfd) noexcept {
  pollfd poll_entry{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
  return ::poll(&poll_entry, 1, 0) == 1;
}

Status wait_readable(const UniqueFd& fd, Deadline deadline, std::string_view what) {
  for (;;) {
    pollfd poll_entry{.fd = fd.get(), .events = POLLIN, .revents = 0};
    const auto left = std::chrono::ceil<milliseconds>(deadline.left()).count();
    const int timeout = left > INT_MAX ? INT_MAX : static_cast<int>(left);
    const int ready = ::poll(&poll_entry, 1, timeout);
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return Status::from_errno("poll", what, errno);
    if (deadline.passed())
      return {StatusCode::kTimeout, formatted("timed out waiting for {}", what)};
  }
}

}  // namespace psplus
