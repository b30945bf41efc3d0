#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/exit_status.hpp"
#include "base/format.hpp"
#include "base/process_limits.hpp"
#include "base/unix_socket.hpp"
#include "runtime/shm/job_files.hpp"
#include "runtime/shm/server.hpp"
#include "runtime/shm/survivors.hpp"
#include "wire/boot.hpp"

namespace {

using psplus::Deadline;
using psplus::formatted;
using psplus::Result;
using psplus::Status;
using psplus::StatusCode;
using psplus::UniqueFd;
using psplus::UnixSocket;
using psplus::wire::BootReply;
using psplus::wire::BootResult;

constexpr auto kBootPatience = std::chrono::seconds{10};

/// Standard streams on the job's log, no other descriptors but the boot socket, a session of its
/// own: nothing of the worker that started it keeps it, and it keeps nothing of the worker.
void detach_from_starter(const std::string& job_dir) {
  ::syscall(SYS_close_range, psplus::wire::kBootFd + 1, ~0U, 0);
  const UniqueFd null{::open("/dev/null", O_RDWR | O_CLOEXEC)};
  UniqueFd log{::open(psplus::shm::log_path(job_dir).c_str(),
                      O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600)};
  const int output = log ? log.get() : null.get();
  ::dup2(null.get(), STDIN_FILENO);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(output, STDERR_FILENO);
  if (::chdir("/") != 0) std::perror("chdir");
  // Segments cost descriptors, and are files; a worker's terminal or launcher may set low soft
  // limits.
  for (const int resource : {RLIMIT_NOFILE, RLIMIT_FSIZE}) psplus::raise_to_hard_limit(resource);
  // Signals meant for the workers' terminal; the server ends when they do.
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a segment beyond RLIMIT_FSIZE is an error to tell
}

/// Lines go to standard error, which detach_from_starter() puts on the job's log.
void set_up_log() {
  spdlog::set_default_logger(spdlog::stderr_logger_st("psplus-server"));
  spdlog::set_pattern("%Y-%m-%d %T.%e %n[%P]: %v");
}

void log_line(const std::string& text) { spdlog::info("{}", text); }

/// Ends a predecessor and waits until it is gone, so that it writes no segment any more.
Status end_predecessor(const UniqueFd& process) {
  if (!process || psplus::has_exited(process)) return {};
  ::syscall(SYS_pidfd_send_signal, process.get(), SIGKILL, nullptr, 0);
  const Status gone = psplus::wait_readable(process, Deadline::after(std::chrono::seconds{5}),
                                            "the previous server to end");
  if (gone.ok()) return {};
  return {StatusCode::kPeerLost, "the previous server cannot be ended, so it is not replaced"};
}

Result<std::unique_ptr<psplus::shm::Server>> open_server(const std::string& job_dir,
                                                         std::vector<UniqueFd> segments) {
  try {
    return psplus::shm::Server::open(job_dir, std::move(segments), psplus::server::Config{},
                                     log_line);
  } catch (const std::exception& error) {
    return Status{StatusCode::kInternal, formatted("an exception: {}", error.what())};
  }
}

int serve(const std::string& job_dir, UnixSocket starter) {
  const auto reply = [&](BootResult result, const std::string& text) {
    const Status sent = psplus::wire::send_boot_reply(starter, BootReply{result, text},
                                                      Deadline::after(kBootPatience));
    if (!sent.ok()) log_line(sent.message());
  };
  const auto fail = [&](const Status& status) {
    log_line(status.message());
    reply(BootResult::kFailed, status.message());
    return EXIT_FAILURE;
  };
  auto boot = psplus::wire::receive_boot(starter, Deadline::after(kBootPatience));
  if (!boot.ok()) return fail(boot.status());
  if (Status status = end_predecessor(boot->predecessor); !status.ok()) return fail(status);
  const auto lock = psplus::shm::take_server_lock(job_dir);
  if (!lock.ok()) {
    if (lock.status().code() != StatusCode::kBusy) return fail(lock.status());
    reply(BootResult::kLostRace, lock.status().message());
    return EXIT_SUCCESS;
  }
  const bool takes_over = !boot->segments.empty();
  if (!takes_over && !psplus::shm::living_workers(job_dir).empty()) {
    reply(BootResult::kLostRace, "workers of a server that ended are about to replace it");
    return EXIT_SUCCESS;
  }
  auto server = open_server(job_dir, std::move(boot->segments));
  if (!server.ok()) {
    // What a predecessor's workers hold outlives this attempt; else there is nothing to keep.
    if (!takes_over) psplus::shm::remove_job(job_dir);
    return fail(server.status());
  }
  log_line(takes_over ? "took over from a server that ended" : "started");
  reply(BootResult::kReady, "");
  starter = UnixSocket{};
  const Status status = (*server)->run(std::stop_token{});
  log_line(status.ok() ? "all workers have gone, ending" : status.message());
  return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 || std::string_view{argv[1]} != "--job-dir") {
    std::cerr << formatted(
        "psplus-server serves the workers of one job on one host. Workers start it;\n"
        "usage: psplus-server --job-dir DIR, with a start message on descriptor {}\n",
        psplus::wire::kBootFd);
    return 2;
  }
  const std::string job_dir = argv[2];
  UnixSocket starter{UniqueFd{psplus::wire::kBootFd}};
  // Twice removed from the worker: it reaps the first process at once and never sees a zombie.
  const pid_t child = ::fork();
  if (child != 0) return child < 0 ? psplus::kServerNotForked : psplus::kServerStarted;
  ::setsid();
  try {
    set_up_log();
    if (Status made = psplus::shm::make_job_directory(job_dir); !made.ok())
      log_line(made.message());
    detach_from_starter(job_dir);
    return serve(job_dir, std::move(starter));
  } catch (const std::exception& error) {
    log_line(formatted("ended by an exception: {}", error.what()));
    return EXIT_FAILURE;
  }
}
