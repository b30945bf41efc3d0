#include "collectives/group_memory.hpp"

#include "base/format.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>

namespace psplus::collectives {
namespace {

constexpr std::uint64_t kMagic = 0x3170'7573'706c'7573;  // changes with the layout
constexpr std::size_t kSlots = 4;
constexpr std::size_t kMaxRanks = 512;  // more would leave no room in a piece of a slot

// Large enough to hide the hand-over, small enough for the second-level cache.
constexpr std::size_t kMostSlotBytes = std::size_t{256} << 10;
constexpr std::size_t kLeastSlotBytes = std::size_t{64} << 10;
constexpr std::size_t kAllRanksSlotBytes = std::size_t{1} << 20;

constexpr std::size_t kMostRingBytes = std::size_t{512} << 10;
constexpr std::size_t kLeastRingBytes = std::size_t{4} << 10;
constexpr std::size_t kAllRingsBytes = std::size_t{4} << 20;

std::size_t slot_bytes_for(std::size_t size) {
  return std::clamp(std::bit_floor(kAllRanksSlotBytes / size), kLeastSlotBytes, kMostSlotBytes);
}

std::size_t ring_bytes_for(std::size_t size) {
  const std::size_t pairs = std::max<std::size_t>(1, size * (size - 1));
  return std::clamp(std::bit_floor(kAllRingsBytes / pairs), kLeastRingBytes, kMostRingBytes);
}

std::size_t slots_offset(std::size_t size) {
  return sizeof(GroupHeader) + size * sizeof(RankWords) + size * size * sizeof(RingWords);
}

}  // namespace

std::size_t GroupMemory::bytes_for(std::size_t size) {
  if (size == 0 || size > kMaxRanks)
    throw std::invalid_argument(
        formatted("a group has 1 to {} ranks on a host, not {}", kMaxRanks, size));
  return slots_offset(size) + size * kSlots * (sizeof(SlotHeader) + slot_bytes_for(size)) +
         size * size * ring_bytes_for(size);
}

GroupMemory::GroupMemory(std::byte* base, std::size_t size, std::size_t slots,
                         std::size_t slot_bytes, std::size_t ring_bytes) noexcept
    : base_(base), size_(size), slots_(slots), slot_bytes_(slot_bytes), ring_bytes_(ring_bytes) {}

GroupMemory GroupMemory::format(std::span<std::byte> memory, std::size_t size, const Nonce& nonce) {
  if (memory.size() < bytes_for(size))
    throw std::invalid_argument(formatted("a group of {} ranks needs {} bytes, not {}", size,
                                          bytes_for(size), memory.size()));
  GroupMemory made{memory.data(), size, kSlots, slot_bytes_for(size), ring_bytes_for(size)};
  GroupHeader& header = made.header();
  header.size = static_cast<std::uint32_t>(size);
  header.slots = static_cast<std::uint32_t>(made.slots_);
  header.slot_bytes = made.slot_bytes_;
  header.ring_bytes = made.ring_bytes_;
  header.nonce = nonce;
  header.magic = kMagic;
  return made;
}

Result<GroupMemory> GroupMemory::open(std::span<std::byte> memory, std::size_t size,
                                      const Nonce& nonce) {
  GroupMemory found{memory.data(), size, kSlots, slot_bytes_for(size), ring_bytes_for(size)};
  const bool same = memory.size() >= bytes_for(size) && found.header().magic == kMagic &&
                    found.header().nonce == nonce && found.header().size == size &&
                    found.header().slots == found.slots_ &&
                    found.header().slot_bytes == found.slot_bytes_ &&
                    found.header().ring_bytes == found.ring_bytes_;
  if (!same)
    return Status{StatusCode::kLayoutMismatch,
                  "the memory found is not this group's, or of another version of psplus"};
  return found;
}

GroupHeader& GroupMemory::header() const noexcept { return *reinterpret_cast<GroupHeader*>(base_); }

RankWords& GroupMemory::words(std::size_t rank) const noexcept {
  return reinterpret_cast<RankWords*>(base_ + sizeof(GroupHeader))[rank];
}

RingWords& GroupMemory::ring_words(std::size_t from, std::size_t to) const noexcept {
  std::byte* const first = base_ + sizeof(GroupHeader) + size_ * sizeof(RankWords);
  return reinterpret_cast<RingWords*>(first)[from * size_ + to];
}

SlotHeader& GroupMemory::slot_header(std::size_t rank, std::size_t slot) const noexcept {
  std::byte* const first = base_ + slots_offset(size_);
  return reinterpret_cast<SlotHeader*>(first)[rank * slots_ + slot];
}

std::byte* GroupMemory::slot(std::size_t rank, std::size_t slot) const noexcept {
  std::byte* const first = base_ + slots_offset(size_) + size_ * slots_ * sizeof(SlotHeader);
  return first + (rank * slots_ + slot) * slot_bytes_;
}

std::byte* GroupMemory::ring(std::size_t from, std::size_t to) const noexcept {
  return slot(size_, 0) + (from * size_ + to) * ring_bytes_;
}

}  // namespace psplus::collectives
