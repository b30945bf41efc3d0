#include "kernels/kernels.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "guarded_buffer.hpp"
#include "kernel_cases.hpp"

namespace psplus::kernels {
namespace {

using testing::GuardedBuffer;
using testing::same_result;

constexpr DType kDTypes[] = {DType::float32, DType::float64,   DType::bfloat16,
                             DType::float16, DType::complex64, DType::complex128};

/// Parameter scalars of a dtype, as raw memory.
std::size_t scalar_bytes(DType dtype) { return element_bytes(dtype) / scalars_per_element(dtype); }

/// Calls `body` with a float or a double, as `storage` says.
template <class Body>
void with_storage(Storage storage, Body body) {
  if (storage == Storage::float32) {
    body(float{});
  } else {
    body(double{});
  }
}

/// Calls `body` with a value of the type of a parameter scalar.
template <class Body>
void with_element(DType dtype, Body body) {
  if (scalar_bytes(dtype) == 2) {
    body(std::uint16_t{});
  } else {
    with_storage(storage_of(dtype), body);
  }
}

/// Parameter scalars with specials among them.
template <class E>
void fill_elements(std::span<E> out, std::uint32_t seed, bool special) {
  if constexpr (std::is_same_v<E, std::uint16_t>) {
    std::mt19937 random(seed);
    // 0x0fff leaves the upper exponent bits out: finite in both formats.
    const unsigned mask = special ? 0xffff : 0x8fff;
    for (E& bits : out) bits = static_cast<E>(random() & mask);
  } else {
    testing::fill_floats<E>(out, seed, special);
  }
}

template <class S>
void expect_same(std::span<S> found, std::span<S> expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if constexpr (std::is_floating_point_v<S>) {
      ASSERT_PRED2(same_result<S>, found[i], expected[i]) << "element " << i;
    } else {
      ASSERT_EQ(found[i], expected[i]) << "element " << i;
    }
  }
}

// Every instruction set against the reference ------------------------------------------------

class DTypeKernels
    : public ::testing::TestWithParam<std::tuple<Isa, DType, std::size_t, std::size_t>> {};

TEST_P(DTypeKernels, WidenEqualsTheReferenceBitForBit) {
  const auto [isa, dtype, n, offset] = GetParam();
  with_element(dtype, [&, isa = isa, dtype = dtype, n = n, offset = offset](auto element) {
    with_storage(storage_of(dtype), [&](auto storage) {
      using S = decltype(storage);
      GuardedBuffer<decltype(element)> src(n, offset);
      GuardedBuffer<S> out(n, offset + 1), expected(n);
      fill_elements(src.span(), 1, true);
      table(isa).of<S>().widen(dtype, src.data(), out.data(), n);
      table(Isa::scalar).of<S>().widen(dtype, src.data(), expected.data(), n);
      ASSERT_EQ(std::memcmp(out.data(), expected.data(), out.size_bytes()), 0);
      EXPECT_TRUE(out.guards_intact());
    });
  });
}

TEST_P(DTypeKernels, DeltaEqualsTheReference) {
  const auto [isa, dtype, n, offset] = GetParam();
  with_element(dtype, [&, isa = isa, dtype = dtype, n = n, offset = offset](auto element) {
    with_storage(storage_of(dtype), [&](auto storage) {
      using S = decltype(storage);
      for (const bool special : {false, true}) {
        GuardedBuffer<decltype(element)> after(n, offset);
        GuardedBuffer<S> before(n, offset + 2), out(n, offset + 1), expected(n);
        fill_elements(after.span(), 2, special);
        testing::fill_floats(before.span(), 3, special);
        const bool finite =
            table(isa).of<S>().delta(dtype, before.data(), after.data(), out.data(), n);
        EXPECT_EQ(finite, table(Isa::scalar)
                              .of<S>()
                              .delta(dtype, before.data(), after.data(), expected.data(), n));
        expect_same(out.span(), expected.span());
        EXPECT_TRUE(out.guards_intact());

        table(isa).of<S>().delta(dtype, before.data(), after.data(), before.data(), n);
        expect_same(before.span(), expected.span());  // in place
      }
    });
  });
}

TEST_P(DTypeKernels, PullEqualsTheReference) {
  const auto [isa, dtype, n, offset] = GetParam();
  with_element(dtype, [&, isa = isa, dtype = dtype, n = n, offset = offset](auto element) {
    with_storage(storage_of(dtype), [&](auto storage) {
      using S = decltype(storage);
      GuardedBuffer<S> w(n, offset), delta(n, offset + 2);
      testing::fill_floats(w.span(), 4, true);
      testing::fill_floats(delta.span(), 5, true);
      for (const S* change : {static_cast<const S*>(delta.data()), static_cast<const S*>(nullptr)}) {
        GuardedBuffer<decltype(element)> x(n, offset + 1), expected(n);
        table(isa).of<S>().pull(dtype, w.data(), change, S(0.3), x.data(), n);
        table(Isa::scalar).of<S>().pull(dtype, w.data(), change, S(0.3), expected.data(), n);
        expect_same(x.span(), expected.span());
        EXPECT_TRUE(x.guards_intact());
      }
    });
  });
}

TEST_P(DTypeKernels, FindsOneNonFiniteScalarAnywhere) {
  const auto [isa, dtype, n, offset] = GetParam();
  with_element(dtype, [&, isa = isa, dtype = dtype, n = n, offset = offset](auto element) {
    with_storage(storage_of(dtype), [&](auto storage) {
      using E = decltype(element);
      using S = decltype(storage);
      const auto& kernels = table(isa);
      GuardedBuffer<E> values(n, offset);
      GuardedBuffer<S> zeros(n), out(n);
      for (S& zero : zeros.span()) zero = 0;
      fill_elements(values.span(), 6, false);
      EXPECT_TRUE(kernels.all_finite(dtype, values.data(), n));
      EXPECT_TRUE(kernels.of<S>().delta(dtype, zeros.data(), values.data(), out.data(), n));

      // -infinity and a NaN with a single payload bit, in the dtype's own bits.
      using Bits = testing::BitsOf<E>;
      Bits infinity = dtype == DType::bfloat16 ? Bits(0x7f80) : Bits(0x7c00);
      Bits sign = Bits(0x8000);
      if constexpr (std::is_floating_point_v<E>) {
        infinity = std::bit_cast<Bits>(std::numeric_limits<E>::infinity());
        sign = std::bit_cast<Bits>(E(-0.0));
      }
      const std::size_t stride = n < 300 ? 1 : 977;
      for (std::size_t at = n; at > 0; at = at > stride ? at - stride : 0) {
        E& value = values.span()[at - 1];
        const E kept = value;
        for (const Bits bad : {Bits(infinity | sign), Bits(infinity | 1)}) {
          value = std::bit_cast<E>(bad);
          ASSERT_FALSE(kernels.all_finite(dtype, values.data(), n)) << "element " << at - 1;
          ASSERT_FALSE(kernels.of<S>().delta(dtype, zeros.data(), values.data(), out.data(), n));
        }
        value = kept;
      }
    });
  });
}

std::string dtype_case_name(const ::testing::TestParamInfo<DTypeKernels::ParamType>& info) {
  const auto& [isa, dtype, n, offset] = info.param;
  return std::string(name(isa)) + "_" + std::string(name(dtype)) + "_" + std::to_string(n) +
         "_offset" + std::to_string(offset);
}

INSTANTIATE_TEST_SUITE_P(All, DTypeKernels,
                         ::testing::Combine(::testing::ValuesIn(testing::supported_isas()),
                                            ::testing::ValuesIn(kDTypes),
                                            ::testing::ValuesIn(testing::kSizes),
                                            ::testing::ValuesIn(testing::kOffsets)),
                         dtype_case_name);

class ApplyKernels : public ::testing::TestWithParam<
                         std::tuple<Isa, Storage, std::size_t, std::size_t, std::size_t>> {};

TEST_P(ApplyKernels, EqualTheReference) {
  const auto [isa, storage, n, offset, count] = GetParam();
  with_storage(storage, [&, isa = isa, n = n, offset = offset, count = count](auto scalar) {
    using S = decltype(scalar);
    GuardedBuffer<S> src(n, offset);
    testing::fill_floats(src.span(), 7, true);
    std::vector<GuardedBuffer<S>> deltas;
    std::vector<PushTerm<S>> terms;
    std::vector<const S*> pointers;
    for (std::size_t t = 0; t < count; ++t) {
      deltas.emplace_back(n, (offset + t) % 5);
      testing::fill_floats(deltas.back().span(), static_cast<std::uint32_t>(8 + t), true);
      terms.push_back({deltas.back().data(), S(1) / static_cast<S>(t + 3)});
      pointers.push_back(deltas.back().data());
    }
    const auto& kernels = table(isa).of<S>();
    const auto& reference = table(Isa::scalar).of<S>();
    {
      GuardedBuffer<S> dst(n, offset + 1), expected(n);
      kernels.apply(dst.data(), src.data(), terms.data(), count, n);
      reference.apply(expected.data(), src.data(), terms.data(), count, n);
      expect_same(dst.span(), expected.span());
      EXPECT_TRUE(dst.guards_intact());
    }
    GuardedBuffer<S> dst(n, offset + 1), expected(n);
    kernels.apply_mean(dst.data(), src.data(), pointers.data(), count, S(0.2), n);
    reference.apply_mean(expected.data(), src.data(), pointers.data(), count, S(0.2), n);
    expect_same(dst.span(), expected.span());
    EXPECT_TRUE(dst.guards_intact());
  });
}

std::string apply_case_name(const ::testing::TestParamInfo<ApplyKernels::ParamType>& info) {
  const auto& [isa, storage, n, offset, count] = info.param;
  return std::string(name(isa)) + (storage == Storage::float32 ? "_float32_" : "_float64_") +
         std::to_string(n) + "_offset" + std::to_string(offset) + "_terms" + std::to_string(count);
}

INSTANTIATE_TEST_SUITE_P(
    All, ApplyKernels,
    ::testing::Combine(::testing::ValuesIn(testing::supported_isas()),
                       ::testing::Values(Storage::float32, Storage::float64),
                       ::testing::ValuesIn(testing::kSizes), ::testing::ValuesIn(testing::kOffsets),
                       ::testing::Values(0, 1, 2, 3, 5)),
    apply_case_name);

// Every instruction set against expectations written out ---------------------------------------

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
  EXPECT_EQ(std::vector<float>(out, out + 4), (std::vector<float>{0.5F, 4.0F, std::ldexp(1.0F, -23), 31.0F}));
  const float other[] = {2, 2, std::ldexp(3.0F, -133), 0};
  EXPECT_TRUE(kernels.delta(DType::bfloat16, other, brain, out, 4));
  EXPECT_EQ(std::vector<float>(out, out + 4), (std::vector<float>{0.5F, 4.0F, std::ldexp(1.0F, -132), -std::ldexp(1.0F, 127)}));
}

