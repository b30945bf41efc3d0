#include "wire/boot.hpp"

#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "support/status_matchers.hpp"
#include "wire/codec.hpp"

namespace psplus::wire {
namespace {

using psplus::testing::FailsWith;

Deadline soon() { return Deadline::after(std::chrono::seconds{30}); }

UniqueFd file_with(const std::string& text) {
  UniqueFd fd{::memfd_create("psplus-test", MFD_CLOEXEC)};
  EXPECT_EQ(::pwrite(fd.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  return fd;
}
std::string text_of(const UniqueFd& fd) {
  char text[32] = {};
  EXPECT_GE(::pread(fd.get(), text, sizeof(text) - 1, 0), 0);
  return text;
}

class BootTest : public ::testing::Test {
 protected:
  BootTest() {
    auto made = UnixSocket::pair();
    EXPECT_OK(made);
    std::tie(starter_, server_) = std::move(made).value();
  }
  UnixSocket starter_, server_;
};

TEST_F(BootTest, SegmentsArriveInOrderHoweverMany) {
  for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 40u}) {
    SCOPED_TRACE(count);
    std::vector<UniqueFd> files;
    std::vector<int> numbers;
    for (std::size_t i = 0; i < count; ++i) {
      files.push_back(file_with("segment " + std::to_string(i)));
      numbers.push_back(files.back().get());
    }
    ASSERT_OK(send_boot(starter_, numbers, -1, soon()));
    const auto boot = receive_boot(server_, soon());
    ASSERT_OK(boot);
    EXPECT_FALSE(boot->predecessor);
    ASSERT_EQ(boot->segments.size(), count);
    for (std::size_t i = 0; i < count; ++i)
      EXPECT_EQ(text_of(boot->segments[i]), "segment " + std::to_string(i));
  }
}

TEST_F(BootTest, ThePredecessorIsToldFromTheSegments) {
  const UniqueFd predecessor = file_with("predecessor");
  const UniqueFd segment = file_with("segment");
  ASSERT_OK(send_boot(starter_, {segment.get()}, predecessor.get(), soon()));
  const auto boot = receive_boot(server_, soon());
  ASSERT_OK(boot);
  EXPECT_EQ(text_of(boot->predecessor), "predecessor");
  ASSERT_EQ(boot->segments.size(), 1u);
  EXPECT_EQ(text_of(boot->segments[0]), "segment");
}

TEST_F(BootTest, DamagedStartMessagesAreRefused) {
  const auto refused = FailsWith(StatusCode::kInternal, "damaged start message");
  Writer short_header;
  short_header.put(std::uint32_t{1});
  ASSERT_OK(starter_.send(short_header.take(), {}, soon()));
  EXPECT_THAT(receive_boot(server_, soon()), refused);

  Writer promises_a_predecessor;
  promises_a_predecessor.put(std::uint32_t{0});
  promises_a_predecessor.put(std::uint8_t{1});
  ASSERT_OK(starter_.send(promises_a_predecessor.take(), {}, soon()));
  EXPECT_THAT(receive_boot(server_, soon()), refused);

  Writer promises_a_segment;
  promises_a_segment.put(std::uint32_t{1});
  promises_a_segment.put(std::uint8_t{0});
  ASSERT_OK(starter_.send(promises_a_segment.take(), {}, soon()));
  ASSERT_OK(starter_.send(std::vector<std::byte>(1), {}, soon()));
  EXPECT_THAT(receive_boot(server_, soon()), refused);
}

TEST_F(BootTest, AStarterThatDiedIsPeerLost) {
  const UniqueFd segment = file_with("segment");
  Writer header;
  header.put(std::uint32_t{2});
  header.put(std::uint8_t{0});
  ASSERT_OK(starter_.send(header.take(), {}, soon()));
  const int number = segment.get();
  ASSERT_OK(starter_.send(std::vector<std::byte>(1), {&number, 1}, soon()));
  starter_ = UnixSocket{};
  EXPECT_THAT(receive_boot(server_, soon()), FailsWith(StatusCode::kPeerLost, ""));
}

TEST_F(BootTest, RepliesGoThereAndBack) {
  for (const BootResult result : {BootResult::kReady, BootResult::kLostRace, BootResult::kFailed}) {
    ASSERT_OK(send_boot_reply(server_, {result, "because"}, soon()));
    const auto reply = receive_boot_reply(starter_, soon());
    ASSERT_OK(reply);
    EXPECT_EQ(reply->result, result);
    EXPECT_EQ(reply->text, "because");
  }
  ASSERT_OK(send_boot_reply(server_, {BootResult::kFailed, std::string(100'000, 'x')}, soon()));
  const auto cut = receive_boot_reply(starter_, soon());
  ASSERT_OK(cut);
  EXPECT_EQ(cut->text, std::string(4096, 'x'));
}

TEST_F(BootTest, DamagedRepliesAreRefused) {
  Writer unknown;
  unknown.put(std::uint8_t{3});
  unknown.put_string("");
  ASSERT_OK(server_.send(unknown.take(), {}, soon()));
  EXPECT_THAT(receive_boot_reply(starter_, soon()), FailsWith(StatusCode::kInternal, "damaged"));
  ASSERT_OK(server_.send(std::vector<std::byte>(3), {}, soon()));
  EXPECT_THAT(receive_boot_reply(starter_, soon()), FailsWith(StatusCode::kInternal, "damaged"));
  server_ = UnixSocket{};
  EXPECT_THAT(receive_boot_reply(starter_, soon()), FailsWith(StatusCode::kPeerLost, ""));
}

}  // namespace
}  // namespace psplus::wire
