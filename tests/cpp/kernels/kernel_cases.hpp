#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/kernels.hpp"

namespace psplus::kernels::testing {

template <class S>
using BitsOf = std::conditional_t<sizeof(S) == 8, std::uint64_t,
                                  std::conditional_t<sizeof(S) == 4, std::uint32_t, std::uint16_t>>;

/// The instruction sets this machine runs, the reference included.
inline std::vector<Isa> supported_isas() {
  std::vector<Isa> found;
  for (const Isa isa : {Isa::scalar, Isa::portable, Isa::avx2, Isa::avx512}) {
    if (supported(isa)) found.push_back(isa);
  }
  return found;
}

/// 0, 1 and the neighbours of one vector (2 to 32 lanes), of four and eight vectors, of a chunk.
inline const std::vector<std::size_t> kSizes = {0,   1,   2,   3,   4,   5,   7,     8,     9,
                                                15,  16,  17,  31,  32,  33,  63,    64,    65,
                                                127, 128, 129, 159, 255, 257, 16383, 16384, 16385};

inline const std::vector<std::size_t> kOffsets = {0, 1, 3};

/// Fills with values of many magnitudes; `special` adds zeros of both signs, subnormals, the
/// largest numbers, infinities and NaN, about one in eight.
template <class S>
void fill_floats(std::span<S> out, std::uint32_t seed, bool special) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<S> mantissa(S(-2), S(2));
  std::uniform_int_distribution<int> exponent(-12, 12);
  using Limits = std::numeric_limits<S>;
  const S kinds[] = {S(0),
                     -S(0),
                     Limits::denorm_min(),
                     -Limits::min() / 2,
                     Limits::max(),
                     Limits::lowest(),
                     Limits::infinity(),
                     -Limits::infinity(),
                     Limits::quiet_NaN(),
                     S(65520),
                     S(65519.996),
                     S(6.1e-5)};
  for (S& value : out) {
    value = std::ldexp(mantissa(random), exponent(random));
    const auto dice = random() % (8 * std::size(kinds));
    if (special && dice < std::size(kinds)) value = kinds[dice];
  }
}

/// The value of 16-bit float bits, from the definition: (-1)^s * 2^(e - bias) * 1.m, or 0.m.
inline double value_of_bits(std::uint16_t bits, int mantissa_bits, int bias) {
  const int exponent_bits = 15 - mantissa_bits;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  double magnitude = 0;
  if (exponent == (1 << exponent_bits) - 1) {
    magnitude = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    magnitude = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

/// The same for a dtype of 16 bits.
inline double value_of_bits(std::uint16_t bits, DType dtype) {
  return dtype == DType::bfloat16 ? value_of_bits(bits, 7, 127) : value_of_bits(bits, 10, 15);
}

/// Equal bits, or NaN on both sides: which NaN arithmetic makes is the hardware's choice.
template <class S>
bool same_result(S a, S b) {
  return std::bit_cast<BitsOf<S>>(a) == std::bit_cast<BitsOf<S>>(b) ||
         (std::isnan(a) && std::isnan(b));
}

}  // namespace psplus::kernels::testing
