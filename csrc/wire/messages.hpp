#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/ids.hpp"
#include "base/status.hpp"
#include "store/control.hpp"
#include "store/segment_header.hpp"

/// What a worker and its server say to each other over the job's Unix socket: membership, layout
/// and descriptors. Pushes and pulls never pass here.
namespace psplus::wire {

inline constexpr std::uint32_t kProtocolVersion = 3;

// Worker to server.

/// Descriptors: [0] the worker's own pidfd.
struct Attach {
  std::uint32_t protocol = kProtocolVersion;
  Rank rank{};
  std::uint32_t world_size = 1;
  std::uint32_t process = 0;
};
/// After a take-over, by a worker that was attached before. Descriptors: [0] the worker's own
/// pidfd.
struct Resume {
  std::uint32_t protocol = kProtocolVersion;
  std::uint64_t job = 0;
  MemberId member{};
  Incarnation incarnation{};
};
/// Registers an extent of a stream, the first of which registers the stream. Descriptors: [0] a
/// sealed memfd with the layout, [1] one with the blob when `has_blob`.
struct OpenStream {
  StreamId stream{};
  StreamExtent extent{};
  store::Mode mode{};
  store::PullMode pull{};
  store::Rule rule{};  ///< its kind is the stream's, its planes are the extent's
  std::uint64_t bound = store::kNoBound;
  std::uint64_t layout_bytes = 0;
  std::uint64_t blob_bytes = 0;
  bool has_blob = false;
};
/// The worker holds this segment, and all that were offered before it on this connection.
struct Holding {
  SegmentId segment{};
};
/// Asks for pull buffers of a stream; answered by `PullReady`.
struct NeedPull {
  StreamId stream{};
};
struct CloseStream {
  StreamId stream{};
};
struct Detach {};

// Server to worker.

/// Descriptors: [0] control segment, [1] the server's pidfd, [2] its doorbell (an eventfd).
struct Welcome {
  std::uint64_t job = 0;
  MemberId member{};
  Incarnation incarnation{};
  Epoch epoch{};
};
/// Descriptors: [0] the segment.
struct Offer {
  SegmentId segment{};
};
/// A dead or closed worker's segment is no longer needed by anybody.
struct Drop {
  SegmentId segment{};
};
/// Every live worker holds what the attached one needs. All segments of the job have been offered
/// since the Welcome: what the worker holds besides them was left by a server that died, and goes.
struct Attached {};
/// The extent is open and the worker may push it. When `provides`, it must set the initial values;
/// when `rejoined`, there are values. `blob_segment` is 0 for none.
struct StreamReady {
  StreamId stream{};
  StreamExtent extent{};
  bool provides = false;
  bool rejoined = false;
  Step clock{};
  std::uint64_t barriers = 0;
  SegmentId blob_segment{};
};
struct PullReady {
  StreamId stream{};
};
struct StreamClosed {
  StreamId stream{};
};
struct Detached {};
/// The request failed, or (fatal) the worker is expelled.
struct Refused {
  StatusCode code{};
  bool fatal = false;
  std::string text;
};

using ToServer = std::variant<Attach, Resume, OpenStream, Holding, NeedPull, CloseStream, Detach>;
using ToWorker = std::variant<Welcome, Offer, Drop, Attached, StreamReady, PullReady, StreamClosed,
                              Detached, Refused>;

[[nodiscard]] std::vector<std::byte> encode(const ToServer& message);
[[nodiscard]] std::vector<std::byte> encode(const ToWorker& message);
/// Errors: kInternal for unknown kinds, missing or left-over bytes and values out of range.
Result<ToServer> decode_to_server(std::span<const std::byte> bytes);
Result<ToWorker> decode_to_worker(std::span<const std::byte> bytes);

}  // namespace psplus::wire
