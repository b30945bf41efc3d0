#include "runtime/shm/survivors.hpp"

#include "base/format.hpp"

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>

namespace psplus::shm {
namespace {

std::string file_of(const std::string& job_dir) { return job_dir + "/workers"; }

/// Clock ticks from boot to the start of a process: tells a process from a later one with its id.
std::optional<std::uint64_t> start_time(std::uint32_t process) {
  std::ifstream file(formatted("/proc/{}/stat", process));
  std::string text;
  // Up to a NUL, which it does not have. Unlike an iterator this does not throw when the process
  // ends between opening and reading.
  std::getline(file, text, '\0');
  const auto after_name = text.rfind(')');  // the name may hold anything, brackets too
  if (after_name == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(after_name + 1));
  std::string state;
  fields >> state;
  if (state == "Z" || state == "X") return std::nullopt;
  std::string skipped;
  constexpr int kFieldsBetween = 18;  // from the state, field 3, to the start time, field 22
  for (int i = 0; i < kFieldsBetween; ++i) fields >> skipped;
  std::uint64_t ticks = 0;
  if (!(fields >> ticks)) return std::nullopt;
  return ticks;
}

}  // namespace

Status write_workers(const std::string& job_dir, const std::vector<std::uint32_t>& processes) {
  const std::string path = file_of(job_dir);
  const std::string temporary = path + ".new";
  {
    std::ofstream file(temporary, std::ios::trunc);
    for (const std::uint32_t process : processes)
      if (const auto ticks = start_time(process)) file << process << ' ' << *ticks << '\n';
    file.flush();
    if (!file) return Status::from_errno("write", temporary, errno);
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0)
    return Status::from_errno("rename", path, errno);
  return {};
}

std::vector<std::uint32_t> living_workers(const std::string& job_dir) {
  std::ifstream file(file_of(job_dir));
  std::vector<std::uint32_t> living;
  std::uint32_t process = 0;
  std::uint64_t ticks = 0;
  while (file >> process >> ticks)
    if (start_time(process) == ticks) living.push_back(process);
  return living;
}

}  // namespace psplus::shm
