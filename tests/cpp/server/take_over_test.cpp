// A server is killed at every single store that it makes, and a successor goes on: what the workers
// see in the end is what they would have seen without the kill.

#include <functional>

#include "support/founded_job.hpp"
#include "support/heap_pushes.hpp"

namespace psplus::server {
namespace {

using psplus::testing::FoundedJob;
using psplus::testing::HeapPushes;
using psplus::testing::kExtent;
using psplus::testing::Killed;
using psplus::testing::kStream;
using psplus::testing::mixed_layout;
using psplus::testing::ServerHarness;
using psplus::testing::TestWorker;

/// Everything of a job that a worker can see and that a kill must not change.
struct Outcome {
  std::vector<std::vector<double>> values;  ///< and state, where the servers step
  std::vector<std::uint64_t> counters;
  bool operator==(const Outcome&) const = default;
};

std::size_t outcome_params(ServerHarness& job) {
  return job.store().shard(kExtent).layout.params().size();
}

Outcome outcome_of(ServerHarness& job) {
  Outcome outcome;
  const store::ControlBlock& control = job.control();
  const store::StreamEntry& stream = control.streams[0];
  for (std::size_t p = 0; p < outcome_params(job); ++p)
    outcome.values.push_back(job.values(kExtent, p));
  auto& out = outcome.counters;
  const std::uint32_t planes = job.store().shard(kExtent).view.rule().planes;
  out = {stream.total_pushes.load(), stream.barriers.load(), control.extents[0].initialised.load(),
         control.layout_version.load(),
         store::RecordState::unpack(control.record.state.load()).open};
  for (std::size_t p = 0; p < outcome_params(job) && planes != 0; ++p) {
    for (std::uint32_t a = 0; a < planes; ++a) outcome.values.push_back(job.plane(kExtent, p, a));
    for (const std::uint64_t count : job.step_counts(kExtent, p)) out.push_back(count);
  }
  for (std::size_t m = 0; m < 4; ++m) {
    const store::StreamMember& member = stream.members[m];
    out.insert(out.end(), {member.state.load(), member.clock.load(), member.pushes.load()});
    const MemberId id{static_cast<std::uint16_t>(m)};
    if (!job.store().has_mailbox(id)) continue;
    const store::MailStream& mail = job.store().mail(id, kStream);
    out.insert(out.end(), {mail.applied.load(), mail.released.load(), mail.cut_done.load(),
                           mail.barrier_released.load()});
    for (const store::Acknowledgement& ack : mail.acknowledgements)
      out.insert(out.end(), {ack.sequence.load(), ack.staleness.load()});
    out.push_back(store::PushMark::unpack(member.dedup.load()).sequence == Sequence{}
                      ? 0
                      : raw(store::PushMark::unpack(member.dedup.load()).sequence));
  }
  return outcome;
}

struct Scenario {
  const char* name;
  wire::OpenStream how;
  void (*publish)(FoundedJob&);
};

class TakeOver : public ::testing::TestWithParam<Scenario> {
 protected:
  static std::unique_ptr<FoundedJob> job(ServerHarness::Pushes pushes = ServerHarness::in_slots) {
    auto made = std::make_unique<FoundedJob>(3, mixed_layout(), GetParam().how,
                                             Config{.piece_bytes = 64}, std::move(pushes));
    GetParam().publish(*made);
    return made;
  }
};

TEST_P(TakeOver, AfterAKillAtEveryStoreGivesTheSameEnd) {
  const auto calm = job();
  calm->kill.arm(~std::uint64_t{0});
  calm->run(64);
  const std::uint64_t stores = calm->kill.count();
  const Outcome expected = outcome_of(*calm);
  ASSERT_GT(stores, 20u);
  for (std::uint64_t at = 0; at < stores; ++at) {
    SCOPED_TRACE("killed at store " + std::to_string(at) + " of " + std::to_string(stores));
    const auto killed = job();
    killed->kill.arm(at);
    ASSERT_THROW(killed->run(64), Killed);
    ASSERT_OK(killed->take_over());
    for (TestWorker& worker : killed->workers)
      if (worker.connected) killed->resume(worker);
    killed->run(64);
    const Outcome found = outcome_of(*killed);
    ASSERT_EQ(found.counters, expected.counters);
    ASSERT_EQ(found.values, expected.values);
  }
}

// Slots and the buffers of a network look alike: a push may lie anywhere until it is released.
TEST_P(TakeOver, PushesInBuffersOfTheirOwnGiveTheSameEnd) {
  const auto calm = job();
  calm->kill.arm(~std::uint64_t{0});
  calm->run(64);
  const std::uint64_t stores = calm->kill.count();
  const Outcome expected = outcome_of(*calm);
  for (std::uint64_t at = 0; at <= stores; ++at) {
    SCOPED_TRACE("killed at store " + std::to_string(at) + " of " + std::to_string(stores));
    HeapPushes pushes;
    const auto killed = job([&](store::Store& store) { return pushes.source(store); });
    killed->kill.arm(at);
    if (at < stores) {
      ASSERT_THROW(killed->run(64), Killed);
      ASSERT_OK(killed->take_over());
      for (TestWorker& worker : killed->workers)
        if (worker.connected) killed->resume(worker);
    }
    killed->run(64);
    const Outcome found = outcome_of(*killed);
    ASSERT_EQ(found.counters, expected.counters);
    ASSERT_EQ(found.values, expected.values);
    ASSERT_EQ(pushes.held(), 0u);
    ASSERT_GT(pushes.released(), 0u);  // the founder's values at least
  }
}

// Killed again in the recovery itself: every store of a first successor's life ends it, too.
TEST_P(TakeOver, AKilledSuccessorHasASuccessor) {
  const auto calm = job();
  calm->kill.arm(~std::uint64_t{0});
  calm->run(64);
  const std::uint64_t stores = calm->kill.count();
  const Outcome expected = outcome_of(*calm);
  for (std::uint64_t at = 3; at < stores; at += 7) {
    const auto killed = job();
    killed->kill.arm(at);
    ASSERT_THROW(killed->run(64), Killed);
    bool ended = false;
    for (std::uint64_t second = 0; !ended; second += 3) {
      SCOPED_TRACE("killed at store " + std::to_string(at) + ", then at " + std::to_string(second));
      try {
        ASSERT_OK(killed->take_over(second));
        ended = true;
      } catch (const Killed&) {
      }
      ASSERT_LT(second, 5000u);
    }
    for (TestWorker& worker : killed->workers)
      if (worker.connected) killed->resume(worker);
    killed->run(64);
    ASSERT_EQ(outcome_of(*killed).counters, expected.counters);
    ASSERT_EQ(outcome_of(*killed).values, expected.values);
  }
}

void several_pushes(FoundedJob& job) {
  const std::size_t some[] = {0, 1, 5};
  job.push_whole(0, 1, 0.5);
  job.push_part(1, 1, some);
  job.push_part(1, 2, some, 0.25);
  job.push_whole(2, 1);
}
void one_of_each(FoundedJob& job) {
  for (const std::uint32_t rank : {0u, 1u, 2u}) job.push_whole(rank, 1);
}
/// Options of the worker's next push: a rate of its own for each parameter.
void fill_options(FoundedJob& job, std::uint32_t rank, const store::StepOptions& options) {
  const auto all = job.options(job.workers[rank], kStream);
  for (std::size_t p = 0; p < all.size(); ++p) {
    all[p] = options;
    all[p].lr *= static_cast<double>(p + rank + 1);
  }
}
constexpr store::StepOptions kMomentum{
    .kind = raw(store::RuleKind::kSgd), .lr = 1e-4, .momentum = 0.9};
constexpr store::StepOptions kAdam{
    .kind = raw(store::RuleKind::kAdam), .lr = 0.5, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
void several_gradients(FoundedJob& job) {
  const std::size_t some[] = {0, 1, 5};
  fill_options(job, 0, kMomentum);
  job.push_whole(0, 1, 0.5);
  for (const std::uint64_t number : {1u, 2u}) {
    fill_options(job, 1, kMomentum);
    job.push_part(1, number, some);
  }
  fill_options(job, 2, kMomentum);
  job.push_whole(2, 1);
}
void one_gradient_of_each(FoundedJob& job) {
  for (const std::uint32_t rank : {0u, 1u, 2u}) {
    fill_options(job, rank, kAdam);
    job.push_whole(rank, 1);
  }
}
void a_set_of_state(FoundedJob& job) {
  TestWorker& one = job.workers[1];
  for (const std::uint32_t a : {0u, 1u}) {
    job.fill(one, [&](std::size_t p, std::size_t i) { return static_cast<double>(p + i * a + 3); });
    for (store::StepOptions& options : job.options(one, kStream)) options.count = 7;
    EXPECT_OK(job.publish(one, {.flags = store::set_plane(a), .extents = 1}));
  }
  fill_options(job, 0, kAdam);
  job.push_whole(0, 1);
}
void a_set(FoundedJob& job) {
  job.fill(job.workers[1],
           [](std::size_t p, std::size_t i) { return static_cast<double>(p * 5000 + i + 17); });
  EXPECT_OK(job.publish(job.workers[1],
                        {.flags = store::kPushSet | store::kPushAllParams, .extents = 1}));
  job.push_whole(0, 1);
}
void empty_pushes_and_a_barrier(FoundedJob& job) {
  for (TestWorker& worker : job.workers) {
    EXPECT_OK(job.publish(worker, {.flags = store::kPushEmpty}));
    job.mail(worker, kStream).barrier_arrived = 1;
  }
}
void a_death_with_pushes(FoundedJob& job) {
  job.push_whole(0, 1);
  job.push_whole(1, 1);
  job.push_whole(1, 2);
  job.push_whole(2, 1);
  job.lose(job.workers[1]);
}

INSTANTIATE_TEST_SUITE_P(
    Scenarios, TakeOver,
    ::testing::Values(Scenario{"Asynchronous", {}, several_pushes},
                      Scenario{"Bounded", {.bound = 0}, several_pushes},
                      Scenario{"Bsp", {.mode = store::Mode::kBsp}, one_of_each},
                      Scenario{"Buffered", {.pull = store::PullMode::kBuffered}, one_of_each},
                      Scenario{"Set", {}, a_set},
                      Scenario{"Momentum", {.rule = {store::RuleKind::kSgd, 1}}, several_gradients},
                      Scenario{"BspAdam",
                               {.mode = store::Mode::kBsp, .rule = {store::RuleKind::kAdam, 2}},
                               one_gradient_of_each},
                      Scenario{"StateSet", {.rule = {store::RuleKind::kAdam, 2}}, a_set_of_state},
                      Scenario{"EmptyAndBarrier", {}, empty_pushes_and_a_barrier},
                      Scenario{"Death", {}, a_death_with_pushes}),
    [](const auto& param) { return param.param.name; });

/// Brings a worker as far as its registration, whatever it has reached.
void persist(ServerHarness& server, TestWorker& worker, std::uint32_t world) {
  if (worker.got<wire::Attached>().empty()) {
    worker.connected = true;
    worker.held.clear();
    worker.inbox.clear();
    server.reconnect(worker);
    server.send(worker,
                wire::Attach{
                    .rank = Rank{worker.rank}, .world_size = world, .process = 1000 + worker.rank});
  }
  if (worker.got<wire::StreamReady>().empty()) server.open(worker, kStream, mixed_layout());
}

TEST(TakeOverOfAStart, AfterAKillAtEveryStoreTheJobIsFounded) {
  bool reached_the_end = false;
  for (std::uint64_t at = 0; !reached_the_end; ++at) {
    SCOPED_TRACE("killed at store " + std::to_string(at));
    ServerHarness server;
    server.attach(0, 2);
    TestWorker& one = server.connect();
    one.rank = 1;
    server.kill.arm(at);
    const auto start = [&] {
      for (TestWorker& worker : server.workers) persist(server, worker, 2);
      server.run();
    };
    try {
      start();
      reached_the_end = true;
    } catch (const Killed&) {
      ASSERT_OK(server.take_over());
      for (TestWorker& worker : server.workers) {
        if (worker.got<wire::Attached>().empty()) continue;
        server.resume(worker);
        ASSERT_TRUE(worker.connected);
      }
      start();
    }
    server.kill.disarm();
    ASSERT_EQ(one.got<wire::StreamReady>().size() > 0, true);
    ASSERT_TRUE(server.workers[0].got<wire::StreamReady>().back().provides);
    ASSERT_FALSE(one.got<wire::StreamReady>().back().provides);
    std::vector<double> values(15);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i + 3);
    ASSERT_OK(server.push(server.workers[0], kStream, values,
                          {.flags = store::kPushSet | store::kPushAllParams, .extents = 1}));
    ASSERT_OK(server.push(one, kStream, {}, {.flags = store::kPushEmpty}));
    server.run();
    ASSERT_EQ(server.values(kExtent), values);
    ASSERT_EQ(server.mail(one, kStream).applied.load(), 1u);
    ASSERT_LT(at, 2000u);
  }
}

}  // namespace
}  // namespace psplus::server
