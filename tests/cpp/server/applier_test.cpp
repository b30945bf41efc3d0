#include "server/applier.hpp"

#include <cstring>
#include <numeric>

#include "server/batcher.hpp"
#include "support/founded_job.hpp"

namespace psplus::server {
namespace {

using psplus::testing::delta_value;
using psplus::testing::FoundedJob;
using psplus::testing::initial_value;
using psplus::testing::kExtent;
using psplus::testing::kStream;
using psplus::testing::mixed_layout;
using psplus::testing::TestWorker;

/// Budget of one call and bytes between two stores.
struct Pace {
  std::size_t budget, piece_bytes;
};

class ApplierTest : public ::testing::TestWithParam<Pace> {
 protected:
  [[nodiscard]] FoundedJob job(std::uint32_t world, store::Mode mode = store::Mode::kAsync) const {
    return FoundedJob{
        world, mixed_layout(), {.mode = mode}, {.piece_bytes = GetParam().piece_bytes}};
  }
  /// One batch, formed and applied outside the job's core.
  static void apply(FoundedJob& job, std::size_t budget = GetParam().budget) {
    SlotSource slots{job.store()};
    Context context{.store = job.store(),
                    .pushes = slots,
                    .config = {.piece_bytes = GetParam().piece_bytes},
                    .now = job.now,
                    .effects = {}};
    Batcher batcher{context};
    ASSERT_TRUE(batcher.open_next());
    Applier applier{context};
    applier.begin(ApplyBatch{});
    int calls = 1;
    while (!applier.advance(budget)) ASSERT_LT(++calls, 100'000);
    EXPECT_FALSE(store::RecordState::unpack(job.control().record.state.load()).open);
  }
};

TEST_P(ApplierTest, TheInitialSetIsWhatTheShardHolds) {
  FoundedJob founded = job(1);
  founded.expect_values(initial_value);
  EXPECT_EQ(founded.control().extents[0].initialised.load(), 1u);
}

TEST_P(ApplierTest, SeveralPushesAreSubtractedOneAfterTheOther) {
  FoundedJob founded = job(2);
  founded.push_whole(1, 1, 1.0);
  founded.push_whole(0, 1, 0.5);
  founded.push_whole(0, 2, 0.25);
  apply(founded);
  founded.expect_values([](std::size_t p, std::size_t i) {
    return initial_value(p, i) - 0.25 * delta_value(0, 1, p, i) - 0.125 * delta_value(0, 2, p, i) -
           0.5 * delta_value(1, 1, p, i);
  });
}

TEST_P(ApplierTest, MeanIsSummedInRankOrder) {
  FoundedJob founded = job(4, store::Mode::kBsp);
  // Only one order of this sum gives 3 in float32: (2^24 + 1) - 2^24 is 0, not 1.
  const double terms[] = {16'777'216, -16'777'216, 1, 2};
  for (std::uint32_t rank = 4; rank-- > 0;) {
    founded.fill(founded.workers[rank], [&](std::size_t, std::size_t) { return terms[rank]; });
    ASSERT_OK(founded.publish(founded.workers[rank],
                              {.flags = store::kPushAllParams, .extents = 1, .lambda = 123}));
  }
  apply(founded);
  founded.expect_values(
      [](std::size_t p, std::size_t i) { return initial_value(p, i) - 0.25 * 3; });
}

TEST_P(ApplierTest, PartsTouchOnlyWhatTheyCarry) {
  FoundedJob founded = job(2);
  const std::size_t first[] = {0, 3, 4};  // float32 of both chunks, and the empty one
  const std::size_t second[] = {1, 3};    // a float64 one
  founded.push_part(0, 1, first, 1.0);
  founded.push_part(1, 1, second, 0.5);
  apply(founded);
  founded.expect_values([](std::size_t p, std::size_t i) {
    double value = initial_value(p, i);
    if (p == 0 || p == 3) value -= 0.5 * delta_value(0, 1, p, i);
    if (p == 1 || p == 3) value -= 0.25 * delta_value(1, 1, p, i);
    return value;
  });
}

TEST_P(ApplierTest, EverySetOfCarriedParametersAlone) {
  for (std::size_t carried = 0; carried < 7; ++carried) {
    FoundedJob founded = job(1);
    const std::size_t list[] = {carried};
    founded.push_part(0, 1, list, 2.0);
    apply(founded);
    founded.expect_values([&](std::size_t p, std::size_t i) {
      return initial_value(p, i) - (p == carried ? 2 * delta_value(0, 1, p, i) : 0);
    });
  }
}

TEST_P(ApplierTest, AWholeAndAPartialPushInOneBatch) {
  FoundedJob founded = job(2);
  const std::size_t list[] = {2, 5};
  founded.push_part(0, 1, list, 1.0);
  founded.push_whole(1, 1, 1.0);
  apply(founded);
  founded.expect_values([](std::size_t p, std::size_t i) {
    return initial_value(p, i) - (p == 2 || p == 5 ? 0.5 * delta_value(0, 1, p, i) : 0) -
           0.5 * delta_value(1, 1, p, i);
  });
}

TEST_P(ApplierTest, UntouchedChunksKeepTheirBatch) {
  FoundedJob founded = job(1);
  const auto batch_of = [&](std::uint32_t c) {
    return store::ChunkEntry::unpack(
               founded.store().shard(kExtent).view.entry(ChunkIndex{c}).load())
        .batch;
  };
  const std::size_t list[] = {1};  // two chunks of the float64 section
  founded.push_part(0, 1, list);
  apply(founded);
  const auto& layout = founded.layout;
  for (std::uint32_t c = 0; c < layout.chunk_count(); ++c) {
    const auto& place = layout.places()[1];
    const bool touched = place.byte_offset < (c + 1) * layout.chunk_bytes() &&
                         place.byte_end() > c * layout.chunk_bytes();
    EXPECT_EQ(batch_of(c), BatchId{touched ? 2u : 1u}) << "chunk " << c;
  }
}

TEST_P(ApplierTest, AnEmptyPushMovesCountersOnly) {
  FoundedJob founded = job(2);
  founded.fill(founded.workers[1], initial_value);
  ASSERT_OK(founded.publish(founded.workers[1],
                            {.flags = store::kPushEmpty | store::kPushAllParams, .extents = 1}));
  apply(founded);
  founded.expect_values(initial_value);
  EXPECT_EQ(founded.counters(kStream, founded.workers[1]).clock.load(), 1u);
  EXPECT_EQ(founded.control().streams[0].total_pushes.load(), 1u);
  EXPECT_EQ(raw(founded.workers[1].queues.at(kStream).applied()), 1u);
}

TEST_P(ApplierTest, CountersAndAcknowledgementsStandAsTheRecordSays) {
  FoundedJob founded = job(2);
  founded.push_whole(0, 1);
  founded.push_whole(0, 2);
  founded.push_whole(1, 1);
  apply(founded);
  const TestWorker& zero = founded.workers[0];
  const TestWorker& one = founded.workers[1];
  EXPECT_EQ(founded.counters(kStream, zero).clock.load(), 2u);
  EXPECT_EQ(founded.counters(kStream, zero).pushes.load(), 2u);
  EXPECT_EQ(founded.counters(kStream, zero).dedup.load(),
            (store::PushMark{zero.incarnation, Sequence{3}}.pack()));
  EXPECT_EQ(founded.counters(kStream, one).clock.load(), 1u);
  EXPECT_EQ(founded.control().streams[0].total_pushes.load(), 3u);
  EXPECT_EQ(founded.mail(zero, kStream).applied.load(), 3u);
  EXPECT_EQ(founded.mail(one, kStream).applied.load(), 1u);
  EXPECT_EQ(founded.mail(one, kStream).acknowledgements[1].sequence.load(), 1u);
  EXPECT_EQ(founded.mail(one, kStream).acknowledgements[1].staleness.load(), 2u);
}

TEST_P(ApplierTest, SecondExtentOfAStream) {
  FoundedJob founded = job(1);
  const store::ExtentLayout more{{{"h", DType::float32, {50}}, {"k", DType::float64, {2}}}, 128};
  store::ControlBlock& control = founded.control();
  TestWorker& worker = founded.workers[0];
  founded.open(worker, kStream, more, {.extent = StreamExtent{1}});
  for (const std::uint32_t flags :
       {store::kPushAllParams | store::kPushSet, std::uint32_t{store::kPushAllParams}}) {
    std::vector<double> h(50), k(2);
    std::iota(h.begin(), h.end(), flags == store::kPushAllParams ? 1.0 : 500.0);
    std::iota(k.begin(), k.end(), flags == store::kPushAllParams ? 7.0 : 900.0);
    const auto slot = founded.slot(worker, kStream, 1);
    FoundedJob::write(more, 0, h, slot);
    FoundedJob::write(more, 1, k, slot);
    ASSERT_OK(founded.publish(worker, {.flags = flags, .extents = 2}));
    apply(founded);
  }
  founded.expect_values(initial_value);  // the first extent was not carried
  EXPECT_EQ(founded.values(ExtentId{1}, 0), std::vector<double>(50, 499.0));
  EXPECT_EQ(founded.values(ExtentId{1}, 1), std::vector<double>(2, 893.0));
  EXPECT_EQ(control.extents[1].initialised.load(), 1u);
}

TEST_P(ApplierTest, ACutIsOneStateWithItsCounters) {
  FoundedJob founded = job(2);
  TestWorker& one = founded.workers[1];
  founded.send(one, wire::NeedPull{kStream});
  ASSERT_EQ(one.got<wire::PullReady>().size(), 1u);
  founded.push_whole(0, 1);
  apply(founded);
  SlotSource slots{founded.store()};
  Context context{
      .store = founded.store(), .pushes = slots, .config = {}, .now = founded.now, .effects = {}};
  Applier applier{context};
  applier.begin(TakeCut{.stream = kStream,
                        .member = one.member,
                        .incarnation = one.incarnation,
                        .buffer = 1,
                        .releases = std::nullopt,
                        .request = 43});
  while (!applier.advance(GetParam().budget)) {
  }
  EXPECT_EQ(founded.mail(one, kStream).cut_done.load(), 43u);
  const store::PullView pull = founded.store().pull(one.member, kExtent);
  for (std::size_t p = 0; p < founded.layout.places().size(); ++p) {
    const auto values = FoundedJob::values_in(founded.layout, p, pull.values(1));
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(values[i], initial_value(p, i) - 0.5 * delta_value(0, 1, p, i));
  }
  const auto& cut = pull.header().cuts[1];
  EXPECT_EQ(cut.batch.load(), 2u);
  EXPECT_EQ(cut.total_pushes.load(), 1u);
  EXPECT_EQ(cut.clock[index(founded.workers[0].member)].load(), 1u);
  EXPECT_EQ(cut.pushes[index(founded.workers[0].member)].load(), 1u);
  EXPECT_EQ(cut.clock[index(one.member)].load(), 0u);
}

TEST_P(ApplierTest, ACutForALifeThatIsOverDoesNothing) {
  FoundedJob founded = job(1);
  SlotSource slots{founded.store()};
  Context context{
      .store = founded.store(), .pushes = slots, .config = {}, .now = founded.now, .effects = {}};
  Applier applier{context};
  applier.begin(TakeCut{.stream = kStream,
                        .member = founded.workers[0].member,
                        .incarnation = Incarnation{999},
                        .buffer = 0,
                        .releases = Step{5},
                        .request = 0});
  EXPECT_TRUE(applier.advance(GetParam().budget));
  EXPECT_EQ(founded.mail(founded.workers[0], kStream).released.load(), 0u);
  EXPECT_TRUE(context.effects.empty());
}

INSTANTIATE_TEST_SUITE_P(Paces, ApplierTest,
                         ::testing::Values(Pace{~std::size_t{0}, 65'536}, Pace{1, 64},
                                           Pace{100, 64}, Pace{65, 128}, Pace{1, 65'536}),
                         [](const auto& param) {
                           return "Budget" +
                                  (param.param.budget > 1000 ? "All"
                                                             : std::to_string(param.param.budget)) +
                                  "Piece" + std::to_string(param.param.piece_bytes);
                         });

}  // namespace
}  // namespace psplus::server
