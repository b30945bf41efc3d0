#include "collectives/collectives.hpp"

#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "collectives/thread_ranks.hpp"

namespace psplus::collectives {
namespace {

using testing::patience;
using testing::run_ranks;

/// Distinct for each rank and element, and sums over eight ranks are exact in float32.
float value_at(std::size_t rank, std::size_t i) {
  return static_cast<float>(rank * 131'072 + i % 131'071);
}
std::vector<float> values(std::size_t rank, std::size_t n, std::size_t first = 0) {
  std::vector<float> result(n);
  for (std::size_t i = 0; i < n; ++i) result[i] = value_at(rank, first + i);
  return result;
}
float sum_at(std::size_t ranks, std::size_t i) {
  float sum = 0;
  for (std::size_t r = 0; r < ranks; ++r) sum += value_at(r, i);
  return sum;
}
constexpr float kPoison = -1;
constexpr ReduceSpec kSum{Element::float32, Reduction::sum};

void expect_values(const std::vector<float>& found, std::size_t rank, std::size_t first = 0) {
  for (std::size_t i = 0; i < found.size(); ++i)
    ASSERT_EQ(found[i], value_at(rank, first + i)) << "element " << i << " from rank " << rank;
}
void expect_sums(const std::vector<float>& found, std::size_t ranks, std::size_t first = 0) {
  for (std::size_t i = 0; i < found.size(); ++i)
    ASSERT_EQ(found[i], sum_at(ranks, first + i)) << "element " << i;
}
void expect_poison(const std::vector<float>& found) {
  for (std::size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], kPoison) << "element " << i;
}
template <class T>
std::vector<T*> pointers(std::vector<std::vector<float>>& buffers) {
  std::vector<T*> result;
  for (auto& buffer : buffers) result.push_back(buffer.data());
  return result;
}
std::vector<std::size_t> times_four(std::vector<std::size_t> counts) {
  for (auto& count : counts) count *= 4;
  return counts;
}

/// Each collective once with n elements, compared with the reference; `seed` moves root and sizes.
void check_all_reduce(Group& group, std::size_t n, std::size_t) {
  auto data = values(index(group.rank()), n);
  ASSERT_OK(all_reduce(group, data.data(), data.data(), n, kSum, patience()));
  expect_sums(data, group.size());
}

void check_reduce(Group& group, std::size_t n, std::size_t seed) {
  const auto root = static_cast<Rank>(seed % group.size());
  const auto data = values(index(group.rank()), n);
  std::vector<float> out(n, kPoison);
  ASSERT_OK(reduce(group, root, data.data(), out.data(), n, kSum, patience()));
  if (group.rank() == root)
    expect_sums(out, group.size());
  else
    expect_poison(out);
}

void check_broadcast(Group& group, std::size_t n, std::size_t seed) {
  const auto root = static_cast<Rank>(seed % group.size());
  auto data = group.rank() == root ? values(index(root), n) : std::vector<float>(n, kPoison);
  ASSERT_OK(broadcast(group, root, data.data(), n * 4, patience()));
  expect_values(data, index(root));
}

/// Uneven: rank r has n + r elements, or none when (r + seed) is a multiple of 3.
std::vector<std::size_t> uneven(std::size_t ranks, std::size_t n, std::size_t seed) {
  std::vector<std::size_t> counts(ranks);
  for (std::size_t r = 0; r < ranks; ++r) counts[r] = (r + seed) % 3 == 0 ? 0 : n + r;
  return counts;
}

void check_all_gather(Group& group, std::size_t n, std::size_t seed) {
  const auto counts = uneven(group.size(), n, seed);
  const auto mine = index(group.rank());
  const auto in = values(mine, counts[mine]);
  std::vector<std::vector<float>> outs;
  for (const auto count : counts) outs.emplace_back(count, kPoison);
  ASSERT_OK(all_gather(group, in.data(), pointers<void>(outs), times_four(counts), patience()));
  for (std::size_t r = 0; r < outs.size(); ++r) expect_values(outs[r], r);
}

void check_reduce_scatter(Group& group, std::size_t n, std::size_t seed) {
  const auto counts = uneven(group.size(), n, seed);
  const auto mine = index(group.rank());
  std::vector<std::vector<float>> ins;
  for (std::size_t to = 0; to < counts.size(); ++to)
    ins.push_back(values(mine, counts[to], to * 1000));
  std::vector<float> out(counts[mine], kPoison);
  ASSERT_OK(reduce_scatter(group, pointers<const void>(ins), counts, out.data(), kSum, patience()));
  expect_sums(out, group.size(), mine * 1000);
}

void check_all_to_all(Group& group, std::size_t n, std::size_t seed) {
  // From rank a to rank b: n + 3a + 7b elements, starting at value 1000b; none for some pairs.
  const auto count = [&](std::size_t a, std::size_t b) {
    return (a * 5 + b + seed) % 4 == 0 ? 0 : n + 3 * a + 7 * b;
  };
  const auto mine = index(group.rank());
  std::vector<std::vector<float>> ins;
  std::vector<std::vector<float>> outs;
  std::vector<std::size_t> in_counts;
  std::vector<std::size_t> out_counts;
  for (std::size_t r = 0; r < group.size(); ++r) {
    in_counts.push_back(count(mine, r));
    out_counts.push_back(count(r, mine));
    ins.push_back(values(mine, in_counts[r], 1000 * r));
    outs.emplace_back(out_counts[r], kPoison);
  }
  ASSERT_OK(all_to_all(group, pointers<const void>(ins), times_four(in_counts),
                       pointers<void>(outs), times_four(out_counts), patience()));
  for (std::size_t r = 0; r < outs.size(); ++r) expect_values(outs[r], r, 1000 * mine);
}

void check_gather(Group& group, std::size_t n, std::size_t seed) {
  const auto root = static_cast<Rank>(seed % group.size());
  const auto in = values(index(group.rank()), n);
  std::vector<std::vector<float>> outs(group.rank() == root ? group.size() : 0,
                                       std::vector<float>(n, kPoison));
  ASSERT_OK(gather(group, root, in.data(), pointers<void>(outs), n * 4, patience()));
  for (std::size_t r = 0; r < outs.size(); ++r) expect_values(outs[r], r);
}

void check_scatter(Group& group, std::size_t n, std::size_t seed) {
  const auto root = static_cast<Rank>(seed % group.size());
  std::vector<std::vector<float>> ins;
  if (group.rank() == root)
    for (std::size_t r = 0; r < group.size(); ++r) ins.push_back(values(r, n));
  std::vector<float> out(n, kPoison);
  ASSERT_OK(scatter(group, root, pointers<const void>(ins), out.data(), n * 4, patience()));
  expect_values(out, index(group.rank()));
}

void check_barrier(Group& group, std::size_t, std::size_t) {
  ASSERT_OK(barrier(group, patience()));
}

using Check = void (*)(Group&, std::size_t, std::size_t);
struct Named {
  const char* name;
  Check check;
};
constexpr Named kChecks[] = {
    {"all_reduce", check_all_reduce},
    {"reduce", check_reduce},
    {"broadcast", check_broadcast},
    {"all_gather", check_all_gather},
    {"reduce_scatter", check_reduce_scatter},
    {"all_to_all", check_all_to_all},
    {"gather", check_gather},
    {"scatter", check_scatter},
    {"barrier", check_barrier},
};

class CollectivesTest
    : public ::testing::TestWithParam<std::tuple<Named, std::size_t, std::size_t>> {};

TEST_P(CollectivesTest, GivesWhatTheReferenceSays) {
  const auto [named, ranks, elements] = GetParam();
  run_ranks(ranks, [&, check = named.check, n = elements](Group& group) {
    for (std::size_t seed = 0; seed < 4; ++seed) check(group, n, seed);
  });
}

// In floats: the flat limit is 4096, a slot 65536 (32768 of five ranks), a piece of two ranks
// 32768.
INSTANTIATE_TEST_SUITE_P(All, CollectivesTest,
                         ::testing::Combine(::testing::ValuesIn(kChecks),
                                            ::testing::Values(1, 2, 3, 5),
                                            ::testing::Values(0, 1, 7, 4095, 4096, 4097, 32'768,
                                                              65'535, 65'536, 65'537, 300'001)),
                         [](const auto& info) {
                           return std::string{std::get<0>(info.param).name} + "_" +
                                  std::to_string(std::get<1>(info.param)) + "r_" +
                                  std::to_string(std::get<2>(info.param)) + "f";
                         });

TEST(Collectives, ManyDifferentOnesBackToBack) {
  for (const std::size_t ranks : {2, 4}) {
    run_ranks(ranks, [](Group& group) {
      std::mt19937 random{7};  // the same sequence on all ranks
      std::mt19937 own{100 + raw(group.rank())};
      const std::size_t sizes[] = {0, 1, 63, 4000, 5000, 65'536, 100'003};
      for (int turn = 0; turn < 300; ++turn) {
        const auto& named = kChecks[random() % std::size(kChecks)];
        const std::size_t n = sizes[random() % std::size(sizes)];
        if (own() % 8 == 0) std::this_thread::yield();
        named.check(group, n, random() % 100);
        if (::testing::Test::HasFatalFailure()) return;
      }
    });
  }
}

TEST(Collectives, AllRanksGetTheSameBits) {
  // Sums that depend on the order of their terms.
  constexpr std::size_t kRanks = 4;
  constexpr std::size_t kElements = 70'001;
  std::vector<std::vector<float>> results(kRanks, std::vector<float>(kElements));
  run_ranks(kRanks, [&](Group& group) {
    std::mt19937 random{raw(group.rank())};
    std::normal_distribution<float> normal;
    std::vector<float> data(kElements);
    for (auto& x : data) x = normal(random);
    auto& out = results[index(group.rank())];
    ASSERT_OK(all_reduce(group, data.data(), out.data(), kElements, kSum, patience()));
  });
  for (std::size_t r = 1; r < kRanks; ++r) ASSERT_EQ(results[r], results[0]);
}

TEST(Collectives, EachRankHasItsOwnFactor) {
  for (const std::size_t n : {std::size_t{5}, std::size_t{70'000}}) {
    run_ranks(3, [n](Group& group) {
      std::vector<double> data(n, static_cast<double>(index(group.rank()) + 1));
      const ReduceSpec spec{Element::float64, Reduction::premul_sum,
                            1.0 / static_cast<double>(std::size_t{1} << index(group.rank()))};
      ASSERT_OK(all_reduce(group, data.data(), data.data(), n, spec, patience()));
      for (const double x : data) ASSERT_EQ(x, 1 + 2 * 0.5 + 3 * 0.25);
    });
  }
}

TEST(Collectives, ABarrierLetsNobodyLeaveBeforeAllHaveCome) {
  constexpr std::size_t kRanks = 4;
  std::atomic<std::size_t> arrived{0};
  run_ranks(kRanks, [&](Group& group) {
    for (std::size_t turn = 1; turn <= 200; ++turn) {
      arrived.fetch_add(1);
      ASSERT_OK(barrier(group, patience()));
      ASSERT_GE(arrived.load(), turn * kRanks);
    }
  });
}

TEST(Collectives, MisuseThrowsBeforeAnythingHappens) {
  run_ranks(1, [](Group& group) {
    float x = 1;
    EXPECT_THROW((void)broadcast(group, Rank{1}, &x, 4, patience()), std::invalid_argument);
    EXPECT_THROW((void)all_gather(group, &x, {}, {}, patience()), std::invalid_argument);
    EXPECT_THROW(
        (void)all_reduce(group, &x, &x, 1, {Element::float32, Reduction::bxor}, patience()),
        std::invalid_argument);
    EXPECT_EQ(group.rounds, 0U);
  });
}

}  // namespace
}  // namespace psplus::collectives
