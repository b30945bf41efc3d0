#include "store/store.hpp"

#include <algorithm>
#include <cstring>
#include <random>

#include "support/heap_segments.hpp"
#include "support/status_matchers.hpp"

namespace psplus::store {
namespace {

using psplus::testing::FailsWith;
using psplus::testing::HeapSource;

const ExtentLayout& layout() {
  static const ExtentLayout made{{{"w", DType::float32, {40}}, {"v", DType::float64, {3}}}, 64};
  return made;
}

constexpr MemberId kMember{3};
constexpr MemberId kOther{7};
constexpr Incarnation kLife{21};
constexpr Incarnation kOtherLife{22};
constexpr ExtentId kExtent{0};

/// A job with one stream over one extent and two registered workers, written word by word.
class StoreTest : public ::testing::Test {
 protected:
  StoreTest() {
    EXPECT_OK(store_.create(99));
    ControlBlock& control = store_.control();
    const auto shard = store_.create_shard(kExtent, layout());
    EXPECT_OK(shard);
    control.extents[0].shard_segment = raw(*shard);
    control.extents[0].open = 1;
    control.layout_version = 1;
    control.streams[0].extents[0] = raw(kExtent);
    control.streams[0].extent_count = 1;
    control.streams[0].open = 1;
    join(kMember, kLife);
    join(kOther, kOtherLife);
  }

  void join(MemberId member, Incarnation life, MemberState state = MemberState::kLive) {
    EXPECT_OK(store_.create_mailbox(member, life));
    EXPECT_OK(store_.create_slots(member, life, kExtent));
    ControlBlock& control = store_.control();
    control.members[index(member)].incarnation = raw(life);
    control.members[index(member)].state = raw(state);
    StreamMember& entry = control.streams[0].members[index(member)];
    entry.dedup = PushMark{life, Sequence{5}}.pack();
    entry.extents = 1;
    entry.state = raw(StreamMemberState::kRegistered);
  }

  [[nodiscard]] std::vector<SegmentHandle> handles() const {
    std::vector<SegmentHandle> all;
    for (const auto& [id, segment] : store_.segments()) all.push_back(segment);
    return all;
  }
  /// All segments but those that `leave_out` names.
  template <class F>
  [[nodiscard]] std::vector<SegmentHandle> handles_without(F leave_out) const {
    auto all = handles();
    std::erase_if(all, [&](const SegmentHandle& s) { return leave_out(s.header()); });
    return all;
  }
  [[nodiscard]] SegmentHeader& header_of(SegmentKind kind, MemberId member = kMember) const {
    for (const auto& [id, segment] : store_.segments())
      if (segment.header().kind == kind &&
          (kind == SegmentKind::kControl || kind == SegmentKind::kShard ||
           segment.header().owner == raw(member)))
        return *reinterpret_cast<SegmentHeader*>(segment.bytes.data());
    throw std::logic_error("no such segment");
  }

