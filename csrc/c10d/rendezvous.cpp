#include "c10d/rendezvous.hpp"

#include "base/format.hpp"

#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

namespace psplus::pg {
namespace {

using collectives::Group;
using collectives::Nonce;

constexpr const char* kInvitation = "psplus/memory";
constexpr const char* kVerdict = "psplus/verdict";
constexpr const char* kShared = "shared";
constexpr const char* kApart = "apart";
constexpr const char* kFailed = "failed: ";

std::string joined_key(int rank) { return formatted("psplus/joined/{}", rank); }

/// Where rank 0's memory is to be found.
struct Invitation {
  std::int64_t pid;
  std::int64_t fd;
  Nonce nonce;
};
static_assert(std::is_trivially_copyable_v<Invitation>);

std::string encode(const Invitation& invitation, const std::string& host_id) {
  std::string text(sizeof(invitation), '\0');
  std::memcpy(text.data(), &invitation, sizeof(invitation));
  return text + host_id;
}

/// Opens the memory behind an invitation; null when this rank is on another host.
Result<std::unique_ptr<Group>> accept(const std::string& text, const std::string& host_id, int rank,
                                      int size) {
  Invitation invitation{};
  if (text.size() < sizeof(invitation) || text.substr(sizeof(invitation)) != host_id)
    return std::unique_ptr<Group>{};
  std::memcpy(&invitation, text.data(), sizeof(invitation));
  const std::string path = formatted("/proc/{}/fd/{}", invitation.pid, invitation.fd);
  // Whatever lies there by now, a pipe or a terminal perhaps, must not make us wait.
  UniqueFd fd{::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)};
  if (!fd) return std::unique_ptr<Group>{};
  const std::size_t ranks = static_cast<std::size_t>(size);
  auto segment =
      Segment::map(std::move(fd), collectives::GroupMemory::bytes_for(ranks), Access::kReadWrite);
  if (!segment.ok()) return std::unique_ptr<Group>{};
  auto group = Group::attach(std::move(*segment), static_cast<Rank>(rank), ranks, invitation.nonce);
  if (!group.ok() && group.status().code() != StatusCode::kConfig) return std::unique_ptr<Group>{};
  return group;
}

Result<std::unique_ptr<Group>> lead(c10d::Store& store, int size, const std::string& host_id,
                                    Deadline deadline) {
  Invitation invitation{.pid = ::getpid(), .fd = -1, .nonce = {}};
  if (::getrandom(invitation.nonce.data(), sizeof(Nonce), 0) != sizeof(Nonce))
    return Status::from_errno("getrandom", "a group's nonce", errno);
  const auto ranks = static_cast<std::size_t>(size);
  auto segment = Group::create_segment(ranks, invitation.nonce);
  if (!segment.ok()) {
    write_key(store, kInvitation, "");
    write_key(store, kVerdict, kFailed + segment.status().message());
    return segment.status();
  }
  invitation.fd = segment->fd().get();
  auto group = Group::attach(std::move(*segment), Rank{0}, ranks, invitation.nonce);
  write_key(store, kInvitation, encode(invitation, host_id));
  bool all = true;
  for (int rank = 1; rank < size; ++rank)
    all = read_key(store, joined_key(rank), deadline) == kShared && all;
  write_key(store, kVerdict, all ? kShared : kApart);
  if (!all) return std::unique_ptr<Group>{};
  return group;
}

Result<std::unique_ptr<Group>> follow(c10d::Store& store, int rank, int size,
                                      const std::string& host_id, Deadline deadline) {
  auto group = accept(read_key(store, kInvitation, deadline), host_id, rank, size);
  if (!group.ok()) return group;
  write_key(store, joined_key(rank), *group ? kShared : kApart);
  const std::string verdict = read_key(store, kVerdict, deadline);
  if (verdict.starts_with(kFailed))
    return Status{StatusCode::kNoSpace, "rank 0 could not make the group's memory: " +
                                            verdict.substr(std::strlen(kFailed))};
  if (verdict == kShared && !*group)
    return Status{StatusCode::kConfig,
                  "the store holds the keys of an earlier group, whose memory is gone; make each "
                  "group with a store of its own (a new file, a new TCPStore)"};
  if (verdict != kShared) group = std::unique_ptr<Group>{};
  return group;
}

}  // namespace

std::string read_key(c10d::Store& store, const std::string& key, Deadline deadline) {
  store.wait({key},
             std::chrono::ceil<milliseconds>(deadline.at_most(std::chrono::hours{24}).left()));
  const std::vector<std::uint8_t> bytes = store.get(key);
  return {bytes.begin(), bytes.end()};
}

void write_key(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
}

Result<std::unique_ptr<Group>> join_host(c10d::Store& store, int rank, int size,
                                         const std::string& host_id, Deadline deadline,
                                         std::vector<Rank> names) {
  auto group = rank == 0 ? lead(store, size, host_id, deadline)
                         : follow(store, rank, size, host_id, deadline);
  if (!group.ok() || !*group) return group;
  (*group)->call_ranks(std::move(names));
  if (Status status = (*group)->connect(deadline); !status.ok()) return status;
  return group;
}

}  // namespace psplus::pg
