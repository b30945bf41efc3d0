#include "c10d/hosts.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/format.hpp"
#include "base/futex.hpp"
#include "c10d/buffers.hpp"
#include "c10d/rendezvous.hpp"

namespace psplus::pg {
namespace {

using collectives::Element;
using collectives::ReduceSpec;
using collectives::Reduction;

constexpr Rank kLeader{0};  // among the ranks of a host
constexpr const char* kYes = "yes";

milliseconds left(Deadline deadline) {
  return std::max(milliseconds{1}, std::chrono::ceil<milliseconds>(
                                       deadline.at_most(std::chrono::hours{24 * 365}).left()));
}

/// The tensor keeps the buffer, which Gloo may still use when we have given the call up.
at::Tensor bytes_of(const Buffer& buffer) {
  return at::from_blob(
      buffer.data(), {static_cast<std::int64_t>(buffer.bytes())}, [buffer](void*) {}, at::kByte);
}

bool is_integer(Element element) {
  return element != Element::boolean && element < Element::float16;
}

bool is_half(Element element) {
  return element == Element::float16 || element == Element::bfloat16;
}

}  // namespace

Result<std::unique_ptr<Hosts>> Hosts::meet(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int size, const std::string& host_id,
                                           const MakeLeaders& make_leaders, Deadline deadline) {
  write_key(*store, formatted("psplus/host/{}", rank), host_id);
  std::vector<std::vector<int>> hosts;
  std::vector<std::string> ids;
  for (int other = 0; other < size; ++other) {
    const std::string id = read_key(*store, formatted("psplus/host/{}", other), deadline);
    const auto found = std::find(ids.begin(), ids.end(), id);
    const auto at = static_cast<std::size_t>(found - ids.begin());
    if (found == ids.end()) {
      ids.push_back(id);
      hosts.emplace_back();
    }
    hosts[at].push_back(other);
  }
  if (hosts.size() == 1 || hosts.size() == static_cast<std::size_t>(size))
    return std::unique_ptr<Hosts>{};
  const auto own =
      static_cast<std::size_t>(std::find(ids.begin(), ids.end(), host_id) - ids.begin());
  const std::vector<int>& here = hosts[own];
  const int place = static_cast<int>(std::find(here.begin(), here.end(), rank) - here.begin());
  c10d::PrefixStore host_store{formatted("psplus-host-{}", own), store};
  auto local = join_host(host_store, place, static_cast<int>(here.size()), host_id, deadline);
  const auto together = [](std::size_t host) { return formatted("psplus/together/{}", host); };
  if (place == 0) write_key(*store, together(own), local.ok() && *local ? kYes : "no");
  if (!local.ok()) return local.status();
  bool all = true;
  for (std::size_t host = 0; host < hosts.size(); ++host)
    all = read_key(*store, together(host), deadline) == kYes && all;
  if (!all) return std::unique_ptr<Hosts>{};
  BackendPtr leaders;
  if (place == 0)
    leaders = make_leaders(c10::make_intrusive<c10d::PrefixStore>("psplus-leaders", store),
                           static_cast<int>(own), static_cast<int>(hosts.size()));
  return std::unique_ptr<Hosts>{
      new Hosts{std::move(hosts), own, size, std::move(*local), std::move(leaders)}};
}

/// Of a call within the host; the others' leaders wait in vain after its failure, so they are told.
Status Hosts::placed(Status status) {
  if (status.ok()) return status;
  leaders_.reset();  // closes the connections
  return {status.code(), formatted("among ranks {} of one host, here counted from 0: {}",
                                   joined(hosts_[own_], ", "), status.message())};
}

/// What leaders say to each other; when that fails, nothing can come of the call on this host.
Status Hosts::lead(const std::function<void()>& talk) {
  if (!leaders_) return {};
  try {
    talk();
  } catch (const std::exception& error) {
    local_->abort();
    leaders_.reset();
    return {StatusCode::kPeerLost, formatted("between hosts: {}", error.what())};
  }
  return {};
}

/// Gloo's own wait ends with its time-out only; this one also when this host's group is given up.
void Hosts::await(const c10::intrusive_ptr<c10d::Work>& work, Deadline deadline) const {
  const auto bell = std::make_shared<WakeWord>();
  work->getFuture()->addCallback([bell](c10::ivalue::Future&) { notify(*bell); });
  while (!wait_until(*bell, deadline.at_most(collectives::kLivenessInterval),
                     [&] { return work->isCompleted(); })) {
    throw_if_failed(local_->status());
    TORCH_CHECK(!deadline.passed(), "timed out");
  }
  work->wait();
}

/// Each leader reduces a part, in the order of hosts, and collects the others' parts: as many bytes
/// as a ring, and whatever the dtype the same arithmetic as within a host.
void Hosts::reduce_among_leaders(void* data, std::size_t elements, const ReduceSpec& spec,
                                 Deadline deadline) {
  const std::size_t size = collectives::element_bytes(spec.element);
  const std::size_t hosts = hosts_.size();
  const std::size_t part = (elements + hosts - 1) / hosts;
  const auto whole = static_cast<std::int64_t>(hosts * part * size);
  at::Tensor mine = at::zeros({whole}, at::kByte);
  at::Tensor theirs = at::empty({whole}, at::kByte);
  std::memcpy(mine.data_ptr(), data, elements * size);
  c10d::AllToAllOptions exchange;
  exchange.timeout = left(deadline);
  std::vector<std::int64_t> equal;
  std::vector<std::int64_t> equal_too;
  await(leaders_->alltoall_base(theirs, mine, equal, equal_too, exchange), deadline);

  std::vector<const void*> sources;
  for (std::size_t host = 0; host < hosts; ++host)
    sources.push_back(static_cast<const std::byte*>(theirs.data_ptr()) + host * part * size);
  at::Tensor reduced = at::empty({whole / static_cast<std::int64_t>(hosts)}, at::kByte);
  const collectives::ReduceTerms terms{
      .sources = sources.data(), .factors = nullptr, .count = hosts};
  const auto between = spec.reduction == Reduction::premul_sum ? Reduction::sum : spec.reduction;
  collectives::reduce_function(spec.element, between)(reduced.data_ptr(), terms, part);
  c10d::AllgatherOptions collect;
  collect.timeout = left(deadline);
  await(leaders_->_allgather_base(mine, reduced, collect), deadline);
  std::memcpy(data, mine.data_ptr(), elements * size);
}

Status Hosts::reduce_bytes(void* data, std::size_t elements, const ReduceSpec& spec,
                           Deadline deadline) {
  if (Status status = collectives::reduce(*local_, kLeader, data, data, elements, spec, deadline);
      !status.ok())
    return placed(std::move(status));
  if (elements != 0)
    if (Status status = lead([&] { reduce_among_leaders(data, elements, spec, deadline); });
        !status.ok())
      return status;
  return placed(collectives::broadcast(
      *local_, kLeader, data, elements * collectives::element_bytes(spec.element), deadline));
}

Status Hosts::all_reduce(const at::Tensor& tensor, const ReduceSpec& spec, Deadline deadline) {
  ReduceSpec sum = spec;
  const bool average = spec.reduction == Reduction::avg;
  if (average) sum.reduction = Reduction::sum;
  if (average && is_integer(spec.element)) {  // a sum of small integers may not fit into them
    sum.element = Element::int64;
    const at::Tensor wide = tensor.to(at::kLong).contiguous();
    const auto elements = static_cast<std::size_t>(wide.numel());
    if (Status status = reduce_bytes(wide.data_ptr(), elements, sum, deadline); !status.ok())
      return status;
    at::Tensor{tensor}.copy_(at::div(wide, size_, "trunc"));
    return {};
  }
  const bool divided_before = average && is_half(spec.element);  // nor do sums of 16-bit floats
  if (divided_before) {
    sum.reduction = Reduction::premul_sum;
    sum.factor = 1.0 / size_;
  }
  const Buffer buffer = Buffer::of(tensor);
  Status status = reduce_bytes(buffer.data(), buffer.elements(), sum, deadline);
  if (!status.ok()) return status;
  if (average && !divided_before) buffer.plain().div_(size_);
  buffer.write_back();
  return {};
}

Status Hosts::broadcast(int root, const at::Tensor& tensor, Deadline deadline) {
  const auto on = static_cast<std::size_t>(std::find_if(hosts_.begin(), hosts_.end(),
                                                        [&](const std::vector<int>& host) {
                                                          return std::find(host.begin(), host.end(),
                                                                           root) != host.end();
                                                        }) -
                                           hosts_.begin());
  const std::vector<int>& theirs = hosts_[on];
  const auto place =
      static_cast<Rank>(std::find(theirs.begin(), theirs.end(), root) - theirs.begin());
  const bool sends = on == own_ && place == local_->rank();
  const Buffer buffer = sends ? Buffer::of(tensor) : Buffer::for_output(tensor);
  // The root's host has it all before its leader passes it on, which the others need not wait for.
  const auto within_host = [&](Rank from) {
    return placed(collectives::broadcast(*local_, from, buffer.data(), buffer.bytes(), deadline));
  };
  if (on == own_)
    if (Status status = within_host(place); !status.ok()) return status;
  Status status = lead([&] {
    if (buffer.bytes() == 0) return;
    std::vector<at::Tensor> bytes{bytes_of(buffer)};
    c10d::BroadcastOptions options;
    options.rootRank = static_cast<std::int64_t>(on);
    options.timeout = left(deadline);
    await(leaders_->broadcast(bytes, options), deadline);
  });
  if (status.ok() && on != own_) status = within_host(kLeader);
  if (status.ok() && !sends) buffer.write_back();
  return status;
}

Status Hosts::barrier(Deadline deadline) {
  if (Status status = collectives::barrier(*local_, deadline); !status.ok())
    return placed(std::move(status));
  c10d::BarrierOptions options;
  options.timeout = left(deadline);
  if (Status status = lead([&] { await(leaders_->barrier(options), deadline); }); !status.ok())
    return status;
  return placed(collectives::barrier(*local_, deadline));
}

void Hosts::abort() noexcept { local_->abort(); }

void Hosts::leave() noexcept {
  local_->leave();
  leaders_.reset();
}

void Hosts::forget() noexcept {
  local_->forget();
  (void)leaders_.release();
}

}  // namespace psplus::pg
