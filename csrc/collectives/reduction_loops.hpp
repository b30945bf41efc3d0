#pragma once

// The loops of the reductions, one body for all instruction sets: each set's source file includes
// this and nothing else of its own. The unnamed namespace gives every function internal linkage,
// so that the linker cannot hand a copy compiled for a wider instruction set to the other files;
// for the same reason no inline function of the standard library is called.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "collectives/reduction_internal.hpp"

namespace psplus::collectives {
namespace {

// Elements that are accumulated before they are stored: small enough for the first-level cache.
constexpr std::size_t kBlock = 1024;

/// Integers wrap around, which only unsigned arithmetic does by the rules.
template <class T>
struct Wrapping {
  using Type = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
};
template <class T>
requires std::is_floating_point_v<T>
struct Wrapping<T> {
  using Type = T;
};
template <class T>
using Wrap = typename Wrapping<T>::Type;

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(static_cast<Wrap<T>>(a) + static_cast<Wrap<T>>(b));
  }
};
struct Product {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(static_cast<Wrap<T>>(a) * static_cast<Wrap<T>>(b));
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return b < a || b != b ? b : a;
    return b < a ? b : a;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return b > a || b != b ? b : a;
    return b > a ? b : a;
  }
};
struct BitAnd {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct BitOr {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct BitXor {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

/// Elements that are accumulated as they are or, for averages of small integers, in a wider type.
template <class T, class Accumulator>
struct Plain {
  using Acc = Accumulator;
  static constexpr std::size_t kBytes = sizeof(T);
  static void load(Acc* __restrict__ acc, const void* source, std::size_t n) {
    const T* __restrict__ src = static_cast<const T*>(source);
    for (std::size_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(src[i]);
  }
  template <class Op>
  static void combine(Acc* __restrict__ acc, const void* source, std::size_t n) {
    const T* __restrict__ src = static_cast<const T*>(source);
    for (std::size_t i = 0; i < n; ++i) acc[i] = Op::apply(acc[i], static_cast<Acc>(src[i]));
  }
  /// The first two contributions at once: one pass less.
  template <class Op>
  static void combine_first(Acc* __restrict__ acc, const void* first, const void* second,
                            std::size_t n) {
    const T* __restrict__ a = static_cast<const T*>(first);
    const T* __restrict__ b = static_cast<const T*>(second);
    for (std::size_t i = 0; i < n; ++i)
      acc[i] = Op::apply(static_cast<Acc>(a[i]), static_cast<Acc>(b[i]));
  }
  static void combine_scaled(Acc* __restrict__ acc, const void* source, Acc factor, std::size_t n) {
    const T* __restrict__ src = static_cast<const T*>(source);
    for (std::size_t i = 0; i < n; ++i)
      acc[i] = Sum::apply(acc[i], Product::apply(factor, static_cast<Acc>(src[i])));
  }
  static void store(void* destination, const Acc* __restrict__ acc, std::size_t n) {
    T* __restrict__ dst = static_cast<T*>(destination);
    for (std::size_t i = 0; i < n; ++i) dst[i] = static_cast<T>(acc[i]);
  }
};

/// 16-bit floats, accumulated in float32.
template <Element element>
struct Half {
  using Acc = float;
  static constexpr std::size_t kBytes = 2;
  static void load(float* acc, const void* source, std::size_t n) {
    widen_half(element, source, acc, n);
  }
  template <class Op>
  static void combine(float* __restrict__ acc, const void* source, std::size_t n) {
    alignas(64) float wide[kBlock];
    widen_half(element, source, wide, n);
    for (std::size_t i = 0; i < n; ++i) acc[i] = Op::apply(acc[i], wide[i]);
  }
  template <class Op>
  static void combine_first(float* __restrict__ acc, const void* first, const void* second,
                            std::size_t n) {
    load(acc, first, n);
    combine<Op>(acc, second, n);
  }
  static void combine_scaled(float* __restrict__ acc, const void* source, float factor,
                             std::size_t n) {
    alignas(64) float wide[kBlock];
    widen_half(element, source, wide, n);
    for (std::size_t i = 0; i < n; ++i) acc[i] += factor * wide[i];
  }
  static void store(void* destination, const float* acc, std::size_t n) {
    narrow_half(element, acc, destination, n);
  }
};

/// Complex numbers under multiplication: pairs of scalars. Their sums are sums of scalars.
template <class Scalar>
void complex_product(void* dst, const ReduceTerms& terms, std::size_t n) {
  auto* out = static_cast<Scalar*>(dst);
  for (std::size_t i = 0; i < n; ++i) {
    const auto* first = static_cast<const Scalar*>(terms.sources[0]) + 2 * i;
    Scalar re = first[0];
    Scalar im = first[1];
    for (std::size_t r = 1; r < terms.count; ++r) {
      const auto* next = static_cast<const Scalar*>(terms.sources[r]) + 2 * i;
      const Scalar re_before = re;
      re = re_before * next[0] - im * next[1];
      im = re_before * next[1] + im * next[0];
    }
    out[2 * i] = re;
    out[2 * i + 1] = im;
  }
}

/// Calls step(offset, elements) for blocks of at most kBlock elements.
template <class Step>
void blocks(std::size_t n, Step step) {
  for (std::size_t at = 0; at < n; at += kBlock) step(at, n - at < kBlock ? n - at : kBlock);
}

template <std::size_t bytes>
const void* at_element(const void* source, std::size_t index) {
  return static_cast<const std::byte*>(source) + index * bytes;
}

/// acc = op over `count` scalars of all terms, from scalar `at` on, in the order of the terms.
template <class Format, class Op>
void accumulate(typename Format::Acc* acc, const ReduceTerms& terms, std::size_t at,
                std::size_t count) {
  constexpr std::size_t kBytes = Format::kBytes;
  const void* const first = at_element<kBytes>(terms.sources[0], at);
  if (terms.count == 1) return Format::load(acc, first, count);
  Format::template combine_first<Op>(acc, first, at_element<kBytes>(terms.sources[1], at), count);
  for (std::size_t r = 2; r < terms.count; ++r)
    Format::template combine<Op>(acc, at_element<kBytes>(terms.sources[r], at), count);
}

/// dst = op over all terms. `kScalars` scalars make one element.
template <class Format, class Op, std::size_t kScalars>
void reduce(void* dst, const ReduceTerms& terms, std::size_t n) {
  constexpr std::size_t kBytes = Format::kBytes;
  blocks(n * kScalars, [&](std::size_t at, std::size_t count) {
    alignas(64) typename Format::Acc acc[kBlock];
    accumulate<Format, Op>(acc, terms, at, count);
    Format::store(static_cast<std::byte*>(dst) + at * kBytes, acc, count);
  });
}

template <class Format, std::size_t kScalars>
void average(void* dst, const ReduceTerms& terms, std::size_t n) {
  using Acc = typename Format::Acc;
  constexpr std::size_t kBytes = Format::kBytes;
  const Acc divisor = static_cast<Acc>(terms.count);
  blocks(n * kScalars, [&](std::size_t at, std::size_t count) {
    alignas(64) Acc acc[kBlock];
    accumulate<Format, Sum>(acc, terms, at, count);
    for (std::size_t i = 0; i < count; ++i) acc[i] = static_cast<Acc>(acc[i] / divisor);
    Format::store(static_cast<std::byte*>(dst) + at * kBytes, acc, count);
  });
}

template <class Format, std::size_t kScalars>
void scaled_sum(void* dst, const ReduceTerms& terms, std::size_t n) {
  using Acc = typename Format::Acc;
  constexpr std::size_t kBytes = Format::kBytes;
  blocks(n * kScalars, [&](std::size_t at, std::size_t count) {
    alignas(64) Acc acc[kBlock];
    for (std::size_t i = 0; i < count; ++i) acc[i] = Acc{};
    for (std::size_t r = 0; r < terms.count; ++r)
      Format::combine_scaled(acc, at_element<kBytes>(terms.sources[r], at),
                             static_cast<Acc>(terms.factors[r]), count);
    Format::store(static_cast<std::byte*>(dst) + at * kBytes, acc, count);
  });
}

/// Functions of a format whose elements have an order.
template <class Format, class Average = Format>
ReduceFunction ordered(Reduction reduction) noexcept {
  switch (reduction) {
    case Reduction::sum:
      return reduce<Format, Sum, 1>;
    case Reduction::avg:
      return average<Average, 1>;
    case Reduction::product:
      return reduce<Format, Product, 1>;
    case Reduction::min:
      return reduce<Format, Min, 1>;
    case Reduction::max:
      return reduce<Format, Max, 1>;
    case Reduction::premul_sum:
      return scaled_sum<Format, 1>;
    case Reduction::band:
    case Reduction::bor:
    case Reduction::bxor:
      return nullptr;
  }
  return nullptr;
}

template <class T>
ReduceFunction integer(Reduction reduction) noexcept {
  using Wide = std::conditional_t<sizeof(T) == 8, T, std::int64_t>;
  switch (reduction) {
    case Reduction::band:
      return reduce<Plain<T, T>, BitAnd, 1>;
    case Reduction::bor:
      return reduce<Plain<T, T>, BitOr, 1>;
    case Reduction::bxor:
      return reduce<Plain<T, T>, BitXor, 1>;
    case Reduction::sum:
    case Reduction::avg:
    case Reduction::product:
    case Reduction::min:
    case Reduction::max:
    case Reduction::premul_sum:
      return ordered<Plain<T, T>, Plain<T, Wide>>(reduction);
  }
  return nullptr;
}

inline ReduceFunction boolean(Reduction reduction) noexcept {
  using Byte = Plain<std::uint8_t, std::uint8_t>;
  switch (reduction) {
    case Reduction::sum:
    case Reduction::max:
    case Reduction::bor:
      return reduce<Byte, BitOr, 1>;
    case Reduction::product:
    case Reduction::min:
    case Reduction::band:
      return reduce<Byte, BitAnd, 1>;
    case Reduction::bxor:
      return reduce<Byte, BitXor, 1>;
    case Reduction::avg:
    case Reduction::premul_sum:
      return nullptr;
  }
  return nullptr;
}

template <class Scalar>
ReduceFunction complex(Reduction reduction) noexcept {
  switch (reduction) {
    case Reduction::sum:
      return reduce<Plain<Scalar, Scalar>, Sum, 2>;
    case Reduction::avg:
      return average<Plain<Scalar, Scalar>, 2>;
    case Reduction::premul_sum:
      return scaled_sum<Plain<Scalar, Scalar>, 2>;
    case Reduction::product:
      return complex_product<Scalar>;
    case Reduction::min:
    case Reduction::max:
    case Reduction::band:
    case Reduction::bor:
    case Reduction::bxor:
      return nullptr;
  }
  return nullptr;
}

inline ReduceFunction find(Element element, Reduction reduction) noexcept {
  switch (element) {
    case Element::uint8:
      return integer<std::uint8_t>(reduction);
    case Element::int8:
      return integer<std::int8_t>(reduction);
    case Element::uint16:
      return integer<std::uint16_t>(reduction);
    case Element::int16:
      return integer<std::int16_t>(reduction);
    case Element::uint32:
      return integer<std::uint32_t>(reduction);
    case Element::int32:
      return integer<std::int32_t>(reduction);
    case Element::uint64:
      return integer<std::uint64_t>(reduction);
    case Element::int64:
      return integer<std::int64_t>(reduction);
    case Element::float16:
      return ordered<Half<Element::float16>>(reduction);
    case Element::bfloat16:
      return ordered<Half<Element::bfloat16>>(reduction);
    case Element::float32:
      return ordered<Plain<float, float>>(reduction);
    case Element::float64:
      return ordered<Plain<double, double>>(reduction);
    case Element::boolean:
      return boolean(reduction);
    case Element::complex64:
      return complex<float>(reduction);
    case Element::complex128:
      return complex<double>(reduction);
  }
  return nullptr;
}

}  // namespace
}  // namespace psplus::collectives
