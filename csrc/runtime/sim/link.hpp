#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "server/events.hpp"
#include "store/segment_header.hpp"
#include "wire/messages.hpp"

namespace psplus::sim {

class Worker;

/// A connection between a worker and one life of the server. Messages of one link keep their order;
/// those of different links overtake each other.
struct Link {
  server::ConnectionId id{};
  std::uint64_t server_life = 0;
  Worker* worker = nullptr;
  bool open_at_server = true;  ///< the server still reads from it
  bool open_at_worker = true;
  TimePoint last_to_server{};
  TimePoint last_to_worker{};
};
using LinkPtr = std::shared_ptr<Link>;

/// A message with the descriptors that travel with it: here, handles of the segments.
struct ToServerMail {
  std::vector<std::byte> bytes;
  std::vector<std::byte> layout;
  std::vector<std::byte> blob;
};
struct ToWorkerMail {
  std::vector<std::byte> bytes;
  std::vector<store::SegmentHandle> segments;
};

}  // namespace psplus::sim
