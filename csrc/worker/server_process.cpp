#include "worker/server_process.hpp"

#include "base/exit_status.hpp"
#include "base/fd.hpp"
#include "base/format.hpp"
#include "base/process_limits.hpp"

#include <cerrno>
#include <csignal>
#include <cstring>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

namespace psplus::worker {
namespace {

/// posix_spawn's two option objects, destroyed together.
class SpawnOptions {
 public:
  SpawnOptions() {
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
  }
  SpawnOptions(const SpawnOptions&) = delete;
  SpawnOptions& operator=(const SpawnOptions&) = delete;
  ~SpawnOptions() {
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
  }
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
};

void default_signals(posix_spawnattr_t& attributes) {
  sigset_t none;
  sigset_t all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
}

constexpr const char* kFix =
    "reinstall psplus, or set PSPLUS_SERVER to the psplus-server executable of this version";

int reap(pid_t process) {
  int status = 0;
  while (::waitpid(process, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

/// Waits for the first process of a server, which ends as soon as the server is on its way.
/// kConfig when it ends as no psplus-server does.
Status wait_until_started(pid_t starter, const std::string& server_path, Deadline deadline) {
  const auto process = open_pidfd(starter);
  if (!process.ok() || !wait_readable(*process, deadline, server_path).ok()) {
    ::kill(starter, SIGKILL);
    reap(starter);
    if (!process.ok()) return process.status();
    return {StatusCode::kTimeout,
            formatted("{} was started and does not begin to serve; {}", server_path, kFix)};
  }
  const int status = reap(starter);
  if (WIFSIGNALED(status))
    return {StatusCode::kPeerLost,
            formatted("{} was ended by signal {} ({}) as it started", server_path, WTERMSIG(status),
                      ::strsignal(WTERMSIG(status)))};
  switch (WEXITSTATUS(status)) {
    case kServerStarted:
      return {};
    case kServerNotForked:
      return cannot_start(server_path, EAGAIN);
    default:
      return {StatusCode::kConfig,
              formatted("{} ended with status {} at once, which psplus-server does not; {}",
                        server_path, WEXITSTATUS(status), kFix)};
  }
}

}  // namespace

Result<wire::BootReply> start_server(const std::string& server_path, const std::string& job_dir,
                                     const std::vector<int>& segments, int predecessor,
                                     Deadline deadline) {
  auto pair = UnixSocket::pair();
  if (!pair.ok()) return pair.status();
  auto& [mine, theirs] = *pair;
  SpawnOptions options;
  default_signals(options.attributes);
  ::posix_spawn_file_actions_adddup2(&options.actions, theirs.fd().get(), wire::kBootFd);
  std::string program = server_path;
  std::string flag = "--job-dir";
  std::string directory = job_dir;
  char* const arguments[] = {program.data(), flag.data(), directory.data(), nullptr};
  pid_t starter = -1;
  if (const int error = ::posix_spawn(&starter, program.c_str(), &options.actions,
                                      &options.attributes, arguments, environ);
      error != 0) {
    if (error == EAGAIN || error == ENOMEM) return cannot_start(server_path, error);
    return Status{StatusCode::kConfig, formatted("cannot run the server {}: {}; {}", server_path,
                                                 std::strerror(error), kFix)};
  }
  theirs = UnixSocket{};  // so that a server that dies shows as end of file
  if (Status started = wait_until_started(starter, server_path, deadline); !started.ok())
    return started;
  const auto explained = [](const Status& failed) -> Status {
    if (failed.code() == StatusCode::kBusy)
      return {StatusCode::kTimeout, "the server was started and has not answered in time"};
    if (failed.code() != StatusCode::kPeerLost) return failed;
    return {StatusCode::kPeerLost, "the server was killed or crashed as it started"};
  };
  if (Status sent = wire::send_boot(mine, segments, predecessor, deadline); !sent.ok())
    return explained(sent);
  auto reply = wire::receive_boot_reply(mine, deadline);
  if (!reply.ok()) return explained(reply.status());
  return reply;
}

}  // namespace psplus::worker
