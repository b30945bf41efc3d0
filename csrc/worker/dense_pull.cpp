// Pulls and waits of a dense stream.

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/format.hpp"
#include "base/futex.hpp"
#include "kernels/kernels.hpp"
#include "server/gate.hpp"
#include "worker/use_chunk.hpp"

namespace psplus::worker {
namespace {

constexpr nanoseconds kLook = milliseconds{100};

}  // namespace

Status DenseStream::wait(std::string_view what, const std::function<bool()>& ready, Gate gate) {
  const TimePoint since = Clock::now();
  bool told = false;
  for (;;) {
    const bool done = wait_until(mail().wake, Deadline::after(kLook), ready);
    if (done) {
      counters_.waited += Clock::now() - since;
      return {};
    }
    if (Status status = still_hopeful(what, since, gate, told); !status.ok()) return status;
  }
}

Status DenseStream::still_hopeful(std::string_view what, TimePoint since, Gate gate,
                                  bool& told) const {
  if (Status status = session_->check_server(since, options_.timeout); !status.ok()) return status;
  if (queue_.closed() && !closed_)
    return {StatusCode::kClosed, "the server expelled this worker and closed its queue"};
  const auto waited = Clock::now() - since;
  if (waited < options_.timeout) return {};
  bool all_alive = true;
  const std::string who = missing_workers(since, gate, all_alive);
  const std::string text = formatted("rank {} waited {:.1f} s for {}; {}",
                                     raw(session_->options().rank), to_seconds(waited), what, who);
  if (!all_alive || waited >= options_.straggler_timeout) return {StatusCode::kTimeout, text};
  if (!std::exchange(told, true))
    session_->options().warn(formatted("{}; it goes on waiting, straggler_timeout is {:g} s", text,
                                       to_seconds(options_.straggler_timeout)));
  return {};
}

/// Names the workers that the stream's gates wait for, and whether each has shown life.
std::string DenseStream::missing_workers(TimePoint since, Gate gate, bool& all_alive) const {
  const store::ControlBlock& control = session_->control();
  const Step own = server::gate_clock(control, options_.stream, session_->member());
  std::vector<std::string> parts;
  for (std::uint16_t m = 0; m < store::kMaxMembers; ++m) {
    const MemberId member{m};
    if (member == session_->member() || !server::is_active(control, options_.stream, member))
      continue;
    const store::StreamMember& counters = entry().members[m];
    const Step clock{counters.clock.load(std::memory_order_relaxed)};
    const bool stands = server::stands_at_barrier(control, options_.stream, member);
    const bool is_ahead = server::gate_clock(control, options_.stream, member) > own;
    if (stands || (gate == Gate::kStep && is_ahead)) continue;
    const TimePoint sign =
        from_nanoseconds(control.members[m].last_sign_of_life.load(std::memory_order_relaxed));
    const auto silent = Clock::now() - std::max(sign, since);
    const bool alive = silent < options_.timeout;
    all_alive = all_alive && alive;
    parts.push_back(formatted(
        "rank {} (process {}) is at step {}{}",
        control.members[m].rank.load(std::memory_order_relaxed),
        control.members[m].process.load(std::memory_order_relaxed), raw(clock),
        alive ? " and alive" : formatted(" and silent for {:.1f} s", to_seconds(silent))));
  }
  return parts.empty() ? "no worker is behind" : joined(parts, "; ");
}

Status DenseStream::wait_for_slot() {
  return wait("a free push slot", [&] { return queue_.slot_is_free(); });
}

Status DenseStream::wait_applied() {
  return wait("its pushes to be applied", [&] { return queue_.all_applied(); });
}

Status DenseStream::request_cut() {
  const auto has_pulls = [&](ExtentPart& part) { return part.find_pulls(*session_); };
  if (!std::all_of(parts_.begin(), parts_.end(), has_pulls)) {
    const auto answer = session_->ask(
        wire::NeedPull{options_.stream}, {},
        [&, since = Clock::now()] { return session_->check_server(since, options_.timeout); });
    if (!answer.ok()) return answer.status();
    if (!std::all_of(parts_.begin(), parts_.end(), has_pulls))
      return {StatusCode::kInternal, "the server made no pull buffers"};
  }
  if (Status status = wait_applied(); !status.ok()) return status;
  // The other buffer may hold the snapshot of the step at hand, or the reply to the last push.
  const std::uint32_t reply = static_cast<std::uint32_t>((base_clock_ + steps_) % 2);
  const std::uint32_t buffer = steps_ == 0 ? reply : 1 - reply;
  const std::uint64_t request = ++cuts_ << 1 | buffer;
  mail().cut_requested.store(request, std::memory_order_seq_cst);
  session_->ring();
  const Status status = wait("a cut of the server", [&] {
    return mail().cut_done.load(std::memory_order_acquire) == request;
  });
  if (status.ok()) cut_ = buffer;
  return status;
}

void DenseStream::copy_out(const ExtentPart& part, const std::byte* values, ChunkIndex chunk,
                           std::span<void* const> own_params, double local_scale) const {
  const store::ExtentLayout& layout = part.layout();
  const std::uint64_t begin = index(chunk) * layout.chunk_bytes();
  const std::uint64_t end = begin + layout.chunk_bytes();
  const auto [first, last] = layout.params_of_chunk(chunk);
  const std::byte* const slot = part.slots().values(queue_.next()).data();
  for (std::uint32_t k = first; k < last; ++k) {
    const std::uint32_t i = layout.order()[k];
    const store::ParamPlace& place = layout.places()[i];
    const std::uint64_t from = std::max(begin, place.byte_offset);
    const std::uint64_t to = std::min(end, place.byte_end());
    const DType dtype = layout.params()[i].dtype;
    const std::size_t scalar_bytes = storage_bytes(place.storage);
    const std::size_t own_bytes = element_bytes(dtype) / scalars_per_element(dtype);
    auto* const x = static_cast<std::byte*>(own_params[i]) +
                    (from - place.byte_offset) / scalar_bytes * own_bytes;
    const bool with_delta = local_scale != 0.0 && carried_[part.first_param() + i] != 0;
    with_storage(place.storage, [&]<class S>(S) {
      kernels::best().of<S>().pull(dtype, reinterpret_cast<const S*>(values + (from - begin)),
                                   with_delta ? reinterpret_cast<const S*>(slot + from) : nullptr,
                                   static_cast<S>(local_scale), x, (to - from) / scalar_bytes);
    });
  }
}

Status DenseStream::pull_part(const ExtentPart& part, std::span<void* const> own_params,
                              double local_scale) {
  for (std::uint32_t c = 0; c < part.layout().chunk_count(); ++c) {
    const ChunkIndex chunk{c};
    const Status status = use_chunk(part, chunk, [&](const std::byte* values, bool /*again*/) {
      copy_out(part, values, chunk, own_params, local_scale);
    });
    if (!status.ok()) return status;
  }
  counters_.bytes_pulled += part.layout().value_bytes();
  return {};
}

Status DenseStream::pull(std::span<void* const> params, double local_scale) {
  for (const ExtentPart& part : parts_)
    if (Status status = pull_part(part, part.own(params), local_scale); !status.ok()) return status;
  return {};
}

Status DenseStream::refresh() {
  if (options_.pull == store::PullMode::kMapped) return wait_applied();
  const Status status = request_cut();
  if (status.ok()) refreshed_at_ = steps_;
  return status;
}

Status DenseStream::pull_cut(std::span<void* const> params) {
  const auto snapshot_buffer = cut_;
  if (Status status = request_cut(); !status.ok()) return status;
  for (const ExtentPart& part : parts_) {
    const std::byte* const values = part.pulls().values(*cut_).data();
    for (std::uint32_t c = 0; c < part.layout().chunk_count(); ++c)
      copy_out(part, values + c * part.layout().chunk_bytes(), ChunkIndex{c}, part.own(params),
               0.0);
  }
  counters_.bytes_pulled += value_bytes_;
  // An evaluation is no snapshot: the next step goes on from what it had.
  cut_ = options_.pull == store::PullMode::kBuffered ? snapshot_buffer : std::nullopt;
  return {};
}

}  // namespace psplus::worker
