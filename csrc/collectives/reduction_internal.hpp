#pragma once

// Shared by the reduction sources alone.

#include "collectives/reduction.hpp"

namespace psplus::collectives {

/// The functions of one instruction set; nullptr where a reduction is not defined.
[[nodiscard]] ReduceFunction find_portable(Element element, Reduction reduction) noexcept;
#if defined(__x86_64__)
// To be called only where the processor has AVX2.
[[nodiscard]] ReduceFunction find_avx2(Element element, Reduction reduction) noexcept;
#endif

/// float16 and bfloat16 to float32 and back, by the kernels of this machine.
void widen_half(Element element, const void* src, float* dst, std::size_t n);
void narrow_half(Element element, const float* src, void* dst, std::size_t n);

}  // namespace psplus::collectives
