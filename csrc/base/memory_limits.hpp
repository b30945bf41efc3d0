#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/status.hpp"

namespace psplus {

/// Whether `size` more bytes fit: MemAvailable of the machine and the headroom of each control
/// group (version 1 and 2) above this process. kNoSpace names `label`, the amount and the limit.
/// `root` goes before /proc and /sys, so that a test can describe a machine in a folder.
Status check_memory_available(std::string_view label, std::size_t size,
                              const std::string& root = "");

}  // namespace psplus
