#include "worker/server_process.hpp"

#include "base/format.hpp"
#include "runtime/shm/job_files.hpp"

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
      error != 0)
    return Status{StatusCode::kConfig,
                  formatted("cannot run the server {}: {}; reinstall psplus or set PSPLUS_SERVER "
                            "to its psplus-server executable",
                            server_path, std::strerror(error))};
  theirs = UnixSocket{};  // so that a server that dies shows as end of file
  int status = 0;
  while (::waitpid(starter, &status, 0) < 0 && errno == EINTR) {
  }
  const auto explained = [&](const Status& failed) -> Status {
    if (failed.code() != StatusCode::kPeerLost) return failed;
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
      return {StatusCode::kPeerLost,
              formatted("{} ended with status {} at once; is it psplus-server?", server_path,
                        WEXITSTATUS(status))};
    if (WIFSIGNALED(status))
      return {StatusCode::kPeerLost,
              formatted("{} was ended by signal {} ({}) as it started", server_path,
                        WTERMSIG(status), ::strsignal(WTERMSIG(status)))};
    return {StatusCode::kPeerLost,
            formatted("the server was killed or crashed as it started; see {}",
                      shm::log_path(job_dir))};
  };
  if (Status sent = wire::send_boot(mine, segments, predecessor, deadline); !sent.ok())
    return explained(sent);
  auto reply = wire::receive_boot_reply(mine, deadline);
  if (!reply.ok()) return explained(reply.status());
  return reply;
}

}  // namespace psplus::worker