  HeapSource source_;
  Store store_{source_};
};

TEST_F(StoreTest, NumbersSegmentsUpwardsAndDescribesThem) {
  std::uint32_t id = 1;
  for (const auto& [number, segment] : store_.segments()) {
    EXPECT_EQ(raw(number), id++);
    EXPECT_EQ(segment.header().id, number);
    EXPECT_EQ(segment.header().job, 99u);
    EXPECT_OK(check_header(segment));
  }
  EXPECT_EQ(id, 7u);
  EXPECT_EQ(store_.control().next_segment.load(), 7u);
  EXPECT_EQ(header_of(SegmentKind::kSlots, kOther).incarnation, kOtherLife);
}

TEST_F(StoreTest, AFreshMailboxHasPublishedNothing) {
  for (std::size_t s = 0; s < kMaxStreams; ++s)
    EXPECT_EQ(store_.mail(kMember, StreamId{static_cast<std::uint16_t>(s)}).published.load(),
              (PushMark{kLife, Sequence{0}}.pack()));
}

TEST_F(StoreTest, SlotsOfASequenceDoNotOverlap) {
  const SlotsView slots = store_.slots(kMember, kExtent);
  const auto even = slots.values(Sequence{2});
  const auto odd = slots.values(Sequence{3});
  EXPECT_EQ(even.size(), layout().value_bytes());
  EXPECT_EQ(slots.bitmap(Sequence{2}).size_bytes(), layout().bitmap_bytes());
  std::fill(even.begin(), even.end(), std::byte{1});
  std::fill(odd.begin(), odd.end(), std::byte{2});
  slots.bitmap(Sequence{2})[0] = 3;
  slots.bitmap(Sequence{3})[0] = 4;
  EXPECT_TRUE(std::all_of(even.begin(), even.end(), [](std::byte b) { return b == std::byte{1}; }));
  EXPECT_TRUE(std::all_of(odd.begin(), odd.end(), [](std::byte b) { return b == std::byte{2}; }));
  EXPECT_EQ(slots.bitmap(Sequence{4})[0], 3u) << "slots take turns";
  EXPECT_EQ(slots.values(Sequence{5}).data(), odd.data());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(even.data()) % kPageBytes, 0u);
  EXPECT_OK(check_header(store_.segments().at(store_.slots_id(kMember, kExtent))));
}

TEST_F(StoreTest, SlotsHaveOptionsWhereTheServersStep) {
  EXPECT_TRUE(store_.slots(kMember, kExtent).options(Sequence{2}).empty());
  const ExtentId stepped{1};
  const Rule rule{RuleKind::kAdam, 2};
  ASSERT_OK(store_.create_shard(stepped, layout(), rule));
  ASSERT_OK(store_.create_slots(kMember, kLife, stepped));
  const SlotsView slots = store_.slots(kMember, stepped);
  for (const std::uint64_t sequence : {2u, 3u}) {
    const auto options = slots.options(Sequence{sequence});
    ASSERT_EQ(options.size(), layout().params().size());
    for (StepOptions& one : options) one.count = sequence;
    std::fill_n(slots.bitmap(Sequence{sequence}).begin(), 1, ~std::uint64_t{0});
    std::fill_n(slots.values(Sequence{sequence}).begin(), layout().value_bytes(), std::byte{0xff});
  }
  for (const std::uint64_t sequence : {2u, 3u})
    for (const StepOptions& one : slots.options(Sequence{sequence})) EXPECT_EQ(one.count, sequence);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(slots.values(Sequence{3}).data()) % kPageBytes, 0u);
  const auto end = slots.values(Sequence{3});
  const auto& segment = store_.segments().at(store_.slots_id(kMember, stepped));
  EXPECT_LE(end.data() + end.size(), segment.bytes.data() + segment.bytes.size());
}

TEST_F(StoreTest, ASuccessorFindsTheRuleOfAShardAndItsSlots) {
  const ExtentId stepped{1};
  const Rule rule{RuleKind::kAdam, 3};
  const auto shard = store_.create_shard(stepped, layout(), rule);
  ASSERT_OK(shard);
  ControlBlock& control = store_.control();
  control.extents[1].shard_segment = raw(*shard);
  control.extents[1].open = 1;
  control.layout_version = 2;
  control.streams[0].extents[1] = raw(stepped);
  control.streams[0].extent_count = 2;
  ASSERT_OK(store_.create_slots(kMember, kLife, stepped));
  store_.slots(kMember, stepped).options(Sequence{4})[1].lr = 0.25;
  Store successor{source_};
  ASSERT_OK(successor.adopt(handles()));
  EXPECT_EQ(successor.shard(stepped).view.rule(), rule);
  EXPECT_EQ(successor.shard(kExtent).view.rule(), Rule{});
  EXPECT_EQ(successor.slots(kMember, stepped).options(Sequence{4})[1].lr, 0.25);
  // Of another rule the sizes are others.
  reinterpret_cast<ShardHeader*>(store_.segments().at(*shard).bytes.data())->count_bytes += 256;
  EXPECT_THAT(Store{source_}.adopt(handles()), FailsWith(StatusCode::kInternal, ""));
}

TEST_F(StoreTest, PullBuffersDoNotOverlapTheirCuts) {
  ASSERT_OK(store_.create_pull(kMember, kLife, kExtent));
  const PullView pull = store_.pull(kMember, kExtent);
  pull.header().cuts[1].pushes[kMaxMembers - 1] = 77;
  for (const std::size_t buffer : {0u, 1u}) {
    ASSERT_EQ(pull.values(buffer).size(), layout().value_bytes());
    std::fill(pull.values(buffer).begin(), pull.values(buffer).end(), std::byte{0xff});
  }
  EXPECT_EQ(pull.header().cuts[1].pushes[kMaxMembers - 1].load(), 77u);
  EXPECT_FALSE(store_.pull(kOther, kExtent));
  EXPECT_EQ(store_.pull_id(kOther, kExtent), SegmentId{});
}

