#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "c10d/torch_compat.hpp"
#include "collectives/group.hpp"

namespace psplus::pg {

/// Waits for a key of the store until the deadline, and throws as the store does.
[[nodiscard]] std::string read_key(c10d::Store& store, const std::string& key, Deadline deadline);
void write_key(c10d::Store& store, const std::string& key, const std::string& value);

/// Finds out, through the store of a new group, whether all its ranks share a host, and joins them
/// in one piece of memory then.
///
/// Rank 0 makes the memory and publishes where it can be opened (/proc/<pid>/fd/<n>) and a nonce
/// that lies in it. Whoever has the same `host_id`, can open it and reads the nonce shares the
/// host; nothing is taken from LOCAL_WORLD_SIZE or addresses, which containers and launchers set as
/// they like. @return null when some rank is elsewhere, the same answer on all ranks.
/// `names`, if any, are what the group's messages call its ranks.
/// Errors: as the store throws; kTimeout naming a rank; kNoSpace on all ranks alike.
[[nodiscard]] Result<std::unique_ptr<collectives::Group>> join_host(c10d::Store& store, int rank,
                                                                    int size,
                                                                    const std::string& host_id,
                                                                    Deadline deadline,
                                                                    std::vector<Rank> names = {});

}  // namespace psplus::pg
