#pragma once

// Shared by the kernel sources alone.

#include <cstddef>

#include "kernels/kernels.hpp"

namespace psplus::kernels {

/// Throws std::invalid_argument: `dtype` was given to a kernel that holds `storage`.
[[noreturn]] void throw_storage_mismatch(DType dtype, Storage storage);

/// The reference over [begin, end): the definition of every kernel, and the tail of the vector
/// ones. Meaning and errors as in kernels.hpp.
namespace scalar {

template <class S>
bool widen(DType dtype, const void* src, S* dst, std::size_t begin, std::size_t end);

template <class S>
[[nodiscard]] bool delta(DType dtype, const S* before, const void* after, S* out, std::size_t begin,
                         std::size_t end);

template <class S>
void apply(S* dst, const S* src, const PushTerm<S>* terms, std::size_t count, std::size_t begin,
           std::size_t end) noexcept;

template <class S>
void apply_mean(S* dst, const S* src, const S* const* deltas, std::size_t count, S scale,
                std::size_t begin, std::size_t end) noexcept;

template <class S>
void pull(DType dtype, const S* w, const S* delta, S scale, void* x, std::size_t begin,
          std::size_t end);

template <class S>
[[nodiscard]] bool step(DType dtype, const StepRule& rule, const StepRun<S>& run, std::size_t begin,
                        std::size_t end);

[[nodiscard]] bool all_finite(DType dtype, const void* src, std::size_t begin, std::size_t end);

}  // namespace scalar

[[nodiscard]] const KernelTable& scalar_table() noexcept;
[[nodiscard]] const KernelTable& portable_table() noexcept;
#if defined(__x86_64__)
// To be called only where supported() says so: their code may use the instructions at once.
[[nodiscard]] const KernelTable& avx2_table() noexcept;
[[nodiscard]] const KernelTable& avx512_table() noexcept;
#endif

}  // namespace psplus::kernels
