#pragma once

#include <cstdint>

#include "base/ids.hpp"
#include "store/control.hpp"

/// Who counts in a stream, and up to which step replies are released. Pure functions of the control
/// segment, so a successor computes what its predecessor did.
namespace psplus::server {

[[nodiscard]] store::MemberState member_state(const store::ControlBlock& control, MemberId member);
[[nodiscard]] store::StreamMemberState stream_state(const store::StreamEntry& stream,
                                                    MemberId member);

/// Whether `member` counts for N, gates and BSP steps: it is live, has not left the stream, and has
/// registered it or is a founder that surely will (wrappers match by order of construction).
[[nodiscard]] bool is_active(const store::ControlBlock& control, StreamId stream, MemberId member);
[[nodiscard]] std::uint32_t active_count(const store::ControlBlock& control, StreamId stream);

/// Whether `member` has come to the stream's next barrier. It cannot step before the others are
/// there too, so while it stands neither gates nor BSP steps wait for it.
[[nodiscard]] bool stands_at_barrier(const store::ControlBlock& control, StreamId stream,
                                     MemberId member);

/// What gates compare: steps applied and credit. Equal for all members when they leave a barrier,
/// so that who had fewer steps before it holds nobody up after it.
[[nodiscard]] Step gate_clock(const store::ControlBlock& control, StreamId stream, MemberId member);

/// Smallest gate clock among active members that can step; `otherwise` when there is none.
[[nodiscard]] Step least_gate_clock(const store::ControlBlock& control, StreamId stream,
                                    Step otherwise);
/// Largest gate clock among active members; 0 when there is none.
[[nodiscard]] Step greatest_gate_clock(const store::ControlBlock& control, StreamId stream);

/// Clock at which a joiner enters: the smallest among active members that can step, as the open
/// batch will leave them, because the joiner has no part in it; the largest when all stand at a
/// barrier, as none shall be ahead of it by more than gates allow; `otherwise` when nobody is
/// there.
[[nodiscard]] Step joining_clock(const store::ControlBlock& control, StreamId stream,
                                 Step otherwise);

/// Step up to which `member` has its replies. SSP holds the reply to a step above min(c) + s, so
/// nobody gets more than s + 1 pushes ahead of the slowest that can step (Ho et al. 2013, NIPS).
[[nodiscard]] Step released_step(const store::ControlBlock& control, StreamId stream,
                                 MemberId member);

}  // namespace psplus::server
