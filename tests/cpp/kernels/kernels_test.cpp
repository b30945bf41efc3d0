#include "kernels/kernels.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
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

/// Calls body(n, offset) for every size and offset; stops at the first failure.
template <class Body>
void for_each_span(Body body) {
  for (const std::size_t n : testing::kSizes) {
    for (const std::size_t offset : testing::kOffsets) {
      SCOPED_TRACE(std::to_string(n) + " scalars, offset " + std::to_string(offset));
      body(n, offset);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

/// Calls body(element, scalar, n, offset) for every span, with a value of the type of the dtype's
/// own scalars and one of the type that holds them.
template <class Body>
void for_each_typed_span(DType dtype, Body body) {
  with_element(dtype, [&](auto element) {
    with_storage(storage_of(dtype), [&](auto scalar) {
      for_each_span([&](std::size_t n, std::size_t offset) { body(element, scalar, n, offset); });
    });
  });
}

class DTypeKernels : public ::testing::TestWithParam<std::tuple<Isa, DType>> {
 protected:
  [[nodiscard]] const KernelTable& kernels() const { return table(std::get<0>(GetParam())); }
  [[nodiscard]] const KernelTable& reference() const { return table(Isa::scalar); }
  [[nodiscard]] DType dtype() const { return std::get<1>(GetParam()); }
};

TEST_P(DTypeKernels, WidenEqualsTheReferenceBitForBit) {
  for_each_typed_span(dtype(), [&](auto element, auto scalar, std::size_t n, std::size_t offset) {
    using S = decltype(scalar);
    for (const bool special : {false, true}) {
      GuardedBuffer<decltype(element)> src(n, offset);
      GuardedBuffer<S> expected(n);
      fill_elements(src.span(), 1, special);
      const bool finite =
          reference().template of<S>().widen(dtype(), src.data(), expected.data(), n, false);
      for (const bool streams : {false, true}) {
        // Past the caches only where the target is aligned: both kinds of it.
        for (const std::size_t shift : {std::size_t{0}, offset + 1}) {
          GuardedBuffer<S> out(n, shift);
          EXPECT_EQ(kernels().template of<S>().widen(dtype(), src.data(), out.data(), n, streams),
                    finite);
          EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.size_bytes()), 0);
          EXPECT_TRUE(out.guards_intact());
        }
      }
    }
  });
}

TEST_P(DTypeKernels, DeltaEqualsTheReference) {
  for_each_typed_span(dtype(), [&](auto element, auto scalar, std::size_t n, std::size_t offset) {
    using S = decltype(scalar);
    const auto delta = kernels().template of<S>().delta;
    for (const bool special : {false, true}) {
      GuardedBuffer<decltype(element)> after(n, offset);
      GuardedBuffer<S> before(n, offset + 2), out(n, offset + 1), expected(n);
      fill_elements(after.span(), 2, special);
      testing::fill_floats(before.span(), 3, special);
      const bool finite = reference().template of<S>().delta(dtype(), before.data(), after.data(),
                                                             expected.data(), n);
      EXPECT_EQ(delta(dtype(), before.data(), after.data(), out.data(), n), finite);
      expect_same(out.span(), expected.span());
      EXPECT_TRUE(out.guards_intact());

      EXPECT_EQ(delta(dtype(), before.data(), after.data(), before.data(), n), finite);
      expect_same(before.span(), expected.span());  // in place
    }
  });
}

TEST_P(DTypeKernels, PullEqualsTheReference) {
  for_each_typed_span(dtype(), [&](auto element, auto scalar, std::size_t n, std::size_t offset) {
    using S = decltype(scalar);
    GuardedBuffer<S> w(n, offset), delta(n, offset + 2);
    testing::fill_floats(w.span(), 4, true);
    testing::fill_floats(delta.span(), 5, true);
    for (const bool with_delta : {true, false}) {
      const S* const change = with_delta ? delta.data() : nullptr;
      GuardedBuffer<decltype(element)> x(n, offset + 1), expected(n);
      kernels().template of<S>().pull(dtype(), w.data(), change, S(0.3), x.data(), n);
      reference().template of<S>().pull(dtype(), w.data(), change, S(0.3), expected.data(), n);
      expect_same(x.span(), expected.span());
      EXPECT_TRUE(x.guards_intact());
    }
  });
}

TEST_P(DTypeKernels, FindsOneNonFiniteScalarAnywhere) {
  for_each_typed_span(dtype(), [&](auto element, auto scalar, std::size_t n, std::size_t offset) {
    using E = decltype(element);
    using S = decltype(scalar);
    const auto delta = kernels().template of<S>().delta;
    const auto all_finite = kernels().all_finite;
    GuardedBuffer<E> values(n, offset);
    GuardedBuffer<S> zeros(n), out(n);
    for (S& zero : zeros.span()) zero = 0;
    fill_elements(values.span(), 6, false);
    EXPECT_TRUE(all_finite(dtype(), values.data(), n));
    EXPECT_TRUE(delta(dtype(), zeros.data(), values.data(), out.data(), n));

    // -infinity and a NaN with a single payload bit, in the dtype's own bits.
    using Bits = testing::BitsOf<E>;
    Bits infinity = dtype() == DType::bfloat16 ? Bits(0x7f80) : Bits(0x7c00);
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
        ASSERT_FALSE(all_finite(dtype(), values.data(), n)) << "element " << at - 1;
        ASSERT_FALSE(delta(dtype(), zeros.data(), values.data(), out.data(), n))
            << "element " << at - 1;
      }
      value = kept;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, DTypeKernels,
                         ::testing::Combine(::testing::ValuesIn(testing::supported_isas()),
                                            ::testing::ValuesIn(kDTypes)),
                         [](const auto& info) {
                           return std::string(name(std::get<0>(info.param))) + "_" +
                                  std::string(name(std::get<1>(info.param)));
                         });

class ApplyKernels : public ::testing::TestWithParam<std::tuple<Isa, Storage>> {};

/// Deltas of distinct values, at distinct offsets, and the two forms in which kernels take them.
template <class S>
struct Pushes {
  Pushes(std::size_t count, std::size_t n, std::size_t offset) {
    for (std::size_t t = 0; t < count; ++t) {
      deltas.emplace_back(n, (offset + t) % 5);
      testing::fill_floats(deltas.back().span(), static_cast<std::uint32_t>(8 + t), true);
      terms.push_back({deltas.back().data(), S(1) / static_cast<S>(t + 3)});
      pointers.push_back(deltas.back().data());
    }
  }
  std::vector<GuardedBuffer<S>> deltas;
  std::vector<PushTerm<S>> terms;
  std::vector<const S*> pointers;
};

TEST_P(ApplyKernels, EqualTheReference) {
  const auto [isa, storage] = GetParam();
  with_storage(storage, [&, isa = isa](auto scalar) {
    using S = decltype(scalar);
    const auto& kernels = table(isa).of<S>();
    const auto& reference = table(Isa::scalar).of<S>();
    for_each_span([&](std::size_t n, std::size_t offset) {
      GuardedBuffer<S> src(n, offset);
      testing::fill_floats(src.span(), 7, true);
      for (const std::size_t count : {0U, 1U, 2U, 3U, 5U}) {
        SCOPED_TRACE(std::to_string(count) + " terms");
        const Pushes<S> pushes(count, n, offset);
        {
          GuardedBuffer<S> dst(n, offset + 1), expected(n);
          kernels.apply(dst.data(), src.data(), pushes.terms.data(), count, n);
          reference.apply(expected.data(), src.data(), pushes.terms.data(), count, n);
          expect_same(dst.span(), expected.span());
          EXPECT_TRUE(dst.guards_intact());
        }
        GuardedBuffer<S> dst(n, offset + 1), expected(n);
        kernels.apply_mean(dst.data(), src.data(), pushes.pointers.data(), count, S(0.2), n);
        reference.apply_mean(expected.data(), src.data(), pushes.pointers.data(), count, S(0.2), n);
        expect_same(dst.span(), expected.span());
        EXPECT_TRUE(dst.guards_intact());
      }
    });
  });
}

INSTANTIATE_TEST_SUITE_P(All, ApplyKernels,
                         ::testing::Combine(::testing::ValuesIn(testing::supported_isas()),
                                            ::testing::Values(Storage::float32, Storage::float64)),
                         [](const auto& info) {
                           return std::string(name(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) == Storage::float32 ? "_float32"
                                                                               : "_float64");
                         });

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