TEST_F(StoreTest, ASuccessorFindsEverythingInAnyOrder) {
  ASSERT_OK(store_.create_pull(kMember, kLife, kExtent));
  const std::vector<std::byte> words{std::byte{1}, std::byte{2}};
  ASSERT_OK(store_.create_blob(kExtent, words));
  store_.slots(kMember, kExtent).values(Sequence{1})[7] = std::byte{0x77};
  std::mt19937 random{5};
  for (int turn = 0; turn < 20; ++turn) {
    auto segments = handles();
    std::shuffle(segments.begin(), segments.end(), random);
    Store successor{source_};
    ASSERT_OK(successor.adopt(segments));
    EXPECT_EQ(&successor.control(), &store_.control());
    EXPECT_EQ(successor.segments().size(), store_.segments().size());
    EXPECT_EQ(successor.slots(kMember, kExtent).values(Sequence{1})[7], std::byte{0x77});
    EXPECT_EQ(successor.slots_id(kOther, kExtent), store_.slots_id(kOther, kExtent));
    EXPECT_EQ(successor.pull_id(kMember, kExtent), store_.pull_id(kMember, kExtent));
    EXPECT_EQ(&successor.mailbox(kOther), &store_.mailbox(kOther));
    EXPECT_EQ(successor.blob(kExtent), store_.blob(kExtent));
    EXPECT_OK(match_layouts(layout(), successor.shard(kExtent).layout, Rank{0}));
    EXPECT_EQ(successor.shard(kExtent).free.spare(0), store_.shard(kExtent).free.spare(0));
  }
}

TEST_F(StoreTest, EveryMissingSegmentIsNamed) {
  const auto adopt_without = [&](SegmentKind kind, std::uint32_t owner) {
    Store successor{source_};
    return successor.adopt(handles_without(
        [&](const SegmentHeader& h) { return h.kind == kind && h.owner == owner; }));
  };
  const auto names = [](const char* what) {
    return FailsWith(StatusCode::kInternal, std::string{"cannot take over: "} + what);
  };
  EXPECT_THAT(adopt_without(SegmentKind::kControl, 0), names("the control segment is missing"));
  EXPECT_THAT(adopt_without(SegmentKind::kShard, 0), names("the shard of extent 0 is missing"));
  EXPECT_THAT(adopt_without(SegmentKind::kMailbox, 3), names("the mailbox of member 3"));
  EXPECT_THAT(adopt_without(SegmentKind::kMailbox, 7), names("the mailbox of member 7"));
  EXPECT_THAT(adopt_without(SegmentKind::kSlots, 3), names("a slots segment of member 3"));
  EXPECT_THAT(adopt_without(SegmentKind::kSlots, 7), names("a slots segment of member 7"));
  Store successor{source_};
  EXPECT_THAT(successor.adopt({}), names("the control segment is missing"));
}

TEST_F(StoreTest, ADrainingMembersSegmentsAreNeeded) {
  store_.control().members[index(kMember)].state = raw(MemberState::kDraining);
  Store successor{source_};
  EXPECT_THAT(successor.adopt(handles_without([](const SegmentHeader& h) {
    return h.kind == SegmentKind::kSlots && h.owner == raw(kMember);
  })),
              FailsWith(StatusCode::kInternal, "a slots segment of member 3"));
}

TEST_F(StoreTest, LeavesOutWhatNobodyNeeds) {
  join(MemberId{9}, Incarnation{30}, MemberState::kJoining);
  store_.control().members[index(kOther)].state = raw(MemberState::kFree);
  ASSERT_OK(store_.create_mailbox(kMember, Incarnation{31}));  // of a life that never began
  ASSERT_OK(store_.create_shard(ExtentId{1}, layout()));       // of an extent that was never opened
  Store successor{source_};
  ASSERT_OK(successor.adopt(handles()));
  EXPECT_FALSE(successor.has_mailbox(MemberId{9}));
  EXPECT_FALSE(successor.has_mailbox(kOther));
  EXPECT_TRUE(successor.has_mailbox(kMember));
  EXPECT_EQ(successor.mailbox(kMember).header.incarnation, kLife);
  EXPECT_FALSE(successor.slots(kOther, kExtent));
  for (const std::uint32_t id : {5u, 6u, 7u, 8u, 9u, 10u})
    EXPECT_FALSE(successor.segments().contains(SegmentId{id})) << id;
}

// Regression: a server killed between opening an extent and opening its stream left two shards of
// one extent behind, and the successor's successor took either.
TEST_F(StoreTest, OfTwoShardsOfAnExtentTheRecordedOneCounts) {
  ASSERT_OK(store_.create_shard(kExtent, layout()));
  auto segments = handles();
  for (int turn = 0; turn < 2; ++turn) {
    Store successor{source_};
    ASSERT_OK(successor.adopt(segments));
    EXPECT_FALSE(successor.segments().contains(SegmentId{7}));
    std::reverse(segments.begin(), segments.end());
  }
}

