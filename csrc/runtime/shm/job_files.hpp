#pragma once

#include <string>

#include "base/fd.hpp"
#include "base/status.hpp"

/// The files of a job's directory on one host.
namespace psplus::shm {

[[nodiscard]] inline std::string socket_path(const std::string& job_dir) {
  return job_dir + "/server.sock";
}
[[nodiscard]] inline std::string log_path(const std::string& job_dir) {
  return job_dir + "/server.log";
}

/// The last lines of the server's log, for a message that would else name a file that may soon be
/// gone; empty when there are none.
[[nodiscard]] std::string last_words(const std::string& job_dir);

/// Makes the directory again if the last server of the job has just removed it.
Status make_job_directory(const std::string& job_dir);

/// Removes a job that ended in peace: its files and its directory. The caller holds the server
/// lock.
void remove_job(const std::string& job_dir) noexcept;

/// The lock that only a job's server holds; the kernel lets go of it when the server dies, however.
/// kBusy when another server has it.
Result<UniqueFd> take_server_lock(const std::string& job_dir);

/// Locks a control segment for one server, on a description of its own, so that a descriptor that
/// was passed around does not share the lock. Waits until `deadline` for a predecessor to let go.
Result<UniqueFd> lock_control(const UniqueFd& control, Deadline deadline);

}  // namespace psplus::shm
