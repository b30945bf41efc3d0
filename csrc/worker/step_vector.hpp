#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.hpp"
#include "store/control.hpp"
#include "store/mailbox.hpp"

namespace psplus::worker {

/// Counters of a stream at one moment, by member place.
struct StepVector {
  std::vector<std::uint64_t> clock;   ///< gate counters
  std::vector<std::uint64_t> pushes;  ///< steps ever applied for the member's rank

  /// Steps applied by others than `self`.
  [[nodiscard]] std::uint64_t foreign(MemberId self) const noexcept;
};

/// Loads the vector that a mapped snapshot begins with. Counters are stored after the chunks of
/// their batch, so a snapshot that follows contains at least what the vector says.
[[nodiscard]] StepVector load_step_vector(const store::ControlBlock& control, StreamId stream);
/// The vector of a cut.
[[nodiscard]] StepVector load_step_vector(const store::PullHeader::Cut& cut);

}  // namespace psplus::worker
