// Compiled for the architecture's baseline (SSE2, NEON).

#include "collectives/reduction_loops.hpp"

namespace psplus::collectives {

ReduceFunction find_portable(Element element, Reduction reduction) noexcept {
  return find(element, reduction);
}

}  // namespace psplus::collectives
