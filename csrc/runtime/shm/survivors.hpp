#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.hpp"

/// Who could still hand a dead server's segments to a successor. A server lists its workers in a
/// file of the job; a new server that was given no segments asks that file before it begins afresh,
/// because it would otherwise throw away what a survivor is about to bring.
namespace psplus::shm {

/// Writes the list whole or not at all.
Status write_workers(const std::string& job_dir, const std::vector<std::uint32_t>& processes);

/// Listed processes that still live (same process id, same start time).
[[nodiscard]] std::vector<std::uint32_t> living_workers(const std::string& job_dir);

}  // namespace psplus::shm
