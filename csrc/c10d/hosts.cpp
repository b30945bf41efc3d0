// How hosts meet, and what becomes of a group when a call fails.

#include "c10d/hosts.hpp"

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "base/format.hpp"
#include "c10d/rendezvous.hpp"

namespace psplus::pg {
namespace {

constexpr const char* kYes = "yes";
constexpr const char* kReason = "psplus/failed";

// A rank that is late is found out by its own host, so hosts wait for each other a little longer.
constexpr milliseconds kOwnHostFirst{200};
// How long to wait for the word of somebody who saw why a connection was closed. It takes a
// liveness interval until a death is seen.
constexpr milliseconds kReasonPatience = 3 * collectives::kLivenessInterval;
// And who waits for what a speaker brings must not take the speaker for the one that is late.
constexpr milliseconds kSpeakerFirst = kOwnHostFirst + kReasonPatience + milliseconds{100};

}  // namespace

Hosts::Places Hosts::sort(const std::vector<std::string>& ids, Rank rank) {
  Places places{.hosts = {}, .host_of = {}, .place_of = {}, .rank = rank, .own = 0};
  std::map<std::string, std::size_t> known;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::size_t host = known.emplace(ids[i], places.hosts.size()).first->second;
    if (host == places.hosts.size()) places.hosts.emplace_back();
    places.host_of.push_back(host);
    places.place_of.push_back(static_cast<Rank>(places.hosts[host].size()));
    places.hosts[host].push_back(static_cast<Rank>(i));
  }
  places.own = places.host_of[index(rank)];
  return places;
}

/// Behind a connection to one rank of a host it may be any of that host's that is missing.
std::vector<std::string> Hosts::names(const Places& places) {
  std::vector<std::string> result;
  for (std::size_t rank = 0; rank < places.host_of.size(); ++rank) {
    std::vector<std::uint32_t> host;
    for (const Rank other : places.hosts[places.host_of[rank]]) host.push_back(raw(other));
    result.push_back(host.size() == 1 ? formatted("rank {}", rank)
                                      : formatted("rank {} (on a host with ranks {})", rank,
                                                  joined(host, ", ")));
  }
  return result;
}

Result<std::unique_ptr<Hosts>> Hosts::meet(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int size, const std::string& host_id,
                                           const MakeGloo& make_gloo, Deadline deadline) {
  write_key(*store, formatted("psplus/host/{}", rank), host_id);
  std::vector<std::string> ids;
  for (int other = 0; other < size; ++other)
    ids.push_back(read_key(*store, formatted("psplus/host/{}", other), deadline));
  Places places = sort(ids, static_cast<Rank>(rank));
  if (places.hosts.size() == 1) return std::unique_ptr<Hosts>{};
  const std::vector<Rank>& here = places.hosts[places.own];
  const Rank place = places.place_of[static_cast<std::size_t>(rank)];
  c10d::PrefixStore host_store{formatted("psplus-host-{}", places.own), store};
  auto local = join_host(host_store, static_cast<int>(raw(place)), static_cast<int>(here.size()),
                         host_id, deadline, here);
  const auto key = [](std::size_t host) { return formatted("psplus/together/{}", host); };
  if (place == Rank{0}) write_key(*store, key(places.own), local.ok() && *local ? kYes : "no");
  if (!local.ok()) return local.status();
  bool all = true;
  for (std::size_t host = 0; host < places.hosts.size(); ++host)
    all = read_key(*store, key(host), deadline) == kYes && all;
  if (!all) return std::unique_ptr<Hosts>{};
  BackendPtr gloo = make_gloo(c10::make_intrusive<c10d::PrefixStore>("psplus-links", store));
  return std::unique_ptr<Hosts>{
      new Hosts{std::move(places), store->clone(), std::move(*local), std::move(gloo)}};
}

std::vector<Rank> Hosts::speakers(std::optional<Rank> root) const {
  std::vector<Rank> result;
  for (const std::vector<Rank>& host : places_.hosts) result.push_back(host.front());
  if (root) result[places_.host_of[index(*root)]] = *root;
  return result;
}

/// Runs a call. After a failure nothing that was sent or received can be told from what comes
/// later, so the group ends, here and, as connections close, everywhere.
Status Hosts::together(const std::function<Status()>& call) {
  if (!failure_.ok()) return failure_;
  Status status{StatusCode::kInternal, "a collective was left by an exception"};
  try {
    status = call();
  } catch (...) {
    failure_ = std::move(status);
    abort();
    throw;
  }
  if (status.ok()) return status;
  failure_ = {status.code(), reason_for(status)};
  if (const auto culprit = links_.culprit()) local_->give_up_for_outsider(status.code(), *culprit);
  abort();
  return failure_;
}

/// The same on all ranks while they can reach the store: what was left there first. Whoever only
/// saw that another host has gone lets those go first who may know why.
std::string Hosts::reason_for(const Status& found) {
  const StatusCode here = local_->status().code();
  const bool seen = here != StatusCode::kOk && here != StatusCode::kClosed;
  try {
    if (!seen && !aborted_.load(std::memory_order_relaxed)) {
      try {
        return read_key(*store_, kReason, Deadline::after(kReasonPatience));
      } catch (const std::exception&) {
        // Nobody knows more.
      }
    }
    const std::string message = aborted_.load(std::memory_order_relaxed)
                                    ? formatted("rank {} aborted the group", raw(places_.rank))
                                    : found.message();
    return store_->compareSet(kReason, std::string{}, message);
  } catch (const std::exception&) {
    return found.message();  // the store may have been with the rank that is lost
  }
}

Status Hosts::exchange(std::span<const Links::Outgoing> sends,
                       std::span<const Links::Incoming> receives, Deadline deadline,
                       const std::function<Status()>& meanwhile) {
  return links_.exchange(sends, receives, Deadline::after(deadline.left() + kOwnHostFirst),
                         meanwhile);
}

Status Hosts::spread(Rank speaker, void* data, std::size_t bytes, Deadline deadline) {
  return collectives::broadcast(*local_, place(speaker), data, bytes,
                                Deadline::after(deadline.left() + kSpeakerFirst));
}

void Hosts::abort() noexcept {
  aborted_.store(true, std::memory_order_relaxed);  // spares reason_for() a wait; no more
  local_->abort();
  links_.close();
}

void Hosts::leave() noexcept {
  local_->leave();
  links_.close();
}

void Hosts::forget() noexcept {
  local_->forget();
  links_.forget();
}

}  // namespace psplus::pg