TEST_P(Arithmetic, DeltaReportsAnOverflowOfFiniteInputs) {
  constexpr double kMax = std::numeric_limits<double>::max();
  for (std::size_t at = 0; at < kCount; ++at) {
    std::vector<double> before(kCount, kMax), after(kCount, kMax), out(kCount, NAN);
    EXPECT_TRUE(table(GetParam()).float64.delta(DType::float64, before.data(), after.data(),
                                                out.data(), kCount));
    after[at] = -kMax;
    EXPECT_FALSE(table(GetParam()).float64.delta(DType::float64, before.data(), after.data(),
                                                 out.data(), kCount));
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
  kernels.float32.widen(DType::float16, nullptr, nullptr, 0);
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
  EXPECT_THROW(kernels.float32.widen(DType::float64, wide.data(), narrow.data(), kCount),
               std::invalid_argument);
  EXPECT_THROW(kernels.float32.pull(DType::complex128, narrow.data(), nullptr, 1, wide.data(), 1),
               std::invalid_argument);
  EXPECT_THROW(kernels.float64.widen(DType::bfloat16, narrow.data(), wide.data(), kCount),
               std::invalid_argument);
  EXPECT_THROW((void)kernels.float64.delta(DType::float32, wide.data(), narrow.data(), wide.data(),
                                           kCount),
               std::invalid_argument);
  EXPECT_THROW((void)kernels.all_finite(static_cast<DType>(6), wide.data(), kCount),
               std::invalid_argument);
  EXPECT_EQ(wide, std::vector<double>(kCount, 1));
  EXPECT_EQ(narrow, std::vector<float>(kCount, 2));
}

INSTANTIATE_TEST_SUITE_P(All, Arithmetic, ::testing::ValuesIn(testing::supported_isas()),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(Dispatch, PicksTheLastSupportedInstructionSet) {
  EXPECT_EQ(best_isa(), testing::supported_isas().back() == Isa::scalar
                            ? Isa::portable
                            : testing::supported_isas().back());
  EXPECT_EQ(&best(), &table(best_isa()));
  for (const Isa isa : {Isa::scalar, Isa::portable, Isa::avx2, Isa::avx512}) {
    if (supported(isa)) {
      EXPECT_EQ(table(isa).isa, isa);
    } else {
      EXPECT_THROW((void)table(isa), std::invalid_argument);
    }
  }
  EXPECT_TRUE(supported(Isa::portable));
  EXPECT_THROW((void)table(static_cast<Isa>(9)), std::invalid_argument);
}

TEST(DTypeTest, SizesAndStorage) {
  const std::tuple<DType, std::string_view, std::size_t, std::size_t, Storage> expected[] = {
      {DType::float32, "float32", 4, 1, Storage::float32},
      {DType::float64, "float64", 8, 1, Storage::float64},
      {DType::bfloat16, "bfloat16", 2, 1, Storage::float32},
      {DType::float16, "float16", 2, 1, Storage::float32},
      {DType::complex64, "complex64", 8, 2, Storage::float32},
      {DType::complex128, "complex128", 16, 2, Storage::float64},
  };
  for (const auto& [dtype, word, bytes, scalars, storage] : expected) {
    EXPECT_EQ(name(dtype), word);
    EXPECT_EQ(element_bytes(dtype), bytes);
    EXPECT_EQ(scalars_per_element(dtype), scalars);
    EXPECT_EQ(storage_of(dtype), storage);
  }
  EXPECT_EQ(storage_bytes(Storage::float32), 4U);
  EXPECT_EQ(storage_bytes(Storage::float64), 8U);
  EXPECT_THROW((void)element_bytes(static_cast<DType>(6)), std::invalid_argument);
}

}  // namespace
}  // namespace psplus::kernels
