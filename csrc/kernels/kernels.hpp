#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "base/dtype.hpp"
#include "kernels/step.hpp"

/// Element-wise kernels of push and pull.
///
/// `n` counts storage scalars, 0 included: a complex64 span of n elements is 2n float scalars.
/// Pointers need the alignment of their scalar, no more; with n = 0 they may be null. Every
/// instruction set gives the bits of the scalar reference: each operation is rounded on its own
/// (never FMA), sums go in the order given. The sign and payload of a NaN that arithmetic makes in
/// float32 or float64 are the one thing left open, for IEEE 754 leaves them to the hardware; a NaN
/// narrowed to 16 bits is always 0x7fc0 (bfloat16) or 0x7e00 (float16).
///
/// Thread safety: the kernels keep no state. They read and write plainly, `w` apart: other memory
/// that another thread may be writing goes through relaxed_copy.hpp first.
/// Errors: a dtype that is not held as S (see storage_of) throws std::invalid_argument before
/// anything is written; nothing else throws.
namespace psplus::kernels {

/// Instruction sets, slowest first. `scalar` is the definition that the others are tested against;
/// `portable` needs nothing beyond the architecture's baseline (SSE2, NEON).
enum class Isa : std::uint8_t { scalar, portable, avx2, avx512 };

/// One push in an apply: `delta` points at the push's n scalars, `scale` is lambda / N.
template <class S>
struct PushTerm {
  const S* delta;
  S scale;
};

/// Kernels whose storage scalar is S, float or double.
template <class S>
struct StorageKernels {
  /// dst[i] = src[i], read as `dtype`; exact. A signalling float16 NaN comes out quiet. With
  /// `streams` past the caches, where `dst` is aligned for that: for what another core reads next.
  /// @return whether every src[i] is finite.
  bool (*widen)(DType dtype, const void* src, S* dst, std::size_t n, bool streams);

  /// out[i] = before[i] - after[i], `after` read as `dtype`. `out` may be `before`.
  /// @return whether every out[i] is finite.
  bool (*delta)(DType dtype, const S* before, const void* after, S* out, std::size_t n);

  /// dst[i] = src[i] - terms[0].scale * terms[0].delta[i] - terms[1].scale * ..., left to right, in
  /// one pass over memory; with `count` = 0 a copy. `dst` overlaps no input.
  void (*apply)(S* dst, const S* src, const PushTerm<S>* terms, std::size_t count,
                std::size_t n) noexcept;

  /// dst[i] = src[i] - scale * (deltas[0][i] + deltas[1][i] + ...), summed left to right; with
  /// `count` = 0 a copy. `dst` overlaps no input.
  void (*apply_mean)(S* dst, const S* src, const S* const* deltas, std::size_t count, S scale,
                     std::size_t n) noexcept;

  /// x[i] = w[i] - scale * delta[i], stored as `dtype`; a null `delta` means x[i] = w[i]. Others
  /// may be writing `w`, see StepRun::w.
  /// 16-bit dtypes round to nearest, ties to even; what is too large becomes infinite.
  /// `x` may be `w` when the dtype is S itself.
  void (*pull)(DType dtype, const S* w, const S* delta, S scale, void* x, std::size_t n);

  /// One step over n scalars of one parameter; see step.hpp. With n = 0 nothing.
  /// @return whether every update is finite.
  bool (*step)(DType dtype, const StepRule& rule, const StepRun<S>& run, std::size_t n);
};

/// All kernels for one instruction set.
struct KernelTable {
  Isa isa;
  StorageKernels<float> float32;
  StorageKernels<double> float64;

  /// Whether none of the n scalars is infinite or NaN.
  bool (*all_finite)(DType dtype, const void* src, std::size_t n);

  /// The kernels for storage scalar S.
  template <class S>
  [[nodiscard]] const StorageKernels<S>& of() const noexcept {
    static_assert(std::is_same_v<S, float> || std::is_same_v<S, double>);
    if constexpr (std::is_same_v<S, float>) {
      return float32;
    } else {
      return float64;
    }
  }
};

/// Lower-case name of an instruction set. Throws std::invalid_argument for a stray value.
[[nodiscard]] std::string_view name(Isa isa);

/// Whether this build has the instruction set and this machine (processor and system) runs it.
[[nodiscard]] bool supported(Isa isa) noexcept;

/// The fastest supported instruction set; looked up once.
[[nodiscard]] Isa best_isa() noexcept;

/// The kernels for `isa`. Throws std::invalid_argument when it is not supported here.
[[nodiscard]] const KernelTable& table(Isa isa);

/// The kernels for best_isa().
[[nodiscard]] const KernelTable& best() noexcept;

}  // namespace psplus::kernels
