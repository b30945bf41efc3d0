#pragma once

#include "c10d/torch_compat.hpp"
#include "collectives/collectives.hpp"

namespace psplus::pg {

/// The element type of our reductions for a tensor's dtype. Throws ValueError for others.
[[nodiscard]] collectives::Element to_element(at::ScalarType type);

/// The reduction behind a torch ReduceOp for tensors of `type`, with the factor of PREMUL_SUM.
/// Throws ValueError when it is not defined for such elements.
[[nodiscard]] collectives::ReduceSpec to_spec(const c10d::ReduceOp& op, at::ScalarType type);

}  // namespace psplus::pg
