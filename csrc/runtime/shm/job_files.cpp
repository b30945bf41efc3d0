#include "runtime/shm/job_files.hpp"

#include "base/format.hpp"

#include <cerrno>
#include <deque>
#include <fstream>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace psplus::shm {

std::string last_words(const std::string& job_dir) {
  constexpr std::size_t kLines = 3;
  std::ifstream file(log_path(job_dir));
  std::deque<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back(std::move(line));
    if (lines.size() > kLines) lines.pop_front();
  }
  return lines.empty() ? "" : formatted("; its log ends:\n  {}", joined(lines, "\n  "));
}

Status make_job_directory(const std::string& job_dir) {
  if (::mkdir(job_dir.c_str(), 0700) == 0 || errno == EEXIST) return {};
  return Status::from_errno("mkdir", job_dir, errno);
}

void remove_job(const std::string& job_dir) noexcept {
  for (const char* name : {"/server.sock", "/workers", "/server.log", "/lock"})
    ::unlink((job_dir + name).c_str());
  ::rmdir(job_dir.c_str());
}

Result<UniqueFd> take_server_lock(const std::string& job_dir) {
  const std::string path = job_dir + "/lock";
  for (;;) {
    UniqueFd fd{::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600)};
    if (!fd) return Status::from_errno("open", path, errno);
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK)
        return Status{StatusCode::kBusy, "another server of this job is running"};
      return Status::from_errno("flock", path, errno);
    }
    // A server that ended meanwhile has removed the file: a lock on what has no name keeps nobody
    // out.
    struct stat locked {};
    struct stat named {};
    if (::fstat(fd.get(), &locked) == 0 && ::stat(path.c_str(), &named) == 0 &&
        locked.st_ino == named.st_ino && locked.st_dev == named.st_dev)
      return fd;
  }
}

Result<UniqueFd> lock_control(const UniqueFd& control, Deadline deadline) {
  const std::string path = formatted("/proc/self/fd/{}", control.get());
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
