#include "wire/messages.hpp"

#include <random>
#include <string>
#include <tuple>

#include "store/limits.hpp"
#include "support/status_matchers.hpp"

namespace psplus::wire {

// Each message as a tuple of its fields, written out here: what the codec forgets differs.
auto tied(const Attach& m) { return std::tie(m.protocol, m.rank, m.world_size, m.process); }
auto tied(const Resume& m) { return std::tie(m.protocol, m.job, m.member, m.incarnation); }
auto tied(const OpenStream& m) {
  return std::tie(m.stream, m.extent, m.mode, m.pull, m.rule, m.bound, m.layout_bytes, m.blob_bytes,
                  m.has_blob);
}
auto tied(const Holding& m) { return std::tie(m.segment); }
auto tied(const NeedPull& m) { return std::tie(m.stream); }
auto tied(const CloseStream& m) { return std::tie(m.stream); }
auto tied(const Detach&) { return std::tuple<>{}; }
auto tied(const Welcome& m) { return std::tie(m.job, m.member, m.incarnation, m.epoch); }
auto tied(const Offer& m) { return std::tie(m.segment); }
auto tied(const Drop& m) { return std::tie(m.segment); }
auto tied(const Attached&) { return std::tuple<>{}; }
auto tied(const StreamReady& m) {
  return std::tie(m.stream, m.extent, m.provides, m.rejoined, m.clock, m.barriers, m.blob_segment);
}
auto tied(const PullReady& m) { return std::tie(m.stream); }
auto tied(const StreamClosed& m) { return std::tie(m.stream); }
auto tied(const Detached&) { return std::tuple<>{}; }
auto tied(const Refused& m) { return std::tie(m.code, m.fatal, m.text); }

namespace {

using psplus::testing::FailsWith;

/// One of each kind, in order, with values that differ from field to field and from the defaults.
const std::vector<ToServer> kToServer{
    Attach{0x01020304, Rank{0x11121314}, 0x21222324, 0x31323334},
    Resume{0x41424344, 0x5152535455565758, MemberId{0x61}, Incarnation{0x7172}},
    OpenStream{StreamId{0x21}, StreamExtent{0x2f}, store::Mode::kBsp, store::PullMode::kBuffered,
               store::Rule{store::RuleKind::kAdam, 3}, 0x9192939495969798, 0xa1a2a3a4a5a6a7a8,
               0xb1b2b3b4b5b6b7b8, true},
    Holding{SegmentId{0xc1c2c3c4}},
    NeedPull{StreamId{0x31}},
    CloseStream{StreamId{0x3f}},
    Detach{}};
const std::vector<ToWorker> kToWorker{
    Welcome{0xd1d2d3d4d5d6d7d8, MemberId{0xe1}, Incarnation{0xf1f2}, Epoch{0x01121314}},
    Offer{SegmentId{0x05060708}},
    Drop{SegmentId{0x15161718}},
    Attached{},
    StreamReady{StreamId{0x22}, StreamExtent{0x3e}, true, false, Step{0x2526272829303132},
                0x3334353637383940, SegmentId{0x41424344}},
    PullReady{StreamId{0x23}},
    StreamClosed{StreamId{0x24}},
    Detached{},
    Refused{StatusCode::kClosed, true, "why, and what to do"}};

Result<ToServer> decode(const std::vector<std::byte>& bytes, ToServer) {
  return decode_to_server(bytes);
}
Result<ToWorker> decode(const std::vector<std::byte>& bytes, ToWorker) {
  return decode_to_worker(bytes);
}

template <class M>
struct Direction;
template <>
struct Direction<ToServer> {
  static const std::vector<ToServer>& samples() { return kToServer; }
};
template <>
struct Direction<ToWorker> {
  static const std::vector<ToWorker>& samples() { return kToWorker; }
};

template <class M>
class Messages : public ::testing::Test {};
using Directions = ::testing::Types<ToServer, ToWorker>;
TYPED_TEST_SUITE(Messages, Directions);

TYPED_TEST(Messages, EveryKindGoesThereAndBack) {
  const auto& samples = Direction<TypeParam>::samples();
  ASSERT_EQ(samples.size(), std::variant_size_v<TypeParam>);
  for (std::size_t kind = 0; kind < samples.size(); ++kind) {
    SCOPED_TRACE(kind);
    ASSERT_EQ(samples[kind].index(), kind);
    const auto back = decode(encode(samples[kind]), TypeParam{});
    ASSERT_OK(back);
    ASSERT_EQ(back->index(), kind);
    std::visit(
        [&](const auto& sent) {
          using Kind = std::decay_t<decltype(sent)>;
          EXPECT_EQ(tied(std::get<Kind>(*back)), tied(sent));
        },
        samples[kind]);
  }
}

TYPED_TEST(Messages, EachByteMissingOrTooManyIsRefused) {
  for (const auto& sample : Direction<TypeParam>::samples()) {
    SCOPED_TRACE(sample.index());
    auto bytes = encode(sample);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const std::vector<std::byte> part(bytes.begin(),
                                        bytes.begin() + static_cast<std::ptrdiff_t>(size));
      EXPECT_THAT(decode(part, TypeParam{}), FailsWith(StatusCode::kInternal, "damaged"))
          << "the first " << size << " of " << bytes.size() << " bytes";
    }
    bytes.push_back(std::byte{0});
    EXPECT_THAT(decode(bytes, TypeParam{}), FailsWith(StatusCode::kInternal, "damaged"));
  }
}

TYPED_TEST(Messages, UnknownKindsAreRefused) {
  for (std::size_t kind = std::variant_size_v<TypeParam>; kind < 256; ++kind) {
    std::vector<std::byte> bytes{static_cast<std::byte>(kind)};
    EXPECT_THAT(decode(bytes, TypeParam{}), FailsWith(StatusCode::kInternal, "damaged"));
    bytes.resize(64);
    EXPECT_THAT(decode(bytes, TypeParam{}), FailsWith(StatusCode::kInternal, "damaged"));
  }
}

TYPED_TEST(Messages, RandomBytesNeverDoHarm) {
  std::mt19937_64 random{20'240'501};
  std::size_t accepted = 0;
  for (int turn = 0; turn < 100'000; ++turn) {
    std::vector<std::byte> bytes(random() % 64);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0xff);
    if (!bytes.empty())  // mostly a known kind
      bytes[0] = static_cast<std::byte>(random() % (std::variant_size_v<TypeParam> + 1));
    const auto message = decode(bytes, TypeParam{});
    if (!message.ok()) {
      EXPECT_EQ(message.status().code(), StatusCode::kInternal);
      continue;
    }
    ++accepted;  // what is accepted is well-formed: it encodes to as many bytes
    EXPECT_EQ(encode(*message).size(), bytes.size());
  }
  EXPECT_GT(accepted, 100u);  // the loop does reach past the first check
}

