// Compiled for AVX2.

#include "collectives/reduction_loops.hpp"

namespace psplus::collectives {

ReduceFunction find_avx2(Element element, Reduction reduction) noexcept {
  return find(element, reduction);
}

}  // namespace psplus::collectives
