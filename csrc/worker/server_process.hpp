#pragma once

#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "base/status.hpp"
#include "wire/boot.hpp"

namespace psplus::worker {

/// Starts a `psplus-server` for `job_dir` and waits for its answer. With `segments` it takes over
/// from `predecessor` (a pidfd, or -1), which it ends first if need be. The server is no child of
/// this process afterwards.
/// @return what the server answered; kConfig when the executable cannot be run or is another
/// program, kNoSpace when a limit is in the way.
Result<wire::BootReply> start_server(const std::string& server_path, const std::string& job_dir,
                                     const std::vector<int>& segments, int predecessor,
                                     Deadline deadline);

}  // namespace psplus::worker
