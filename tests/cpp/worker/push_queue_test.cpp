#include "worker/push_queue.hpp"

#include <memory>
#include <thread>

#include "support/status_matchers.hpp"

namespace psplus::worker {
namespace {

using psplus::testing::FailsWith;
using store::PushMark;

constexpr Incarnation kLife{0x4321};

class PushQueueTest : public ::testing::Test {
 protected:
  PushQueueTest() { mail_->published = PushMark{kLife, Sequence{0}}.pack(); }
  std::unique_ptr<store::MailStream> mail_ = std::make_unique<store::MailStream>();
  PushQueue queue_{*mail_, kLife};
};

TEST_F(PushQueueTest, PublishesTheWholeDescriptorUnderTheNextSequence) {
  for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) {
    EXPECT_EQ(queue_.next(), Sequence{sequence});
    ASSERT_OK(queue_.publish({.flags = static_cast<std::uint32_t>(10 + sequence),
                              .extents = 0x20 + sequence,
                              .lambda = 0.5 * static_cast<double>(sequence),
                              .snapshot_foreign = 40 + sequence,
                              .epoch = Epoch{static_cast<std::uint32_t>(60 + sequence)}}));
    EXPECT_EQ(mail_->published.load(), (PushMark{kLife, Sequence{sequence}}.pack()));
    const store::PushDescriptor& d = mail_->descriptors[sequence % 2];
    EXPECT_EQ(d.sequence.load(), sequence);
    EXPECT_EQ(d.incarnation.load(), raw(kLife));
    EXPECT_EQ(d.flags.load(), 10 + sequence);
    EXPECT_EQ(d.extents.load(), 0x20 + sequence);
    EXPECT_EQ(store::from_word(d.lambda.load()), 0.5 * static_cast<double>(sequence));
    EXPECT_EQ(d.snapshot_foreign.load(), 40 + sequence);
    EXPECT_EQ(d.epoch.load(), 60 + sequence);
  }
}

TEST_F(PushQueueTest, ASlotIsFreeOnceThePushBeforeTheLastIsApplied) {
  EXPECT_TRUE(queue_.slot_is_free());
  ASSERT_OK(queue_.publish({}));
  EXPECT_TRUE(queue_.slot_is_free()) << "there are two";
  EXPECT_FALSE(queue_.all_applied());
  ASSERT_OK(queue_.publish({}));
  EXPECT_FALSE(queue_.slot_is_free());
  mail_->applied = 1;
  EXPECT_TRUE(queue_.slot_is_free());
  EXPECT_FALSE(queue_.all_applied());
  EXPECT_EQ(queue_.applied(), Sequence{1});
  mail_->applied = 2;
  EXPECT_TRUE(queue_.all_applied());
}

TEST_F(PushQueueTest, AClosedQueueTakesNothing) {
  ASSERT_OK(queue_.publish({}));
  EXPECT_FALSE(queue_.closed());
  mail_->published.fetch_or(PushMark::kClosed);
  EXPECT_TRUE(queue_.closed());
  EXPECT_THAT(queue_.publish({}), FailsWith(StatusCode::kClosed, "the push did not happen"));
  EXPECT_EQ(mail_->published.load(), (PushMark{kLife, Sequence{1}}.pack()) | PushMark::kClosed);
  EXPECT_EQ(queue_.next(), Sequence{2});
}

TEST_F(PushQueueTest, ReadsWhatTheServerSays) {
  mail_->released = 17;
  EXPECT_EQ(queue_.released(), Step{17});
  mail_->acknowledgements[0].staleness = 5;
  mail_->acknowledgements[1].staleness = 6;
  EXPECT_EQ(queue_.staleness_of(Sequence{8}), 5u);
  EXPECT_EQ(queue_.staleness_of(Sequence{9}), 6u);
}

// A closing server and a publishing worker: the server has seen the push, or it did not happen.
TEST_F(PushQueueTest, PublishAndCloseAgreeOnWhatHappened) {
  for (int turn = 0; turn < 300; ++turn) {
    store::MailStream mail{};
    mail.published = PushMark{kLife, Sequence{0}}.pack();
    PushQueue queue{mail, kLife};
    std::atomic<bool> go{false};
    Sequence seen{};
    std::thread server{[&] {
      while (!go.load()) {
      }
      seen = PushMark::unpack(mail.published.fetch_or(PushMark::kClosed)).sequence;
    }};
    go = true;
    std::uint64_t published = 0;
    while (queue.publish({}).ok()) ++published;
    server.join();
    ASSERT_EQ(raw(seen), published);
    ASSERT_EQ(mail.published.load(),
              (PushMark{kLife, Sequence{published}}.pack()) | PushMark::kClosed);
  }
}

}  // namespace
}  // namespace psplus::worker
