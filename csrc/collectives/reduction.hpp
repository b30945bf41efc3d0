#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

/// Element-wise reductions over the contributions of several ranks.
///
/// Contributions are taken in the order given, element by element, so that every rank that reduces
/// the same contributions gets the same bits. float16 and bfloat16 accumulate in float32 and are
/// rounded once. Integers wrap around, except that avg sums 8- to 32-bit ones in 64 bits and
/// truncates its quotient toward zero.
namespace psplus::collectives {

/// Element type of a tensor.
enum class Element : std::uint8_t {
  uint8,
  int8,
  uint16,
  int16,
  uint32,
  int32,
  uint64,
  int64,
  float16,
  bfloat16,
  float32,
  float64,
  boolean,
  complex64,
  complex128,
};

/// How contributions become one value. For booleans sum and max are "or", product and min "and".
enum class Reduction : std::uint8_t {
  sum,
  avg,  ///< the sum, divided once by the number of contributions
  product,
  min,  ///< NaN if a contribution is NaN
  max,  ///< NaN if a contribution is NaN
  band,
  bor,
  bxor,
  premul_sum,  ///< the sum of contributions multiplied by a factor each
};

/// What is to be reduced.
struct ReduceTerms {
  const void* const* sources;  ///< `count` pointers to as many elements as the destination has
  const double* factors;       ///< `count` numbers for premul_sum; not read otherwise
  std::size_t count;           ///< at least 1
};

/// Writes n reduced elements to `dst`, which is one of the sources or overlaps none.
using ReduceFunction = void (*)(void* dst, const ReduceTerms& terms, std::size_t n);

/// Bytes of one element. Throws std::invalid_argument when `element` is none of the enumerators.
[[nodiscard]] std::size_t element_bytes(Element element);

/// torch's word for the dtype; the reduction's name in upper case. Throw for stray values.
[[nodiscard]] std::string_view name(Element element);
[[nodiscard]] std::string_view name(Reduction reduction);

/// The fastest function of this machine for a reduction. Throws std::invalid_argument for one that
/// is not defined on such elements: min and max of complex numbers, bits of floating-point ones,
/// the average or a multiple of booleans.
[[nodiscard]] ReduceFunction reduce_function(Element element, Reduction reduction);

}  // namespace psplus::collectives
