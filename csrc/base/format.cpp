#define FMT_HEADER_ONLY
#include "base/format.hpp"

#include <fmt/format.h>

namespace psplus {

std::string vformatted(fmt::string_view format, fmt::format_args arguments) {
  return fmt::vformat(format, arguments);
}

}  // namespace psplus
