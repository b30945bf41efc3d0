#include "base/memory_limits.hpp"

#include "base/format.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

namespace psplus {
namespace {

using Bytes = std::uint64_t;

struct Headroom {
  Bytes bytes;
  std::string limit;  // what sets it, for the message
};

std::optional<Bytes> read_number(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  Bytes value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc{} || end != word.data() + word.size()) return std::nullopt;  // "max"
  return value;
}

/// Page cache that the kernel would drop before it kills: it counts as usage but is free to take.
Bytes reclaimable(const std::string& stat_path) {
  std::ifstream file(stat_path);
  std::string key;
  Bytes value = 0;
  while (file >> key >> value)
    if (key == "inactive_file") return value;
  return 0;
}

std::optional<Headroom> machine_headroom(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string key;
  Bytes kibibytes = 0;
  std::string unit;
  while (file >> key >> kibibytes) {
    if (key == "MemAvailable:") return Headroom{kibibytes * 1024, "the machine's MemAvailable"};
    std::getline(file, unit);
  }
  return std::nullopt;
}

void take_smaller(std::optional<Headroom>& best, Headroom candidate) {
  if (!best || candidate.bytes < best->bytes) best = std::move(candidate);
}

/// Walks from the group at `path` up to `root`, as a limit of any ancestor holds.
void scan_groups(std::optional<Headroom>& best, const std::string& root, std::string path,
                 const char* limit_file, const char* usage_file) {
  for (;;) {
    const std::string group = root + path;
    const auto limit = read_number(group + "/" + limit_file);
    const auto usage = read_number(group + "/" + usage_file);
    if (limit && usage) {
      const Bytes used = *usage - std::min(*usage, reclaimable(group + "/memory.stat"));
      take_smaller(best, {*limit > used ? *limit - used : 0,
                          formatted("control group {}", path.empty() ? "/" : path)});
    }
    const auto parent = path.rfind('/');
    if (parent == std::string::npos) return;
    path.resize(parent);
  }
}

std::optional<Headroom> headroom(const std::string& root) {
  auto best = machine_headroom(root);
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;  // "hierarchy:controllers:path"
  while (std::getline(groups, line)) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers.empty())
      scan_groups(best, root + "/sys/fs/cgroup", path, "memory.max", "memory.current");
    else if (controllers.find("memory") != std::string::npos)
      scan_groups(best, root + "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                  "memory.usage_in_bytes");
  }
  return best;
}

}  // namespace

Status check_memory_available(std::string_view label, std::size_t size, const std::string& root) {
  const auto room = headroom(root);
  if (!room || size <= room->bytes) return {};
  return {StatusCode::kNoSpace,
          formatted("no memory for {}: {} bytes asked for, {} bytes left ({}); use a smaller model "
                    "or fewer workers on this host, or raise the limit",
                    label, size, room->bytes, room->limit)};
}

}  // namespace psplus
