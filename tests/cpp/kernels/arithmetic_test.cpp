// Every instruction set, the scalar reference included, against expectations written out.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel_cases.hpp"
#include "kernels/kernels.hpp"

namespace psplus::kernels {
namespace {

class Arithmetic : public ::testing::TestWithParam<Isa> {
 protected:
  static constexpr std::size_t kCount = 171;  // blocks, vectors and a tail for each width
};

TEST_P(Arithmetic, ApplySubtractsEachTermInItsPlace) {
  std::vector<float> src(kCount), dst(kCount, NAN);
  std::vector<std::vector<float>> deltas(5, std::vector<float>(kCount));
  const float scales[] = {1, 0.5F, 0.25F, 2, 4};
  std::vector<PushTerm<float>> terms;
  for (std::size_t t = 0; t < deltas.size(); ++t) {
    for (std::size_t i = 0; i < kCount; ++i) deltas[t][i] = static_cast<float>(1000 * t + 4 * i);
    terms.push_back({deltas[t].data(), scales[t]});
  }
  for (std::size_t i = 0; i < kCount; ++i) src[i] = static_cast<float>(100'000 + i);
  for (std::size_t count = 0; count <= terms.size(); ++count) {
    table(GetParam()).float32.apply(dst.data(), src.data(), terms.data(), count, kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      // All values are integers below 2^24: exact whatever the order.
      long expected = 100'000 + static_cast<long>(i);
      for (std::size_t t = 0; t < count; ++t) {
        expected -= static_cast<long>(4 * scales[t]) * static_cast<long>(1000 * t + 4 * i) / 4;
      }
      ASSERT_EQ(dst[i], static_cast<float>(expected)) << "element " << i << ", terms " << count;
    }
  }
}

TEST_P(Arithmetic, ApplyRoundsProductAndDifferenceSeparately) {
  // In double a float product is exact and a float difference rounds to the same float.
  std::vector<float> src(kCount), delta(kCount), dst(kCount, NAN);
  testing::fill_floats<float>(src, 21, false);
  testing::fill_floats<float>(delta, 22, false);
  const float scale = 0.7F;
  const PushTerm<float> term{delta.data(), scale};
  table(GetParam()).float32.apply(dst.data(), src.data(), &term, 1, kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    const auto product = static_cast<float>(static_cast<double>(scale) * delta[i]);
    const auto expected = static_cast<float>(static_cast<double>(src[i]) - product);
    ASSERT_EQ(dst[i], expected) << "element " << i;
  }
}

/// (1 + e)^2 = 1 + 2e + e^2, where e^2 is just lost in rounding: less 1 + 2e it is 0, and -e^2
/// only when the two operations are fused.
template <class S>
void expect_no_fma(const StorageKernels<S>& kernels, DType dtype, S e, std::size_t n) {
  const std::vector<S> src(n, 1 + 2 * e), factor(n, 1 + e);
  const std::vector<S> zeros(n, 0);
  const PushTerm<S> terms[] = {{zeros.data(), 1}, {factor.data(), 1 + e}, {zeros.data(), 1}};
  for (const std::size_t count : {2U, 3U}) {
    std::vector<S> dst(n, NAN);
    kernels.apply(dst.data(), src.data(), terms, count, n);
    EXPECT_EQ(dst, zeros);
  }
  std::vector<S> dst(n, NAN);
  kernels.apply(dst.data(), src.data(), terms + 1, 1, n);
  EXPECT_EQ(dst, zeros);
  const S* one_delta[] = {factor.data()};
  kernels.apply_mean(dst.data(), src.data(), one_delta, 1, 1 + e, n);
  EXPECT_EQ(dst, zeros);
  std::vector<S> x(n, NAN);
  kernels.pull(dtype, src.data(), factor.data(), 1 + e, x.data(), n);
  EXPECT_EQ(x, zeros);
}

TEST_P(Arithmetic, NothingIsFused) {
  expect_no_fma(table(GetParam()).float32, DType::float32, std::ldexp(1.0F, -12), kCount);
  expect_no_fma(table(GetParam()).float64, DType::float64, std::ldexp(1.0, -27), kCount);
}

TEST_P(Arithmetic, TermsAreTakenOneByOneAndMeansAreSummedFirst) {
  // 2^24 + 1 is a tie that rounds back to 2^24; 2^24 + 2 is a float.
  const float big = 16'777'216;
  const std::vector<float> src(kCount, big), minus_one(kCount, -1);
  std::vector<float> dst(kCount, NAN);
  const PushTerm<float> terms[] = {{minus_one.data(), 1}, {minus_one.data(), 1}};
  table(GetParam()).float32.apply(dst.data(), src.data(), terms, 2, kCount);
  EXPECT_EQ(dst, std::vector<float>(kCount, big));
  const float* deltas[] = {minus_one.data(), minus_one.data()};
  table(GetParam()).float32.apply_mean(dst.data(), src.data(), deltas, 2, 1, kCount);
  EXPECT_EQ(dst, std::vector<float>(kCount, big + 2));

  // Left to right: (2^24 - 2^24) + 1 keeps the 1, (1 + 2^24) - 2^24 loses it in a tie.
  const std::vector<float> zero(kCount, 0), one(kCount, 1), plus(kCount, big), minus(kCount, -big);
  const float* kept[] = {plus.data(), minus.data(), one.data()};
  table(GetParam()).float32.apply_mean(dst.data(), zero.data(), kept, 3, 1, kCount);
  EXPECT_EQ(dst, std::vector<float>(kCount, -1));
  const float* lost[] = {one.data(), plus.data(), minus.data()};
  table(GetParam()).float32.apply_mean(dst.data(), zero.data(), lost, 3, 1, kCount);
  EXPECT_EQ(dst, zero);
}

TEST_P(Arithmetic, DeltaSubtractsTheWidenedParameter) {
  // 1.5, -2, 2^-24 (subnormal), 65504 in float16; 1.5, -2, 2^-133 (subnormal), 2^127 in bfloat16.
  const std::uint16_t half[] = {0x3e00, 0xc000, 0x0001, 0x7bff};
  const std::uint16_t brain[] = {0x3fc0, 0xc000, 0x0001, 0x7f00};
  const float before[] = {2, 2, std::ldexp(3.0F, -24), 65535};
  float out[4] = {NAN, NAN, NAN, NAN};
  const auto& kernels = table(GetParam()).float32;
  EXPECT_TRUE(kernels.delta(DType::float16, before, half, out, 4));
  EXPECT_EQ(std::vector<float>(out, out + 4),
            (std::vector<float>{0.5F, 4.0F, std::ldexp(1.0F, -23), 31.0F}));
  const float other[] = {2, 2, std::ldexp(3.0F, -133), 0};
  EXPECT_TRUE(kernels.delta(DType::bfloat16, other, brain, out, 4));
  EXPECT_EQ(std::vector<float>(out, out + 4),
            (std::vector<float>{0.5F, 4.0F, std::ldexp(1.0F, -132), -std::ldexp(1.0F, 127)}));
}

TEST_P(Arithmetic, DeltaReportsAnOverflowOfFiniteInputs) {
  constexpr double kMax = std::numeric_limits<double>::max();
  for (std::size_t at = 0; at < kCount; ++at) {
    std::vector<double> before(kCount, kMax), after(kCount, kMax), out(kCount, NAN);
    EXPECT_TRUE(
        table(GetParam())
            .float64.delta(DType::float64, before.data(), after.data(), out.data(), kCount));
    after[at] = -kMax;
    EXPECT_FALSE(
        table(GetParam())
            .float64.delta(DType::float64, before.data(), after.data(), out.data(), kCount));
    EXPECT_EQ(out[at], std::numeric_limits<double>::infinity());
  }
}

TEST_P(Arithmetic, SubnormalAndLargestScalarsAreFinite) {
  const auto& kernels = table(GetParam());
  using Float = std::numeric_limits<float>;
  const std::vector<float> floats(kCount, Float::max()), tiny(kCount, -Float::denorm_min());
  EXPECT_TRUE(kernels.all_finite(DType::float32, floats.data(), kCount));
  EXPECT_TRUE(kernels.all_finite(DType::complex64, tiny.data(), kCount));
  const std::vector<std::uint16_t> half(kCount, 0xfbff), brain(kCount, 0x7f7f);
  EXPECT_TRUE(kernels.all_finite(DType::float16, half.data(), kCount));
  EXPECT_TRUE(kernels.all_finite(DType::bfloat16, brain.data(), kCount));
  EXPECT_FALSE(kernels.all_finite(DType::float16, brain.data(), kCount));
}

TEST_P(Arithmetic, NullPointersAreFineForNothing) {
  const auto& kernels = table(GetParam());
  kernels.float32.widen(DType::float16, nullptr, nullptr, 0, false);
  EXPECT_TRUE(kernels.float32.delta(DType::float32, nullptr, nullptr, nullptr, 0));
  kernels.float32.apply(nullptr, nullptr, nullptr, 0, 0);
  kernels.float64.apply_mean(nullptr, nullptr, nullptr, 0, 1, 0);
  kernels.float64.pull(DType::float64, nullptr, nullptr, 1, nullptr, 0);
  EXPECT_TRUE(kernels.all_finite(DType::bfloat16, nullptr, 0));
}

TEST_P(Arithmetic, RefusesADTypeOfTheOtherStorage) {
  const auto& kernels = table(GetParam());
  std::vector<double> wide(kCount, 1);
  std::vector<float> narrow(kCount, 2);
  EXPECT_THROW(kernels.float32.widen(DType::float64, wide.data(), narrow.data(), kCount, false),
               std::invalid_argument);
  EXPECT_THROW(kernels.float32.pull(DType::complex128, narrow.data(), nullptr, 1, wide.data(), 1),
               std::invalid_argument);
  EXPECT_THROW(kernels.float64.widen(DType::bfloat16, narrow.data(), wide.data(), kCount, false),
               std::invalid_argument);
  EXPECT_THROW(
      (void)kernels.float64.delta(DType::float32, wide.data(), narrow.data(), wide.data(), kCount),
      std::invalid_argument);
  EXPECT_THROW((void)kernels.all_finite(static_cast<DType>(6), wide.data(), kCount),
               std::invalid_argument);
  EXPECT_EQ(wide, std::vector<double>(kCount, 1));
  EXPECT_EQ(narrow, std::vector<float>(kCount, 2));
}

INSTANTIATE_TEST_SUITE_P(All, Arithmetic, ::testing::ValuesIn(testing::supported_isas()),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace psplus::kernels
