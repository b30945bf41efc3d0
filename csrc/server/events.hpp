#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/ids.hpp"
#include "wire/messages.hpp"

/// What goes into the server's state machine and what comes out. A runtime turns sockets, death
/// notices and time into events and carries the effects out, in order.
namespace psplus::server {

/// One connection of a worker to this server; never used twice.
enum class ConnectionId : std::uint64_t {};

// Events.

/// A message arrived. `layout` and `blob` are the contents of an OpenStream's descriptors.
struct Received {
  ConnectionId from{};
  wire::ToServer message;
  std::vector<std::byte> layout;
  std::vector<std::byte> blob;
};
/// The process behind a connection ended, or closed it without a Detach.
struct Lost {
  ConnectionId connection{};
};
/// Somebody may have published, asked for a cut or arrived at a barrier.
struct Doorbell {};
/// Time passed; the runtime sends one every few hundred milliseconds.
struct Tick {};
using Event = std::variant<Received, Lost, Doorbell, Tick>;

// Effects.

/// Send `message` with the descriptors of `segments`. To a Welcome the runtime adds its own: pidfd
/// and doorbell.
struct Send {
  ConnectionId to{};
  wire::ToWorker message;
  std::vector<SegmentId> segments;
};
/// Notify the waiters of a worker's stream.
struct Wake {
  MemberId member{};
  StreamId stream{};
};
/// Drop a connection after what was sent to it before.
struct Disconnect {
  ConnectionId connection{};
};
struct Log {
  std::string text;
};
/// The last worker has gone: end.
struct Stop {};
using Effect = std::variant<Send, Wake, Disconnect, Log, Stop>;

}  // namespace psplus::server
