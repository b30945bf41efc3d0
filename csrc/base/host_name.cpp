#include "base/host_name.hpp"

#include <climits>

#include <unistd.h>

namespace psplus {

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  return ::gethostname(name, sizeof name) == 0 && name[0] != '\0' ? name : "?";
}

}  // namespace psplus
