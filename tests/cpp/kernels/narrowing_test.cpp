// 16-bit conversions over their whole range, against the formats' definition.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kernel_cases.hpp"
#include "kernels/kernels.hpp"

namespace psplus::kernels {
namespace {

class Halves : public ::testing::TestWithParam<std::tuple<Isa, DType>> {
 protected:
  [[nodiscard]] Isa isa() const { return std::get<0>(GetParam()); }
  [[nodiscard]] DType dtype() const { return std::get<1>(GetParam()); }
  [[nodiscard]] std::uint16_t infinity() const {
    return dtype() == DType::bfloat16 ? 0x7f80 : 0x7c00;
  }
  [[nodiscard]] std::uint16_t nan() const { return dtype() == DType::bfloat16 ? 0x7fc0 : 0x7e00; }

  [[nodiscard]] std::vector<std::uint16_t> narrow(const std::vector<float>& values) const {
    std::vector<std::uint16_t> bits(values.size(), 0xA5A5);
    table(isa()).float32.pull(dtype(), values.data(), nullptr, 1, bits.data(), values.size());
    return bits;
  }
};

TEST_P(Halves, EveryPatternWidensToItsValue) {
  std::vector<std::uint16_t> bits(65536);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  std::vector<float> values(bits.size(), 12345);
  table(isa()).float32.widen(dtype(), bits.data(), values.data(), bits.size(), false);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const double expected = testing::value_of_bits(bits[i], dtype());
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(values[i])) << i;
    } else {
      ASSERT_EQ(values[i], expected) << i;
      ASSERT_EQ(std::signbit(values[i]), i >= 0x8000) << i;
    }
  }
}

TEST_P(Halves, EveryPatternSurvivesTheRoundTrip) {
  std::vector<float> values(65536);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(testing::value_of_bits(static_cast<std::uint16_t>(i), dtype()));
  }
  const std::vector<std::uint16_t> bits = narrow(values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(bits[i], std::isnan(values[i]) ? nan() : i) << i;
  }
}

TEST_P(Halves, EveryGapRoundsToNearestAndTiesToEven) {
  // Between neighbours a < b: just below the middle gives a, just above b, the middle itself the
  // even one of the two. The last gap ends where the next power of two would be, which is infinite.
  std::vector<float> values;
  std::vector<std::uint16_t> expected;
  const auto expect = [&](float value, std::uint16_t bits) {
    values.push_back(value);
    expected.push_back(bits);
    values.push_back(-value);
    expected.push_back(static_cast<std::uint16_t>(bits | 0x8000));
  };
  for (std::uint16_t a = 0; a < infinity(); ++a) {
    const auto b = static_cast<std::uint16_t>(a + 1);
    const double low = testing::value_of_bits(a, dtype());
    const double step =
        b == infinity() ? low - testing::value_of_bits(static_cast<std::uint16_t>(a - 1), dtype())
                        : testing::value_of_bits(b, dtype()) - low;
    const auto middle = static_cast<float>(low + step / 2);
    ASSERT_EQ(middle, low + step / 2) << "the middle is a float32";
    expect(std::nextafter(middle, 0.0F), a);
    expect(middle, a % 2 == 0 ? a : b);
    expect(std::nextafter(middle, std::numeric_limits<float>::infinity()), b);
  }
  const std::vector<std::uint16_t> found = narrow(values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(found[i], expected[i]) << values[i];
  }
}

TEST_P(Halves, InfinityOverflowAndNaN) {
  const float max = std::numeric_limits<float>::max();
  const float inf = std::numeric_limits<float>::infinity();
  // NaNs whose payload a plain shift would drop or carry away included.
  const std::uint32_t nans[] = {0x7f80'0001, 0x7fff'ffff, 0xff80'0001,
                                0xffff'ffff, 0x7fc0'0000, 0xffc0'1234};
  std::vector<float> values;
  std::vector<std::uint16_t> expected;
  for (int repeat = 0; repeat < 9; ++repeat) {  // whole vectors and a tail
    for (const float large : {max, inf}) {
      values.insert(values.end(), {large, -large});
      expected.insert(expected.end(),
                      {infinity(), static_cast<std::uint16_t>(infinity() | 0x8000)});
    }
    for (const std::uint32_t bits : nans) {
      values.push_back(std::bit_cast<float>(bits));
      expected.push_back(nan());
    }
  }
  EXPECT_EQ(narrow(values), expected);
}

TEST_P(Halves, KnownPatterns) {
  const std::vector<float> values = {1.0F, -2.0F, 0.1F,    3.14159265F, 65504.0F,
                                     0.0F, -0.0F, 1.0e-7F, 6.1e-5F,     1.0e-40F};
  const std::vector<std::uint16_t> half = {0x3c00, 0xc000, 0x2e66, 0x4248, 0x7bff,
                                           0x0000, 0x8000, 0x0002, 0x03ff, 0x0000};
  const std::vector<std::uint16_t> brain = {0x3f80, 0xc000, 0x3dcd, 0x4049, 0x4780,
                                            0x0000, 0x8000, 0x33d7, 0x3880, 0x0001};
  EXPECT_EQ(narrow(values), dtype() == DType::bfloat16 ? brain : half);
}

INSTANTIATE_TEST_SUITE_P(All, Halves,
                         ::testing::Combine(::testing::ValuesIn(testing::supported_isas()),
                                            ::testing::Values(DType::bfloat16, DType::float16)),
                         [](const auto& info) {
                           return std::string(name(std::get<0>(info.param))) + "_" +
                                  std::string(name(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace psplus::kernels
