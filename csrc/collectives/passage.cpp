#include "collectives/passage.hpp"

#include "base/format.hpp"

#include <algorithm>
#include <stdexcept>

namespace psplus::collectives {
namespace {

std::uint64_t pack(const Call& call) {
  return std::uint64_t{raw(call.root)} << 32 |
         std::uint64_t{static_cast<std::uint8_t>(call.reduction)} << 16 |
         std::uint64_t{static_cast<std::uint8_t>(call.element)} << 8 |
         static_cast<std::uint64_t>(call.collective);
}

std::string describe(std::uint64_t call, std::uint64_t bytes) {
  return formatted("{} ({}, {}, root {}, {} bytes)", name(static_cast<Collective>(call & 0xff)),
                   name(static_cast<Element>(call >> 8 & 0xff)),
                   name(static_cast<Reduction>(call >> 16 & 0xff)), call >> 32, bytes);
}

}  // namespace

std::string_view name(Collective collective) {
  switch (collective) {
    case Collective::all_reduce:
      return "all_reduce";
    case Collective::reduce:
      return "reduce";
    case Collective::broadcast:
      return "broadcast";
    case Collective::all_gather:
      return "all_gather";
    case Collective::reduce_scatter:
      return "reduce_scatter";
    case Collective::all_to_all:
      return "all_to_all";
    case Collective::gather:
      return "gather";
    case Collective::scatter:
      return "scatter";
    case Collective::barrier:
      return "barrier";
  }
  throw std::invalid_argument("name: not a Collective");
}

Status Passage::claim(std::uint64_t round) {
  // What was lost with an aborted group's last call may be found in the words of later ones.
  if (round == 0)
    if (Status status = group_.status(); !status.ok()) return status;
  const std::uint64_t absolute = base_ + round;
  const std::uint64_t slots = group_.memory().slots();
  if (absolute < slots) return {};
  const std::uint64_t needed = absolute - slots + 1;
  if (group_.released_by_all >= needed) return {};
  std::uint64_t least = ~std::uint64_t{0};
  for (std::size_t i = 0; i < peers(); ++i) {
    const auto& released = group_.memory().words(index(peer(i))).released;
    if (Status status = group_.await(peer(i), released, needed, name(call_.collective), deadline_);
        !status.ok())
      return status;
    // Acquires, as the count may have grown since: later claims rely on this look.
    least = std::min(least, released.load(std::memory_order_acquire));
  }
  group_.released_by_all = least;
  return {};
}

void Passage::publish(std::uint64_t round) noexcept {
  if (round == 0)
    group_.memory().slot_header(index(group_.rank()), slot_index(0)) =
        SlotHeader{pack(call_), call_.bytes, call_.factor, call_.rounds};
  group_.announce(group_.own().published, base_ + round + 1);
}

Status Passage::await(Rank peer, std::uint64_t round) {
  if (round == 0)
    if (Status status = group_.status(); !status.ok()) return status;
  const auto& published = group_.memory().words(index(peer)).published;
  Status status =
      group_.await(peer, published, base_ + round + 1, name(call_.collective), deadline_);
  if (!status.ok() || round != 0) return status;
  return check_call(peer);
}

Status Passage::check_call(Rank peer) {
  const SlotHeader& theirs = header(peer);
  const std::uint64_t ours = pack(call_);
  if (theirs.call == ours && theirs.bytes == call_.bytes) [[likely]]
    return {};
  return group_.give_up(
      StatusCode::kLayoutMismatch, peer,
      formatted("rank {} called {} while rank {} called {}; all ranks of a group must call the "
                "same collectives in the same order",
                group_.called(group_.rank()), describe(ours, call_.bytes), group_.called(peer),
                describe(theirs.call, theirs.bytes)));
}

Status Passage::await_all(std::uint64_t round) {
  for (std::size_t i = 0; i < peers(); ++i)
    if (Status status = await(peer(i), round); !status.ok()) return status;
  return {};
}

void Passage::publish_reduced(std::uint64_t round) noexcept {
  group_.announce(group_.own().reduced, base_ + round + 1);
}

Status Passage::await_all_reduced(std::uint64_t round) {
  for (std::size_t i = 0; i < peers(); ++i) {
    const auto& reduced = group_.memory().words(index(peer(i))).reduced;
    if (Status status =
            group_.await(peer(i), reduced, base_ + round + 1, name(call_.collective), deadline_);
        !status.ok())
      return status;
  }
  return {};
}

void Passage::release(std::uint64_t round) noexcept {
  group_.announce(group_.own().released, base_ + round + 1);
}

void Passage::finish(std::uint64_t rounds) noexcept {
  const std::uint64_t now = base_ + rounds;
  // Nobody waits for what this rank did not publish, but its words may not lag behind the count.
  group_.own().published.store(now, std::memory_order_release);
  group_.own().reduced.store(now, std::memory_order_release);
  group_.announce(group_.own().released, now);
  group_.rounds = now;
}

}  // namespace psplus::collectives
