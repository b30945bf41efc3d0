// How a dense stream begins and grows: registration and first values of its extents.

#include <algorithm>
#include <utility>

#include "base/format.hpp"
#include "worker/stream_start.hpp"
#include "worker/use_chunk.hpp"

namespace psplus::worker {
namespace {

constexpr std::uint32_t kSetValues = store::kPushSet | store::kPushAllParams;

}  // namespace

DenseStream::DenseStream(std::shared_ptr<Session> session, StreamOptions options)
    : session_(std::move(session)),
      options_(options),
      queue_(mail(), session_->incarnation()),
      seen_(load_step_vector(session_->control(), options_.stream)) {}

Result<std::unique_ptr<DenseStream>> DenseStream::open(std::shared_ptr<Session> session,
                                                       StreamOptions options,
                                                       store::ExtentLayout layout,
                                                       std::span<const std::byte> blob) {
  const auto ready =
      register_extent(*session, options, StreamExtent{0}, options.rule, layout, blob);
  if (!ready.ok()) return ready.status();
  auto part = ExtentPart::attach(*session, *ready, std::move(layout), 0);
  if (!part.ok()) return part.status();
  std::unique_ptr<DenseStream> stream{new DenseStream(std::move(session), options)};
  stream->rejoined_ = ready->rejoined;
  stream->base_clock_ = raw(ready->clock);
  stream->barriers_ = ready->barriers;
  stream->append(std::move(part).value());
  return stream;
}

void DenseStream::append(ExtentPart part) {
  const auto params = part.layout().params();
  params_.insert(params_.end(), params.begin(), params.end());
  value_bytes_ += part.layout().value_bytes();
  carried_.resize(params_.size(), 0);
  layout_version_ = std::max(layout_version_, part.layout_version());
  parts_.push_back(std::move(part));
}

Status DenseStream::add_extent(std::vector<store::ParamSpec> params,
                               std::span<const std::byte> blob, std::span<const void* const> own,
                               std::span<void* const> values, const FirstState& state) {
  if (parts_.size() == store::kMaxStreamExtents)
    return {StatusCode::kConfig,
            formatted("a wrapped optimizer takes {} parameter groups after wrapping at most; put "
                      "several into one group",
                      store::kMaxStreamExtents - 1)};
  store::ExtentLayout layout{std::move(params), parts_.front().layout().chunk_bytes()};
  const StreamExtent place{static_cast<std::uint16_t>(parts_.size())};
  const store::Rule rule{options_.rule.kind, static_cast<std::uint8_t>(state.planes.size())};
  const auto ready = register_extent(*session_, options_, place, rule, layout, blob);
  if (!ready.ok()) return ready.status();
  auto attached = ExtentPart::attach(*session_, *ready, std::move(layout), params_.size());
  if (!attached.ok()) return attached.status();
  ExtentPart part = std::move(attached).value();
  for (;;) {
    const auto initialised = wait_initialised(part);
    if (!initialised.ok()) return initialised.status();
    if (*initialised) break;
    const std::uint64_t bytes = part.layout().value_bytes();
    for (std::uint32_t p = 0; p < rule.planes; ++p) {
      if (Status status = wait_for_slot(); !status.ok()) return status;
      write_plane(part, p, state.planes[p], state.counts);
      if (Status status = publish_set(store::set_plane(p), part.bit(), bytes); !status.ok())
        return status;
    }
    if (Status status = wait_for_slot(); !status.ok()) return status;
    part.widen_into(own, part.slots().values(queue_.next()), false);
    if (Status status = publish_set(kSetValues, part.bit(), bytes); !status.ok()) return status;
  }
  // A buffered reply that is under way may be older than the extent: a cut that is not takes its
  // place. The step vector stays that of the last snapshot, which the other parameters are from.
  if (options_.pull == store::PullMode::kBuffered)
    if (Status status = refresh(); !status.ok()) return status;
  if (Status status = pull_part(part, values, 0.0); !status.ok()) return status;
  append(std::move(part));
  return {};
}

Status DenseStream::publish_values(std::span<const void* const> params) {
  if (Status status = wait_for_slot(); !status.ok()) return status;
  std::uint64_t extents = 0;
  for (const ExtentPart& part : parts_) {
    part.widen_into(part.own(params), part.slots().values(queue_.next()), false);
    extents |= part.bit();
  }
  return publish_set(kSetValues, extents, value_bytes_);
}

/// Publishes what is in the next slot in place of the servers', and waits until it is.
Status DenseStream::publish_set(std::uint32_t flags, std::uint64_t extents, std::uint64_t bytes) {
  if (Status status = publish_push(flags, extents, 1.0); !status.ok()) return status;
  counters_.bytes_pushed += bytes;
  return wait_applied();
}

Result<bool> DenseStream::wait_initialised() { return wait_initialised(parts_.front()); }

Result<bool> DenseStream::wait_initialised(const ExtentPart& part) {
  const Status status = wait("the first worker's values", [&] {
    return part.is_initialised(*session_) || session_->provides(options_.stream, part.place());
  });
  if (!status.ok()) return status;
  return part.is_initialised(*session_);
}

}  // namespace psplus::worker
