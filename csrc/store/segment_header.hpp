#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/ids.hpp"
#include "base/status.hpp"
#include "store/words.hpp"

namespace psplus::store {

enum class SegmentKind : std::uint32_t {
  kControl = 1,  ///< view, layout, step vectors, batch record
  kShard = 2,    ///< chunk table and unit pool of one extent
  kMailbox = 3,  ///< words and descriptors of one worker
  kSlots = 4,    ///< push slots of one worker and extent
  kPull = 5,     ///< pull buffers of one worker and extent
  kBlob = 6,     ///< opaque bytes of an extent: hyper-parameters and state of whose values it has
};

[[nodiscard]] std::string_view to_string(SegmentKind kind) noexcept;

/// What a segment is; the first bytes of each. Written once, before the segment is passed on.
struct SegmentHeader {
  static constexpr std::uint64_t kMagic = 0x7073'706c'7573'0001;

  std::uint64_t magic;
  std::uint64_t job;   ///< random number of the job: segments of two jobs never mix
  std::uint64_t size;  ///< bytes
  SegmentId id;
  SegmentKind kind;
  std::uint32_t owner;      ///< member (mailbox, slots, pull) or extent (shard, blob)
  std::uint32_t extent;     ///< extent of slots and pull buffers
  Incarnation incarnation;  ///< of the member that owns it
  std::uint16_t reserved0;
  std::uint32_t reserved1[5];
};
static_assert(sizeof(SegmentHeader) == 64);

/// Memory of a segment, however it came about: a mapped memfd, or plain memory in the simulator.
struct SegmentHandle {
  std::span<std::byte> bytes;
  std::shared_ptr<const void> owner;  ///< keeps `bytes` alive
  int fd = -1;                        ///< to pass on; -1 in the simulator

  [[nodiscard]] const SegmentHeader& header() const noexcept {
    return *reinterpret_cast<const SegmentHeader*>(bytes.data());
  }
};

/// Checks magic, size and kind before anything else of a received segment is believed.
Status check_header(const SegmentHandle& segment);

/// Where a server gets memory from.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;
  /// `size` zeroed bytes, page-aligned. Errors: kNoSpace.
  virtual Result<SegmentHandle> create(std::string_view label, std::size_t size) = 0;
};

}  // namespace psplus::store