TEST_F(StoreTest, AnExtentThatNobodyHoldsYetIsForgotten) {
  ControlBlock& control = store_.control();
  for (const bool stream_is_open : {true, false}) {
    SCOPED_TRACE(stream_is_open);
    control.extents[1].stream = 1;
    control.extents[1].shard_segment = 50;
    control.extents[1].open = 1;
    control.streams[1].extents[0] = 1;
    control.streams[1].extent_count = 1;
    control.streams[1].open = stream_is_open ? 1 : 0;
    control.layout_version = stream_is_open ? 2 : 1;
    Store successor{source_};
    ASSERT_OK(successor.adopt(handles()));
    EXPECT_EQ(control.extents[1].open.load(), 0u);
    EXPECT_EQ(control.streams[1].open.load(), 0u);
    EXPECT_EQ(control.layout_version.load(), 1u);
  }
}

/// Appends an extent to the stream, as a server does.
SegmentId append(Store& store, ExtentId extent, std::uint32_t place, const ExtentLayout& layout) {
  ControlBlock& control = store.control();
  const auto shard = store.create_shard(extent, layout);
  EXPECT_OK(shard);
  control.extents[index(extent)].shard_segment = raw(*shard);
  control.extents[index(extent)].place = place;
  control.extents[index(extent)].open = 1;
  control.layout_version = raw(extent) + 1u;
  control.streams[0].extents[place] = raw(extent);
  control.streams[0].extent_count = place + 1;
  return *shard;
}

TEST_F(StoreTest, AnAddedExtentThatNobodyHoldsYetIsForgottenAndItsStreamGoesOn) {
  ControlBlock& control = store_.control();
  for (const bool counted : {true, false}) {
    SCOPED_TRACE(counted);
    control.streams[0].extents[1] = 1;
    control.extents[1].place = 1;
    control.extents[1].shard_segment = 50;
    control.extents[1].open = 1;
    control.layout_version = 2;
    control.streams[0].extent_count = counted ? 2 : 1;
    Store successor{source_};
    ASSERT_OK(successor.adopt(handles()));
    EXPECT_EQ(control.streams[0].open.load(), 1u);
    EXPECT_EQ(control.streams[0].extent_count.load(), 1u);
    EXPECT_EQ(control.extents[1].open.load(), 0u);
    EXPECT_EQ(control.layout_version.load(), 1u);
  }
}

TEST_F(StoreTest, SlotsAreNeededOfTheExtentsThatAWorkerHasRegistered) {
  append(store_, ExtentId{1}, 1, layout());
  ASSERT_OK(store_.create_slots(kMember, kLife, ExtentId{1}));
  const auto without = [](const SegmentHeader& h) {
    return h.kind == SegmentKind::kSlots && h.extent == 1;
  };
  {
    Store successor{source_};
    ASSERT_OK(successor.adopt(handles_without(without)));  // kOther never added it
    EXPECT_FALSE(successor.slots(kOther, ExtentId{1}));
  }
  store_.control().streams[0].members[index(kMember)].extents = 3;
  Store successor{source_};
  EXPECT_THAT(successor.adopt(handles_without(without)),
              FailsWith(StatusCode::kInternal, "a slots segment of member 3"));
  Store complete{source_};
  ASSERT_OK(complete.adopt(handles()));
  EXPECT_TRUE(complete.slots(kMember, ExtentId{1}));
}

// An extent was forgotten with its server, and another one has got its number since.
TEST_F(StoreTest, SlotsLeftOverFromAForgottenExtentOfThatNumberAreLeftOut) {
  const ExtentLayout larger{{{"x", DType::float32, {4000}}}, 64};
  ASSERT_OK(store_.create_shard(ExtentId{1}, larger));
  const auto stale = store_.create_slots(kMember, kLife, ExtentId{1});
  ASSERT_OK(stale);
  append(store_, ExtentId{1}, 1, layout());
  Store successor{source_};
  ASSERT_OK(successor.adopt(handles()));
  EXPECT_FALSE(successor.segments().contains(*stale));
  EXPECT_FALSE(successor.slots(kMember, ExtentId{1}));
}

