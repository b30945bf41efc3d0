#pragma once

#include <string>

namespace psplus {

/// This machine's name, as messages give it to a user; "?" if it has none.
[[nodiscard]] std::string host_name();

}  // namespace psplus
