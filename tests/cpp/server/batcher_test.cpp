#include "server/batcher.hpp"

#include <cmath>
#include <limits>

#include "support/founded_job.hpp"

namespace psplus::server {
namespace {

using psplus::testing::FoundedJob;
using psplus::testing::kStream;
using psplus::testing::TestWorker;

store::ExtentLayout small() { return store::ExtentLayout{{{"w", DType::float32, {4}}}, 64}; }

/// A batcher of its own over the segments of a founded job, whose record it writes.
struct Bench {
  explicit Bench(std::uint32_t world, wire::OpenStream how = {}, Config config = {})
      : job(world, small(), how, config),
        slots(job.store()),
        context{
            .store = job.store(), .pushes = slots, .config = config, .now = job.now, .effects = {}},
        batcher(context) {}
  [[nodiscard]] store::BatchRecord& record() { return job.control().record; }
  [[nodiscard]] store::RecordState state() {
    return store::RecordState::unpack(record().state.load());
  }
  /// Carries out the open batch's bookkeeping as an applier would, without its values.
  void finish() {
    Applier applier{context};
    applier.begin(ApplyBatch{});
    ASSERT_TRUE(applier.advance(~std::size_t{0}));
  }
  FoundedJob job;
  SlotSource slots;
  Context context;
  Batcher batcher;
};

TEST(Batcher, NothingPublishedMakesNoBatch) {
  Bench bench{2};
  const store::RecordState before = bench.state();
  EXPECT_FALSE(bench.batcher.open_next());
  EXPECT_EQ(bench.state().batch, before.batch);
  EXPECT_FALSE(bench.state().open);
  EXPECT_TRUE(bench.batcher.take_offences().empty());
}

TEST(Batcher, TakesAllThatWaitInSequenceWithCountersAsTheyShallStand) {
  Bench bench{2};
  const store::RecordState before = bench.state();
  bench.job.push_whole(1, 1, 0.5);
  bench.job.push_whole(0, 1, 0.25);  // rank 0's sequence 1 was the initial set
  bench.job.push_whole(0, 2, 1.0);
  EXPECT_EQ(bench.batcher.pending(kStream, bench.job.workers[0].member), 2u);
  EXPECT_EQ(bench.batcher.pending(kStream, bench.job.workers[1].member), 1u);
  ASSERT_TRUE(bench.batcher.open_next());
  EXPECT_TRUE(bench.state().open);
  EXPECT_EQ(raw(bench.state().batch), raw(before.batch) + 1);
  const store::BatchRecord& record = bench.record();
  EXPECT_EQ(record.kind.load(), raw(store::BatchKind::kAdd));
  EXPECT_EQ(record.stream.load(), 0u);
  ASSERT_EQ(record.count.load(), 3u);
  EXPECT_EQ(record.after_total.load(), 3u);
  EXPECT_EQ(record.initialises.load(), 0u);
  struct Expected {
    std::uint32_t rank;
    std::uint64_t sequence, clock, pushes, staleness;
    double scale;
  };
  // N = 2. Staleness: foreign pushes in the total when its turn comes; the snapshots had none.
  const Expected expected[] = {{0, 2, 1, 1, 0, 0.125}, {0, 3, 2, 2, 0, 0.5}, {1, 1, 1, 1, 2, 0.25}};
  for (std::size_t i = 0; i < 3; ++i) {
    SCOPED_TRACE(i);
    const store::RecordEntry& entry = record.entries[i];
    const TestWorker& worker = bench.job.workers[expected[i].rank];
    EXPECT_EQ(entry.member.load(), raw(worker.member));
    EXPECT_EQ(entry.incarnation.load(), raw(worker.incarnation));
    EXPECT_EQ(entry.sequence.load(), expected[i].sequence);
    EXPECT_EQ(entry.after_clock.load(), expected[i].clock);
    EXPECT_EQ(entry.after_pushes.load(), expected[i].pushes);
    EXPECT_EQ(entry.staleness.load(), expected[i].staleness);
    EXPECT_EQ(store::from_word(entry.scale.load()), expected[i].scale);
    EXPECT_EQ(entry.extents.load(), 1u);
    EXPECT_EQ(entry.flags.load(), std::uint32_t{store::kPushAllParams});
  }
}

TEST(Batcher, AnUndividedPushKeepsItsScale) {
  Bench bench{2};
  const std::uint32_t flags = store::kPushAllParams | store::kPushUndivided;
  ASSERT_OK(
      bench.job.publish(bench.job.workers[0], {.flags = flags, .extents = 1, .lambda = -3.0}));
  ASSERT_TRUE(bench.batcher.open_next());
  EXPECT_EQ(store::from_word(bench.record().entries[0].scale.load()), -3.0);
}

TEST(Batcher, StalenessCountsForeignPushesSinceTheSnapshot) {
  Bench bench{2};
  TestWorker& zero = bench.job.workers[0];
  TestWorker& one = bench.job.workers[1];
  for (std::uint64_t n = 1; n <= 3; ++n) {
    bench.job.push_whole(0, n);
    ASSERT_TRUE(bench.batcher.open_next());
    bench.finish();
  }
  // Three foreign pushes are in; the snapshot of the fourth had one of them, or claims too many.
  for (const auto& [seen, staleness] : {std::pair<std::uint64_t, std::uint64_t>{1, 2}, {99, 0}}) {
    ASSERT_OK(bench.job.publish(one, {.flags = store::kPushEmpty, .snapshot_foreign = seen}));
    ASSERT_TRUE(bench.batcher.open_next());
    EXPECT_EQ(bench.record().entries[0].staleness.load(), staleness);
    bench.finish();
    EXPECT_EQ(one.queues.at(kStream).staleness_of(one.queues.at(kStream).applied()), staleness);
  }
  EXPECT_EQ(raw(zero.queues.at(kStream).applied()), 4u);
}

TEST(Batcher, AnEmptyPushCountsAndCarriesNothing) {
  Bench bench{1};
  ASSERT_OK(bench.job.publish(bench.job.workers[0], {.flags = store::kPushEmpty, .extents = 1}));
  ASSERT_TRUE(bench.batcher.open_next());
  EXPECT_EQ(bench.record().entries[0].extents.load(), 0u);
  EXPECT_EQ(bench.record().entries[0].after_clock.load(), 1u);
  EXPECT_EQ(bench.record().after_total.load(), 1u);
}

TEST(Batcher, BspWaitsForEveryActiveMemberAndSumsInRankOrder) {
  Bench bench{3, {.mode = store::Mode::kBsp}};
  bench.job.push_whole(2, 1);
  bench.job.push_whole(2, 2);
  bench.job.push_whole(0, 1);
  EXPECT_FALSE(bench.batcher.open_next());
  bench.job.push_whole(1, 1);
  // Ranks that run against the places: the order must be that of the ranks.
  for (std::uint32_t rank = 0; rank < 3; ++rank)
    bench.job.control().members[index(bench.job.workers[rank].member)].rank = 2 - rank;
  ASSERT_TRUE(bench.batcher.open_next());
  const store::BatchRecord& record = bench.record();
  EXPECT_EQ(record.kind.load(), raw(store::BatchKind::kMean));
  ASSERT_EQ(record.count.load(), 3u);
  EXPECT_EQ(store::from_word(record.mean_scale.load()), 1.0 / 3);
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_EQ(record.entries[i].member.load(), raw(bench.job.workers[2 - i].member));
  EXPECT_EQ(record.entries[0].sequence.load(), 1u) << "one step at a time";
  bench.finish();
  EXPECT_FALSE(bench.batcher.open_next()) << "rank 2's second push waits for the others'";
}

TEST(Batcher, BspStepIsTheMeanOfThoseThatStandAtNoBarrier) {
  Bench bench{3, {.mode = store::Mode::kBsp}};
  bench.job.push_whole(0, 1);
  bench.job.push_whole(1, 1);
  EXPECT_FALSE(bench.batcher.open_next());
  bench.job.counters(kStream, bench.job.workers[2]).barrier_arrived = 1;
  ASSERT_TRUE(bench.batcher.open_next());
  ASSERT_EQ(bench.record().count.load(), 2u);
  EXPECT_EQ(store::from_word(bench.record().mean_scale.load()), 0.5);
  bench.finish();
  bench.job.push_whole(0, 2);
  bench.job.push_whole(1, 2);
  bench.job.control().streams[0].barriers = 1;
  EXPECT_FALSE(bench.batcher.open_next()) << "rank 2 has left the barrier and can step";
}

TEST(Batcher, BspStepIncludesADeadWorkersPushAndWaitsForNoneOfIt) {
  Bench bench{3, {.mode = store::Mode::kBsp}};
  bench.job.push_whole(0, 1);
  bench.job.push_whole(1, 1);
  auto& members = bench.job.control().members;
  members[index(bench.job.workers[1].member)].state = raw(store::MemberState::kDraining);
  EXPECT_FALSE(bench.batcher.open_next()) << "rank 2 lives and has not pushed";
  members[index(bench.job.workers[2].member)].state = raw(store::MemberState::kDraining);
  ASSERT_TRUE(bench.batcher.open_next());
  ASSERT_EQ(bench.record().count.load(), 2u);
  EXPECT_EQ(store::from_word(bench.record().mean_scale.load()), 0.5);
}

TEST(Batcher, ASetIsABatchOfItsOwnAfterWhatItsMemberPushedBefore) {
  Bench bench{2};
  bench.job.push_whole(0, 1);
  bench.job.push_whole(1, 1);
  TestWorker& zero = bench.job.workers[0];
  ASSERT_OK(
      bench.job.publish(zero, {.flags = store::kPushSet | store::kPushAllParams, .extents = 1}));
  ASSERT_TRUE(bench.batcher.open_next());
  EXPECT_EQ(bench.record().kind.load(), raw(store::BatchKind::kAdd));
  EXPECT_EQ(bench.record().count.load(), 2u);
  bench.finish();
  ASSERT_TRUE(bench.batcher.open_next());
  const store::BatchRecord& record = bench.record();
  EXPECT_EQ(record.kind.load(), raw(store::BatchKind::kSet));
  ASSERT_EQ(record.count.load(), 1u);
  EXPECT_EQ(record.initialises.load(), 1u);
  EXPECT_EQ(record.entries[0].sequence.load(), 3u);
  EXPECT_EQ(record.entries[0].after_clock.load(), 1u) << "a set is no step";
  EXPECT_EQ(record.after_total.load(), 2u);
}

// Regression: an empty set marked extents as initialised without giving them values.
TEST(Batcher, AnEmptySetInitialisesNothing) {
  Bench bench{1};
  ASSERT_OK(bench.job.publish(bench.job.workers[0],
                              {.flags = store::kPushSet | store::kPushEmpty, .extents = 1}));
  ASSERT_TRUE(bench.batcher.open_next());
  EXPECT_EQ(bench.record().initialises.load(), 0u);
}

TEST(Batcher, RatesComeFromTheLastSixteenPushes) {
  Bench bench{1};
  for (int n = 0; n < 20; ++n) {
    bench.context.now += std::chrono::seconds{n < 4 ? 100 : 2};
    ASSERT_OK(bench.job.publish(bench.job.workers[0], {.flags = store::kPushEmpty}));
    ASSERT_TRUE(bench.batcher.open_next());
    bench.finish();
  }
  EXPECT_EQ(store::from_word(bench.job.counters(kStream, bench.job.workers[0]).rate.load()), 0.5);
}

TEST(Batcher, NoMorePushesThanConfigured) {
  Bench bench{2, {}, {.max_batch_pushes = 1}};
  bench.job.push_whole(1, 1);
  bench.job.push_whole(1, 2);
  for (const std::uint64_t sequence : {1u, 2u}) {
    ASSERT_TRUE(bench.batcher.open_next());
    ASSERT_EQ(bench.record().count.load(), 1u);
    EXPECT_EQ(bench.record().entries[0].sequence.load(), sequence);
    bench.finish();
  }
  EXPECT_FALSE(bench.batcher.open_next());
}

struct Bad {
  const char* name;
  void (*spoil)(store::MailStream&, store::PushDescriptor&);
  const char* reason;
};
class BadDescriptor : public ::testing::TestWithParam<Bad> {};

TEST_P(BadDescriptor, IsAnOffenceOfItsWorkerAndTheOthersGoOn) {
  Bench bench{2};
  bench.job.push_whole(1, 1);
  bench.job.push_whole(0, 1);
  store::MailStream& mail = bench.job.mail(bench.job.workers[0], kStream);
  GetParam().spoil(mail, mail.descriptors[2 % store::kSlots]);
  ASSERT_TRUE(bench.batcher.open_next());
  ASSERT_EQ(bench.record().count.load(), 1u);
  EXPECT_EQ(bench.record().entries[0].member.load(), raw(bench.job.workers[1].member));
  const auto offences = bench.batcher.take_offences();
  ASSERT_EQ(offences.size(), 1u);
  EXPECT_EQ(offences[0].member, bench.job.workers[0].member);
  EXPECT_THAT(offences[0].reason, ::testing::HasSubstr(GetParam().reason));
  EXPECT_TRUE(bench.batcher.take_offences().empty());
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, BadDescriptor,
    ::testing::Values(
        Bad{"Sequence", [](auto&, auto& d) { d.sequence = 3; }, "its sequence or incarnation"},
        Bad{"Incarnation", [](auto&, auto& d) { d.incarnation = 99; },
            "its sequence or incarnation"},
        Bad{"LayoutVersion", [](auto&, auto& d) { d.layout_version = 2; },
            "it is of layout version 2, the job is at 1"},
        Bad{"Flags", [](auto&, auto& d) { d.flags = 64; }, "its flags 0x40 are unknown"},
        Bad{"PlaneOfNoSet", [](auto&, auto& d) { d.flags = 16; },
            "its flags 0x10 do not go together"},
        Bad{"PlaneWhereThereIsNone", [](auto&, auto& d) { d.flags = store::set_plane(0); },
            "it sets plane 0 of extent 0, which has 0"},
        Bad{"Extents", [](auto&, auto& d) { d.extents = 2; },
            "it carries extents 0x2, registered are 0x1"},
        Bad{"NanLambda", [](auto&, auto& d) { d.lambda = store::to_word(std::nan("")); },
            "its scale is not finite"},
        Bad{"InfiniteLambda",
            [](auto&, auto& d) {
              d.lambda = store::to_word(std::numeric_limits<double>::infinity());
            },
            "its scale is not finite"},
        Bad{"ThreePublished", [](auto& mail, auto&) { mail.published = mail.published.load() + 2; },
            "more pushes than it has slots"}),
    [](const auto& param) { return param.param.name; });

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::uint32_t kSgd = raw(store::RuleKind::kSgd);
constexpr std::uint32_t kAdam = raw(store::RuleKind::kAdam);

struct BadOptions {
  const char* name;
  store::Rule rule;
  store::StepOptions options;
  const char* reason;
};
class BadStepOptions : public ::testing::TestWithParam<BadOptions> {};

TEST_P(BadStepOptions, AreAnOffenceIfTheirParameterIsCarried) {
  for (const bool carried : {true, false}) {
    Bench bench{1, {.rule = GetParam().rule}};
    TestWorker& worker = bench.job.workers[0];
    const std::size_t all[] = {0};
    bench.job.fill(
        worker, [](std::size_t, std::size_t) { return 1.0; },
        std::span{all}.first(carried ? 1 : 0));
    bench.job.options(worker, kStream)[0] = GetParam().options;
    ASSERT_OK(bench.job.publish(worker, {.flags = 0, .extents = 1}));
    EXPECT_EQ(bench.batcher.open_next(), !carried);
    const auto offences = bench.batcher.take_offences();
    ASSERT_EQ(offences.size(), carried ? 1u : 0u);
    if (!carried) continue;
    EXPECT_EQ(offences[0].member, worker.member);
    EXPECT_THAT(
        offences[0].reason,
        ::testing::HasSubstr(std::string{"its options of parameter 'w' "} + GetParam().reason));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, BadStepOptions,
    ::testing::Values(
        BadOptions{"NoKind", {store::RuleKind::kSgd, 1}, {}, "are of kind 0"},
        BadOptions{"OtherKind", {store::RuleKind::kSgd, 1}, {.kind = kAdam}, "are of kind 2"},
        BadOptions{"Flags",
                   {store::RuleKind::kSgd, 1},
                   {.kind = kSgd, .flags = 16},
                   "have unknown flags 0x10"},
        BadOptions{"Lr",
                   {store::RuleKind::kSgd, 1},
                   {.kind = kSgd, .lr = kNan},
                   "have a value that is not finite"},
        BadOptions{"Eps",
                   {store::RuleKind::kAdam, 2},
                   {.kind = kAdam, .eps = HUGE_VAL},
                   "have a value that is not finite"},
        BadOptions{"Momentum",
                   {store::RuleKind::kSgd, 0},
                   {.kind = kSgd, .momentum = 0.5},
                   "need more state than there is"},
        BadOptions{"Amsgrad",
                   {store::RuleKind::kAdam, 2},
                   {.kind = kAdam, .flags = store::kStepAmsgrad},
                   "need more state than there is"}),
    [](const auto& param) { return param.param.name; });

TEST(Batcher, BspSaysWhoseOptionsDifferFromThoseThatCount) {
  Bench bench{3, {.mode = store::Mode::kBsp, .rule = {store::RuleKind::kSgd, 1}}};
  const std::atomic<std::uint32_t>& differing = bench.job.control().streams[0].differing;
  const auto step = [&](double one, double two, bool one_carries) {
    for (const std::uint32_t rank : {0u, 1u, 2u}) {
      store::StepOptions& options = bench.job.options(bench.job.workers[rank], kStream)[0];
      options = {.kind = kSgd, .lr = rank == 0 ? 0.5 : rank == 1 ? one : two, .count = rank};
      if (rank == 1 && !one_carries)
        bench.job.push_part(1, 1, {});
      else
        bench.job.push_whole(rank, 1);
    }
    ASSERT_TRUE(bench.batcher.open_next());
    bench.finish();
  };
  step(0.5, 0.5, true);
  EXPECT_EQ(differing.load(), 0u);
  step(0.5, 0.25, true);
  EXPECT_EQ(differing.load(), 3u);
  step(0.125, 0.25, true);
  EXPECT_EQ(differing.load(), 2u);
  step(0.125, 0.5, false);
  EXPECT_EQ(differing.load(), 0u) << "who carries nothing has no say";
}

TEST(Batcher, ValuesInitialiseAnExtentAndPlanesDoNot) {
  Bench bench{1, {.rule = {store::RuleKind::kAdam, 2}}};
  TestWorker& worker = bench.job.workers[0];
  for (const std::uint32_t plane : {0u, 1u}) {
    ASSERT_OK(bench.job.publish(worker, {.flags = store::set_plane(plane), .extents = 1}));
    ASSERT_TRUE(bench.batcher.open_next());
    EXPECT_EQ(bench.record().kind.load(), raw(store::BatchKind::kSet));
    EXPECT_EQ(bench.record().initialises.load(), 0u);
    bench.finish();
  }
  ASSERT_OK(bench.job.publish(worker, {.flags = store::set_plane(2), .extents = 1}));
  EXPECT_FALSE(bench.batcher.open_next());
  ASSERT_EQ(bench.batcher.take_offences().size(), 1u);
}

}  // namespace
}  // namespace psplus::server