TEST_F(StoreTest, DamagedSegmentsAreRefused) {
  const auto refused_with = [&](auto damage, auto matcher) {
    auto segments = handles();
    damage();
    Store successor{source_};
    EXPECT_THAT(successor.adopt(segments), matcher);
  };
  const auto restore = [&](std::uint64_t& word, std::uint64_t value, auto matcher) {
    const std::uint64_t before = word;
    refused_with([&] { word = value; }, matcher);
    word = before;
  };
  const auto fails = [](const char* text) { return FailsWith(StatusCode::kInternal, text); };
  restore(header_of(SegmentKind::kMailbox).magic, 1, fails("wrong header"));
  restore(header_of(SegmentKind::kSlots).size, 1, fails("wrong header"));
  restore(header_of(SegmentKind::kSlots).job, 100, fails("segments of two jobs"));
  auto& shard = *reinterpret_cast<ShardHeader*>(&header_of(SegmentKind::kShard));
  restore(shard.pool_offset, 0, fails("a shard segment is damaged"));
  Word& entry = store_.shard(kExtent).view.entry(ChunkIndex{0});
  entry = ChunkEntry{BatchId{1}, UnitIndex{2}}.pack();
  refused_with([] {}, fails("names unit 2, which is taken"));
  entry = ChunkEntry{BatchId{0}, UnitIndex{0}}.pack();
  SegmentHeader& mailbox = header_of(SegmentKind::kMailbox);
  mailbox.kind = SegmentKind{9};
  refused_with([] {}, fails("a segment of a known kind"));
  mailbox.kind = SegmentKind::kMailbox;
  store_.control().ready = 0;
  refused_with([] {}, fails("the control segment is missing"));
  store_.control().ready = 1;
  refused_with([] {}, psplus::testing::IsOk());
}

TEST_F(StoreTest, SegmentsOfAnotherSizeThanTheLayoutSaysDoNotCount) {
  const SegmentHandle wrong = psplus::testing::heap_segment(2 * kPageBytes);
  auto& header = *reinterpret_cast<SegmentHeader*>(wrong.bytes.data());
  for (const SegmentKind kind : {SegmentKind::kSlots, SegmentKind::kMailbox}) {
    header = header_of(SegmentKind::kSlots);
    header.kind = kind;
    header.size = wrong.bytes.size();
    auto segments = handles_without(
        [&](const SegmentHeader& h) { return h.kind == kind && h.owner == raw(kMember); });
    segments.push_back(wrong);
    Store successor{source_};
    EXPECT_THAT(successor.adopt(segments), FailsWith(StatusCode::kInternal, "missing or damaged"))
        << to_string(kind);
  }
  header.kind = SegmentKind::kPull;  // which can be asked for again
  auto segments = handles();
  segments.push_back(wrong);
  Store successor{source_};
  ASSERT_OK(successor.adopt(segments));
  EXPECT_FALSE(successor.pull(kMember, kExtent));
}

TEST_F(StoreTest, DropMemberForgetsExactlyItsSegments) {
  ASSERT_OK(store_.create_pull(kMember, kLife, kExtent));
  EXPECT_EQ(store_.drop_member(kMember),
            (std::vector<SegmentId>{SegmentId{3}, SegmentId{4}, SegmentId{7}}));
  EXPECT_FALSE(store_.has_mailbox(kMember));
  EXPECT_FALSE(store_.slots(kMember, kExtent));
  EXPECT_FALSE(store_.pull(kMember, kExtent));
  EXPECT_TRUE(store_.has_mailbox(kOther));
  EXPECT_TRUE(store_.slots(kOther, kExtent));
  EXPECT_EQ(store_.segments().size(), 4u);
  EXPECT_TRUE(store_.drop_member(kMember).empty());
  ASSERT_OK(store_.create_mailbox(kMember, Incarnation{40}));
  EXPECT_EQ(store_.mailbox(kMember).header.id, SegmentId{8}) << "numbers are never used twice";
}

TEST_F(StoreTest, NoMemoryIsReportedAndChangesNothing) {
  for (int kind = 0; kind < 4; ++kind) {
    source_.fail_at = source_.made();
    const std::vector<std::byte> blob(3);
    const Result<SegmentId> made = kind == 0   ? store_.create_mailbox(MemberId{1}, kLife)
                                   : kind == 1 ? store_.create_shard(ExtentId{1}, layout())
                                   : kind == 2 ? store_.create_slots(MemberId{1}, kLife, kExtent)
                                               : store_.create_blob(kExtent, blob);
    EXPECT_THAT(made, FailsWith(StatusCode::kNoSpace, "no memory for psplus-"));
    EXPECT_EQ(store_.segments().size(), 6u);
    EXPECT_FALSE(store_.has_mailbox(MemberId{1}));
    EXPECT_FALSE(store_.slots(MemberId{1}, kExtent));
    EXPECT_EQ(store_.blob(kExtent), SegmentId{});
  }
}

}  // namespace
}  // namespace psplus::store
