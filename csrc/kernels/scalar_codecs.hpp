#pragma once

// How a parameter's elements are read and written, one at a time: the definition that the vector
// forms are tested against. For the files of the scalar reference alone.

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/kernels_internal.hpp"

namespace psplus::kernels::scalar {

/// A parameter element that is the storage scalar itself, a half of a complex one included.
template <class S>
struct Plain {
  using Element = S;
  static S widen(S value) { return value; }
  static S narrow(S value) { return value; }
  static bool is_finite(S value) { return std::isfinite(value); }
};

/// bfloat16: the upper half of a float32.
struct BFloat16 {
  using Element = std::uint16_t;

  static float widen(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

  static std::uint16_t narrow(float value) {
    if (std::isnan(value)) return 0x7fc0;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    // Half of the last kept place, less one unless that place is odd: ties go to even. A carry out
    // of the mantissa is the right exponent, up to infinity.
    const std::uint32_t rounding = 0x7fff + ((bits >> 16) & 1);
    return static_cast<std::uint16_t>((bits + rounding) >> 16);
  }

  static bool is_finite(std::uint16_t bits) { return (bits & 0x7f80) != 0x7f80; }
};

/// float16: IEEE 754 binary16, 5 exponent bits (bias 15) and 10 mantissa bits.
struct Float16 {
  using Element = std::uint16_t;

  static float widen(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1f;
    const std::uint32_t mantissa = bits & 0x3ff;
    if (exponent == 0x1f) {
      const std::uint32_t quiet = mantissa != 0 ? 0x0040'0000 : 0;
      return std::bit_cast<float>(sign | 0x7f80'0000 | quiet | (mantissa << 13));
    }
    if (exponent == 0) {
      const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
      return sign != 0 ? -magnitude : magnitude;
    }
    return std::bit_cast<float>(sign | ((exponent + 127 - 15) << 23) | (mantissa << 13));
  }

  static std::uint16_t narrow(float value) {
    if (std::isnan(value)) return 0x7e00;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000;
    const std::uint32_t magnitude = bits & 0x7fff'ffff;
    return static_cast<std::uint16_t>(sign | narrow_magnitude(magnitude));
  }

  static bool is_finite(std::uint16_t bits) { return (bits & 0x7c00) != 0x7c00; }

 private:
  static std::uint32_t narrow_magnitude(std::uint32_t magnitude) {
    constexpr std::uint32_t kTwoTo16 = (127 + 16) << 23;
    constexpr std::uint32_t kSmallestNormal = (127 - 14) << 23;
    constexpr std::uint32_t kHalfOfSmallest = (127 - 25) << 23;
    if (magnitude >= kTwoTo16) return 0x7c00;
    if (magnitude >= kSmallestNormal) {
      // 65520 and above carry into the exponent of infinity.
      return round_shift(magnitude - ((127 - 15) << 23), 13);
    }
    if (magnitude < kHalfOfSmallest) return 0;
    // A subnormal float16 counts units of 2^-24: shift the significand down to that unit.
    const std::uint32_t exponent = magnitude >> 23;
    const std::uint32_t significand = (magnitude & 0x7f'ffff) | 0x80'0000;
    return round_shift(significand, 126 - exponent);
  }

  /// value / 2^shift, to nearest, ties to even.
  static std::uint32_t round_shift(std::uint32_t value, std::uint32_t shift) {
    const std::uint32_t odd = (value >> shift) & 1;
    return (value + (std::uint32_t{1} << (shift - 1)) - 1 + odd) >> shift;
  }
};

/// Calls `body` with the codec of `dtype`, which must be held as S.
template <class S, class Body>
auto with_codec(DType dtype, Body body) {
  constexpr bool kFloat = std::is_same_v<S, float>;
  if (storage_of(dtype) != (kFloat ? Storage::float32 : Storage::float64)) {
    throw_storage_mismatch(dtype, kFloat ? Storage::float32 : Storage::float64);
  }
  if constexpr (kFloat) {
    if (dtype == DType::bfloat16) return body(BFloat16{});
    if (dtype == DType::float16) return body(Float16{});
  }
  return body(Plain<S>{});
}

}  // namespace psplus::kernels::scalar
