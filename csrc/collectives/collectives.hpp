#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/status.hpp"
#include "collectives/group.hpp"
#include "collectives/reduction.hpp"

/// Collectives over raw bytes among the ranks of a Group.
///
/// Every rank makes the same call; where one may differ, its parameter says so. Buffers belong to
/// the caller, have any alignment that their elements need, and may be null when they are empty.
/// Reduced results have the same bits on all ranks and in every run. A call returns once this
/// rank's buffers may be used again; other ranks may still be on their way.
///
/// Errors: kTimeout, kPeerLost, kLayoutMismatch (ranks called different things), kClosed; the group
/// is aborted then and output buffers hold anything. Misuse throws std::invalid_argument before
/// anything has happened.
namespace psplus::collectives {

/// How elements are reduced.
struct ReduceSpec {
  Element element;
  Reduction reduction;
  double factor = 1;  ///< multiplies this rank's contribution under premul_sum
};

/// `in` and `out` may be the same.
Status all_reduce(Group& group, const void* in, void* out, std::size_t elements,
                  const ReduceSpec& spec, Deadline deadline);

/// Only the root's `out` is written; it may be `in`.
Status reduce(Group& group, Rank root, const void* in, void* out, std::size_t elements,
              const ReduceSpec& spec, Deadline deadline);

/// Rank r receives the reduction of everybody's `ins[r]`, `elements[r]` elements.
Status reduce_scatter(Group& group, std::span<const void* const> ins,
                      std::span<const std::size_t> elements, void* out, const ReduceSpec& spec,
                      Deadline deadline);

Status broadcast(Group& group, Rank root, void* data, std::size_t bytes, Deadline deadline);

/// Each rank's `in`, `bytes[rank]` bytes, goes to everybody's `outs[rank]`.
Status all_gather(Group& group, const void* in, std::span<void* const> outs,
                  std::span<const std::size_t> bytes, Deadline deadline);

/// This rank's `ins[r]` goes to rank r; `outs[r]` comes from rank r. Sizes differ as they like, as
/// long as both ends agree about each.
Status all_to_all(Group& group, std::span<const void* const> ins,
                  std::span<const std::size_t> in_bytes, std::span<void* const> outs,
                  std::span<const std::size_t> out_bytes, Deadline deadline);

/// Everybody's `in` goes to the root's `outs[rank]`; `outs` may be empty elsewhere.
Status gather(Group& group, Rank root, const void* in, std::span<void* const> outs,
              std::size_t bytes, Deadline deadline);

/// The root's `ins[r]` goes to the `out` of rank r; `ins` may be empty elsewhere.
Status scatter(Group& group, Rank root, std::span<const void* const> ins, void* out,
               std::size_t bytes, Deadline deadline);

/// Returns when all ranks have called it.
Status barrier(Group& group, Deadline deadline);

/// A barrier for finding out who is missing: rank 0 learns which ranks have not come by the
/// deadline, and lets nobody go then. Beside the other collectives, whose order it does not depend
/// on; it aborts nothing. `wait_all` looks for all missing ranks, else for the first.
/// @return on rank 0 the missing ranks; elsewhere rank 0 when it did not answer.
std::vector<Rank> monitored_barrier(Group& group, bool wait_all, Deadline deadline);

}  // namespace psplus::collectives
