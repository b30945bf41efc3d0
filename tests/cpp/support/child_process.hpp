#pragma once

#include <csignal>
#include <cstdlib>
#include <optional>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.hpp"
#include "base/fd.hpp"

namespace psplus::testing {

/// A forked process that runs a function and exits with the number it returns. Killed and reaped at
/// the latest when this object goes, and when the test process dies.
class ChildProcess {
 public:
  template <class F>
  explicit ChildProcess(F run) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::_exit(run());
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess() { kill(); }

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }

  /// The exit code; nothing when it did not exit by itself within `timeout` (it is killed then).
  [[nodiscard]] std::optional<int> exit_code(nanoseconds timeout = std::chrono::seconds{30}) {
    if (pid_ <= 0) return std::nullopt;
    const auto pidfd = open_pidfd(pid_);
    if (!pidfd.ok() || !wait_readable(*pidfd, Deadline::after(timeout), "a child").ok()) {
      kill();
      return std::nullopt;
    }
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? std::optional{WEXITSTATUS(status)} : std::nullopt;
  }

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  pid_t pid_;
};

}  // namespace psplus::testing