TYPED_TEST(Messages, FlippedBitsNeverDoHarm) {
  for (const auto& sample : Direction<TypeParam>::samples()) {
    const auto bytes = encode(sample);
    for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      auto flipped = bytes;
      flipped[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
      const auto message = decode(flipped, TypeParam{});
      if (!message.ok()) {
        EXPECT_EQ(message.status().code(), StatusCode::kInternal);
      }
    }
  }
}

TEST(MessageRanges, IdsThatIndexArraysAreChecked) {
  const auto code = StatusCode::kInternal;
  const auto text = "out of range";
  const StreamId last{store::kMaxStreams - 1};
  const StreamId stray{store::kMaxStreams};
  EXPECT_OK(decode_to_server(encode(ToServer{NeedPull{last}})));
  EXPECT_THAT(decode_to_server(encode(ToServer{NeedPull{stray}})), FailsWith(code, text));
  EXPECT_THAT(decode_to_server(encode(ToServer{CloseStream{stray}})), FailsWith(code, text));
  EXPECT_THAT(decode_to_server(encode(ToServer{OpenStream{.stream = stray}})),
              FailsWith(code, text));
  EXPECT_THAT(decode_to_worker(encode(ToWorker{StreamReady{.stream = stray}})),
              FailsWith(code, text));
  EXPECT_THAT(decode_to_worker(encode(ToWorker{PullReady{stray}})), FailsWith(code, text));
  EXPECT_THAT(decode_to_worker(encode(ToWorker{StreamClosed{StreamId{0xffff}}})),
              FailsWith(code, text));

  const StreamExtent last_extent{store::kMaxStreamExtents - 1};
  const StreamExtent stray_extent{store::kMaxStreamExtents};
  EXPECT_OK(decode_to_server(encode(ToServer{OpenStream{.extent = last_extent}})));
  EXPECT_THAT(decode_to_server(encode(ToServer{OpenStream{.extent = stray_extent}})),
              FailsWith(code, text));
  EXPECT_THAT(decode_to_worker(encode(ToWorker{StreamReady{.extent = stray_extent}})),
              FailsWith(code, text));

  const MemberId last_member{store::kMaxMembers - 1};
  const MemberId stray_member{store::kMaxMembers};
  EXPECT_OK(decode_to_server(encode(ToServer{Resume{.member = last_member}})));
  EXPECT_THAT(decode_to_server(encode(ToServer{Resume{.member = stray_member}})),
              FailsWith(code, text));
  EXPECT_OK(decode_to_worker(encode(ToWorker{Welcome{.member = last_member}})));
  EXPECT_THAT(decode_to_worker(encode(ToWorker{Welcome{.member = stray_member}})),
              FailsWith(code, text));
}

TEST(MessageRanges, EnumeratorsAreChecked) {
  const auto code = StatusCode::kInternal;
  const auto text = "out of range";
  EXPECT_THAT(decode_to_server(encode(ToServer{OpenStream{.mode = store::Mode{2}}})),
              FailsWith(code, text));
  EXPECT_THAT(decode_to_server(encode(ToServer{OpenStream{.pull = store::PullMode{2}}})),
              FailsWith(code, text));
  using store::RuleKind;
  EXPECT_OK(decode_to_server(encode(ToServer{OpenStream{.rule = {RuleKind::kAdam, 3}}})));
  for (const store::Rule rule : {store::Rule{RuleKind{4}, 0},
                                 {RuleKind::kNone, 1},
                                 {RuleKind::kSgd, 2},
                                 {RuleKind::kAdam, 1},
                                 {RuleKind::kAdam, 4},
                                 {RuleKind::kAdagrad, 0}})
    EXPECT_THAT(decode_to_server(encode(ToServer{OpenStream{.rule = rule}})),
                FailsWith(code, text));
  EXPECT_THAT(decode_to_worker(encode(ToWorker{Refused{StatusCode{9}, false, ""}})),
              FailsWith(code, text));
  EXPECT_OK(decode_to_worker(encode(ToWorker{Refused{StatusCode{8}, false, ""}})));
}

}  // namespace
}  // namespace psplus::wire
