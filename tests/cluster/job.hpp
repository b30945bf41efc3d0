#pragma once

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/scratch_folder.hpp"
#include "worker/session.hpp"

/// Real worker processes against a real server, without torch.
namespace psplus::cluster {

/// A directory for one job, removed with what is left of it.
using JobDirectory = testing::ScratchFolder;

/// A zeroed `T` that child processes share.
template <class T>
class Shared {
 public:
  Shared() {
    void* const at =
        ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc{};
    value_ = new (at) T{};
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() { ::munmap(value_, sizeof(T)); }
  T* operator->() const noexcept { return value_; }
  T& operator*() const noexcept { return *value_; }

 private:
  T* value_;
};

/// Starts a process that runs `body` and ends with what it returns; 99 after an exception.
inline pid_t start_process(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  int status = 99;
  try {
    status = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "worker %d: %s\n", ::getpid(), error.what());
  }
  std::fflush(nullptr);
  ::_exit(status);
}

/// Waits for a process; one that takes longer than `limit` is killed, which fails the test.
inline int wait_process(pid_t process, Deadline limit) {
  int status = 0;
  while (::waitpid(process, &status, WNOHANG) == 0) {
    if (limit.passed()) {
      ADD_FAILURE() << "process " << process << " had not ended in time";
      ::kill(process, SIGKILL);
      ::waitpid(process, &status, 0);
      break;
    }
    ::usleep(2000);
  }
  return status;
}

inline worker::SessionOptions session_options(const JobDirectory& job, std::uint32_t rank,
                                              std::uint32_t workers) {
  worker::SessionOptions options;
  options.job_dir = job.path().string();
  options.server_path = PSPLUS_SERVER_EXECUTABLE;
  options.rank = Rank{rank};
  options.world_size = workers;
  options.timeout = std::chrono::seconds{30};
  return options;
}

/// Throws what a Status says, for worker bodies.
inline void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}
template <class T>
T require(Result<T> result) {
  require(result.status());
  return std::move(result).value();
}

}  // namespace psplus::cluster
