#include "collectives/messages.hpp"

#include <future>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "collectives/collectives.hpp"
#include "collectives/thread_ranks.hpp"

namespace psplus::collectives {
namespace {

using psplus::testing::FailsWith;
using testing::patience;
using testing::run_ranks;

struct Outcome {
  Status status;
  Rank peer;
};

/// A request whose outcome can be waited for.
class Request {
 public:
  [[nodiscard]] Messages::Completion completion() {
    return [promise = promise_](const Status& status, Rank peer) {
      promise->set_value({status, peer});
    };
  }
  Outcome wait() { return future_.get(); }

 private:
  std::shared_ptr<std::promise<Outcome>> promise_ = std::make_shared<std::promise<Outcome>>();
  std::future<Outcome> future_ = promise_->get_future();
};

std::uint32_t value_at(Rank from, Rank to, std::uint32_t message, std::size_t i) {
  return (raw(from) << 28) ^ (raw(to) << 24) ^ (message << 16) ^ static_cast<std::uint32_t>(i);
}
std::vector<std::uint32_t> message_of(Rank from, Rank to, std::uint32_t message, std::size_t n) {
  std::vector<std::uint32_t> data(n);
  for (std::size_t i = 0; i < n; ++i) data[i] = value_at(from, to, message, i);
  return data;
}

class MessagesTest : public ::testing::TestWithParam<std::size_t> {};

// In 32-bit words: a ring of two ranks holds 131072, a step of it 32768, a frame header 4.
INSTANTIATE_TEST_SUITE_P(Sizes, MessagesTest,
                         ::testing::Values(0, 1, 3, 4, 5, 32'767, 32'768, 131'063, 131'068, 131'072,
                                           131'073, 500'001));

TEST_P(MessagesTest, EveryRankToEveryRankItselfIncluded) {
  const std::size_t n = GetParam();
  run_ranks(3, [n](Group& group) {
    Messages messages{group};
    for (std::uint32_t turn = 0; turn < 3; ++turn) {
      std::vector<std::vector<std::uint32_t>> outs;
      std::vector<std::vector<std::uint32_t>> ins(3, std::vector<std::uint32_t>(n, 0xdead));
      std::vector<Request> sends(3);
      std::vector<Request> receives(3);
      for (std::uint32_t r = 0; r < 3; ++r)
        outs.push_back(message_of(group.rank(), Rank{r}, turn, n));
      for (std::uint32_t r = 0; r < 3; ++r) {
        messages.receive(Rank{r}, Tag{5}, ins[r].data(), n * 4, patience(),
                         receives[r].completion());
        messages.send(Rank{r}, Tag{5}, outs[r].data(), n * 4, patience(), sends[r].completion());
      }
      for (std::uint32_t r = 0; r < 3; ++r) {
        ASSERT_OK(sends[r].wait().status);
        const Outcome got = receives[r].wait();
        ASSERT_OK(got.status);
        ASSERT_EQ(got.peer, Rank{r});
        ASSERT_EQ(ins[r], message_of(Rank{r}, group.rank(), turn, n));
      }
    }
    ASSERT_OK(barrier(group, patience()));
  });
}

TEST(Messages, TagsAreMatchedInAnyOrder) {
  constexpr std::uint32_t kCount = 6;
  for (const std::size_t n : {std::size_t{10}, std::size_t{200'000}}) {
    run_ranks(2, [n](Group& group) {
      Messages messages{group};
      const Rank other{1 - raw(group.rank())};
      std::vector<std::vector<std::uint32_t>> buffers(kCount);
      std::vector<Request> requests(kCount);
      for (std::uint32_t i = 0; i < kCount; ++i) {
        const std::uint32_t tag = group.rank() == Rank{0} ? i : kCount - 1 - i;
        if (group.rank() == Rank{0}) {
          buffers[i] = message_of(group.rank(), other, tag, n);
          messages.send(other, Tag(tag), buffers[i].data(), n * 4, patience(),
                        requests[i].completion());
        } else {
          buffers[i].resize(n);
          messages.receive(other, Tag(tag), buffers[i].data(), n * 4, patience(),
                           requests[i].completion());
          ASSERT_OK(requests[i].wait().status);
          ASSERT_EQ(buffers[i], message_of(other, group.rank(), tag, n));
        }
      }
      if (group.rank() != Rank{0}) return;
      for (Request& request : requests) ASSERT_OK(request.wait().status);
    });
  }
}

TEST(Messages, AnySourceGetsEachSendersMessagesInOrder) {
  run_ranks(4, [](Group& group) {
    Messages messages{group};
    constexpr std::uint32_t kEach = 20;
    if (group.rank() != Rank{0}) {
      for (std::uint32_t i = 0; i < kEach; ++i) {
        Request request;
        messages.send(Rank{0}, Tag{0}, &i, 4, patience(), request.completion());
        ASSERT_OK(request.wait().status);
      }
      return;
    }
    std::vector<std::uint32_t> next(4, 0);
    for (std::uint32_t i = 0; i < 3 * kEach; ++i) {
      std::uint32_t got = 0;
      Request request;
      messages.receive(std::nullopt, Tag{0}, &got, 4, patience(), request.completion());
      const Outcome outcome = request.wait();
      ASSERT_OK(outcome.status);
      ASSERT_EQ(got, next[index(outcome.peer)]++);
    }
  });
}

TEST(Messages, TravelBesideCollectives) {
  run_ranks(2, [](Group& group) {
    Messages messages{group};
    const Rank other{1 - raw(group.rank())};
    std::vector<std::uint32_t> in(100'000);
    const auto out = message_of(group.rank(), other, 1, in.size());
    Request receive;
    Request send;
    messages.receive(other, Tag{0}, in.data(), in.size() * 4, patience(), receive.completion());
    for (int i = 0; i < 50; ++i) {
      float x = 1;
      ASSERT_OK(all_reduce(group, &x, &x, 1, {Element::float32, Reduction::sum}, patience()));
      ASSERT_EQ(x, 2);
    }
    messages.send(other, Tag{0}, out.data(), out.size() * 4, patience(), send.completion());
    ASSERT_OK(receive.wait().status);
    ASSERT_OK(send.wait().status);
    ASSERT_EQ(in, message_of(other, group.rank(), 1, in.size()));
    ASSERT_OK(barrier(group, patience()));
  });
}

TEST(Messages, FailuresNameTheOtherRank) {
  run_ranks(2, [](Group& group) {
    Messages messages{group};
    if (group.rank() == Rank{0}) {
      int x = 0;
      Request late;
      messages.receive(Rank{1}, Tag{0}, &x, 4, Deadline::after(milliseconds{50}),
                       late.completion());
      EXPECT_THAT(late.wait().status, FailsWith(StatusCode::kTimeout, "rank 1"));
      EXPECT_OK(barrier(group, patience()));  // nothing had begun: the group goes on
      Request wrong;
      messages.receive(Rank{1}, Tag{1}, &x, 4, patience(), wrong.completion());
      EXPECT_THAT(wrong.wait().status, FailsWith(StatusCode::kConfig, "8 bytes came from rank 1"));
      EXPECT_OK(barrier(group, patience()));
      Request lost;
      messages.receive(Rank{1}, Tag{0}, &x, 4, patience(), lost.completion());
      EXPECT_THAT(lost.wait().status, FailsWith(StatusCode::kPeerLost, "rank 1"));
    } else {
      EXPECT_OK(barrier(group, patience()));
      const std::uint64_t eight = 8;
      Request sent;
      messages.send(Rank{0}, Tag{1}, &eight, 8, patience(), sent.completion());
      EXPECT_OK(sent.wait().status);
      EXPECT_OK(barrier(group, patience()));
    }
  });
}

TEST(Messages, ShutdownCompletesWhatIsOpen) {
  run_ranks(1, [](Group& group) {
    Messages messages{group};
    int x = 0;
    Request open;
    messages.receive(Rank{0}, Tag{0}, &x, 4, patience(), open.completion());
    messages.shutdown();
    EXPECT_THAT(open.wait().status, FailsWith(StatusCode::kClosed, "shut down"));
    Request after;
    messages.send(Rank{0}, Tag{0}, &x, 4, patience(), after.completion());
    EXPECT_THAT(after.wait().status, FailsWith(StatusCode::kClosed, "shut down"));
  });
}

}  // namespace
}  // namespace psplus::collectives
