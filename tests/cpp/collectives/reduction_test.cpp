#include "collectives/reduction.hpp"

#include <bit>
#include <cmath>
#include <complex>
#include <limits>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include "collectives/reduction_internal.hpp"

namespace psplus::collectives {
namespace {

// Around a vector and around the block of the loops.
const std::size_t kSizes[] = {0, 1, 7, 8, 9, 33, 1023, 1024, 1025, 5000};

using Find = ReduceFunction (*)(Element, Reduction) noexcept;

/// Reduces `ranks` contributions by every instruction set and compares with `expected(i)`.
template <class T, class Value, class Expected>
void check(Element element, Reduction reduction, std::size_t ranks, Value value, Expected expected,
           std::vector<double> factors = {}) {
  std::vector<std::pair<const char*, ReduceFunction>> functions{
      {"best", reduce_function(element, reduction)},
      {"portable", find_portable(element, reduction)}};
  for (const auto& [which, function] : functions) {
    for (const std::size_t n : kSizes) {
      std::vector<std::vector<T>> inputs(ranks);
      std::vector<const void*> sources;
      for (std::size_t r = 0; r < ranks; ++r) {
        for (std::size_t i = 0; i < n; ++i) inputs[r].push_back(value(r, i));
        sources.push_back(inputs[r].data());
      }
      std::vector<T> out(n + 1, value(99, 99));
      const T guard = out[n];
      function(out.data(), {sources.data(), factors.data(), ranks}, n);
      for (std::size_t i = 0; i < n; ++i)
        ASSERT_EQ(out[i], expected(i)) << which << " " << name(element) << " " << name(reduction)
                                       << " of " << n << ", element " << i;
      ASSERT_EQ(out[n], guard) << "wrote behind the end";
    }
  }
}

template <class T>
void check_integers(Element element) {
  constexpr std::size_t kRanks = 3;
  using U = std::make_unsigned_t<T>;
  const auto value = [](std::size_t r, std::size_t i) {
    return static_cast<T>(r * 41 + i * 7 + 100);  // wraps around in 8 bits
  };
  const auto fold = [&](auto op) {
    return [=](std::size_t i) {
      T result = value(0, i);
      for (std::size_t r = 1; r < kRanks; ++r) result = op(result, value(r, i));
      return result;
    };
  };
  const auto u = [](T a) { return static_cast<std::uint64_t>(static_cast<U>(a)); };
  check<T>(element, Reduction::sum, kRanks, value,
           fold([=](T a, T b) { return static_cast<T>(u(a) + u(b)); }));
  check<T>(element, Reduction::product, kRanks, value,
           fold([=](T a, T b) { return static_cast<T>(u(a) * u(b)); }));
  check<T>(element, Reduction::min, kRanks, value, fold([](T a, T b) { return b < a ? b : a; }));
  check<T>(element, Reduction::max, kRanks, value, fold([](T a, T b) { return b > a ? b : a; }));
  check<T>(element, Reduction::band, kRanks, value,
           fold([](T a, T b) { return static_cast<T>(a & b); }));
  check<T>(element, Reduction::bor, kRanks, value,
           fold([](T a, T b) { return static_cast<T>(a | b); }));
  check<T>(element, Reduction::bxor, kRanks, value,
           fold([](T a, T b) { return static_cast<T>(a ^ b); }));
  check<T>(element, Reduction::premul_sum, kRanks, value,
           [&](std::size_t i) {
             return static_cast<T>(2 * u(value(0, i)) + 3 * u(value(1, i)) + 5 * u(value(2, i)));
           },
           {2, 3, 5});
}

TEST(Reduction, Integers) {
  check_integers<std::uint8_t>(Element::uint8);
  check_integers<std::int8_t>(Element::int8);
  check_integers<std::uint16_t>(Element::uint16);
  check_integers<std::int16_t>(Element::int16);
  check_integers<std::uint32_t>(Element::uint32);
  check_integers<std::int32_t>(Element::int32);
  check_integers<std::uint64_t>(Element::uint64);
  check_integers<std::int64_t>(Element::int64);
}

TEST(Reduction, AnAverageOfIntegersTruncatesTowardZero) {
  check<std::int32_t>(
      Element::int32, Reduction::avg, 2, [](std::size_t r, std::size_t) { return r == 0 ? -3 : 0; },
      [](std::size_t) { return -1; });
  check<std::int8_t>(
      Element::int8, Reduction::avg, 3,  // 360 / 3: the sum does not fit into 8 bits
      [](std::size_t r, std::size_t) { return static_cast<std::int8_t>(r == 0 ? 127 : 116); },
      [](std::size_t) { return static_cast<std::int8_t>(119); });
  check<std::uint8_t>(
      Element::uint8, Reduction::avg, 2, [](std::size_t, std::size_t) { return std::uint8_t{255}; },
      [](std::size_t) { return std::uint8_t{255}; });
}

template <class T>
void check_floats(Element element) {
  const auto value = [](std::size_t r, std::size_t i) {
    return static_cast<T>(r * 131'072 + i) * static_cast<T>(0.37);
  };
  check<T>(element, Reduction::sum, 3, value,
           [&](std::size_t i) { return (value(0, i) + value(1, i)) + value(2, i); });
  check<T>(element, Reduction::avg, 3, value,
           [&](std::size_t i) { return ((value(0, i) + value(1, i)) + value(2, i)) / T{3}; });
  check<T>(element, Reduction::product, 3, value,
           [&](std::size_t i) { return (value(0, i) * value(1, i)) * value(2, i); });
  check<T>(element, Reduction::min, 3, value, [&](std::size_t i) { return value(0, i); });
  check<T>(element, Reduction::max, 3, value, [&](std::size_t i) { return value(2, i); });
  check<T>(element, Reduction::premul_sum, 2, value,
           [&](std::size_t i) { return T{0.5} * value(0, i) + T{0.25} * value(1, i); },
           {0.5, 0.25});
  check<T>(element, Reduction::sum, 1, value, [&](std::size_t i) { return value(0, i); });
}

TEST(Reduction, Floats) {
  check_floats<float>(Element::float32);
  check_floats<double>(Element::float64);
}

TEST(Reduction, MinAndMaxKeepNaN) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Reduction reduction : {Reduction::min, Reduction::max}) {
    const float a[] = {kNan, 1, 2};
    const float b[] = {1, kNan, 3};
    const void* sources[] = {a, b};
    float out[3];
    reduce_function(Element::float32, reduction)(out, {sources, nullptr, 2}, 3);
    EXPECT_TRUE(std::isnan(out[0]));
    EXPECT_TRUE(std::isnan(out[1]));
    EXPECT_EQ(out[2], reduction == Reduction::min ? 2 : 3);
  }
}

TEST(Reduction, HalvesAccumulateInFloat32) {
  // 256 + 1 + 1 is 258 in bfloat16 only if the sum was not rounded to 256 in between.
  const auto bf = [](float x) {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
  };
  check<std::uint16_t>(
      Element::bfloat16, Reduction::sum, 3,
      [&](std::size_t r, std::size_t) { return bf(r == 0 ? 256 : 1); },
      [&](std::size_t) { return bf(258); });
  // 2048 + 1 + 1 likewise in float16: 0x6800, 0x3c00, and 2050 is 0x6801.
  check<std::uint16_t>(
      Element::float16, Reduction::sum, 3,
      [](std::size_t r, std::size_t) {
        return static_cast<std::uint16_t>(r == 0 ? 0x6800 : 0x3c00);
      },
      [](std::size_t) { return std::uint16_t{0x6801}; });
  // (65504 + 65504) / 2: the sum overflows float16, the average does not.
  check<std::uint16_t>(
      Element::float16, Reduction::avg, 2,
      [](std::size_t, std::size_t) { return std::uint16_t{0x7bff}; },
      [](std::size_t) { return std::uint16_t{0x7bff}; });
}

TEST(Reduction, Booleans) {
  const auto value = [](std::size_t r, std::size_t i) {
    return static_cast<std::uint8_t>(r < 2 ? (i >> r) & 1 : 0);
  };
  const auto any = [](std::size_t i) { return static_cast<std::uint8_t>((i & 3) != 0); };
  const auto all = [](std::size_t i) { return static_cast<std::uint8_t>((i & 3) == 3); };
  for (const Reduction or_like : {Reduction::sum, Reduction::max, Reduction::bor})
    check<std::uint8_t>(Element::boolean, or_like, 2, value, any);
  for (const Reduction and_like : {Reduction::product, Reduction::min, Reduction::band})
    check<std::uint8_t>(Element::boolean, and_like, 2, value, all);
  check<std::uint8_t>(Element::boolean, Reduction::bxor, 2, value,
                      [&](std::size_t i) { return static_cast<std::uint8_t>(any(i) ^ all(i)); });
}

TEST(Reduction, ComplexNumbers) {
  using C = std::complex<double>;
  const auto value = [](std::size_t r, std::size_t i) {
    return C{static_cast<double>(r + 1), static_cast<double>(i)};
  };
  check<C>(Element::complex128, Reduction::sum, 3, value, [](std::size_t i) {
    return C{6, 3 * static_cast<double>(i)};
  });
  check<C>(Element::complex128, Reduction::product, 2, value, [](std::size_t i) {
    const auto y = static_cast<double>(i);
    return C{2 - y * y, 3 * y};  // (1 + iy)(2 + iy)
  });
  check<std::complex<float>>(
      Element::complex64, Reduction::avg, 2,
      [](std::size_t r, std::size_t i) {
        return std::complex<float>{static_cast<float>(r), static_cast<float>(i)};
      },
      [](std::size_t i) {
        return std::complex<float>{0.5F, static_cast<float>(i)};
      });
}

TEST(Reduction, WhatIsNotDefinedThrows) {
  EXPECT_THROW((void)reduce_function(Element::complex64, Reduction::max), std::invalid_argument);
  EXPECT_THROW((void)reduce_function(Element::float32, Reduction::band), std::invalid_argument);
  EXPECT_THROW((void)reduce_function(Element::boolean, Reduction::avg), std::invalid_argument);
}

}  // namespace
}  // namespace psplus::collectives
