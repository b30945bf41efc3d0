#include "runtime/shm/job_files.hpp"

#include <cerrno>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

namespace psplus::shm {

Result<UniqueFd> take_server_lock(const std::string& job_dir) {
  const std::string path = job_dir + "/lock";
  UniqueFd fd{::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600)};
  if (!fd) return Status::from_errno("open", path, errno);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK)
      return Status{StatusCode::kBusy, "another server of this job is running"};
    return Status::from_errno("flock", path, errno);
  }
  return fd;
}

Result<UniqueFd> lock_control(const UniqueFd& control, Deadline deadline) {
  const std::string path = fmt::format("/proc/self/fd/{}", control.get());
  UniqueFd fd{::open(path.c_str(), O_RDWR | O_CLOEXEC)};
  if (!fd) return Status::from_errno("open", "the control segment", errno);
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  while (::fcntl(fd.get(), F_OFD_SETLK, &lock) != 0) {
    if (errno != EAGAIN && errno != EACCES)
      return Status::from_errno("F_OFD_SETLK", "the control segment", errno);
    if (deadline.passed())
      return Status{StatusCode::kPeerLost,
                    "the previous server still holds its segments and cannot be ended"};
    // The kernel tells nobody when a killed process has let go; it takes microseconds.
    std::this_thread::sleep_for(milliseconds{1});
  }
  return fd;
}

}  // namespace psplus::shm
