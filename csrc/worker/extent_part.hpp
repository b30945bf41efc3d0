#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/ids.hpp"
#include "base/segment.hpp"
#include "base/status.hpp"
#include "store/layout.hpp"
#include "store/mailbox.hpp"
#include "store/shard.hpp"
#include "wire/messages.hpp"
#include "worker/session.hpp"

namespace psplus::worker {

/// One extent of a stream as its worker sees it: layout and segments. Calls that take parameters of
/// the stream (all of its extents, one after another) use those of this extent.
class ExtentPart {
 public:
  /// Maps the segments of the extent that `ready` is about. `first_param`: parameters of the
  /// extents before it. Errors: kInternal when the server left something out.
  static Result<ExtentPart> attach(const Session& session, const wire::StreamReady& ready,
                                   store::ExtentLayout layout, std::size_t first_param);

  [[nodiscard]] StreamExtent place() const noexcept { return place_; }
  /// The version of the job's layout that added it.
  [[nodiscard]] std::uint32_t layout_version() const noexcept { return raw(id_) + 1U; }
  [[nodiscard]] std::uint64_t bit() const noexcept { return std::uint64_t{1} << raw(place_); }
  [[nodiscard]] const store::ExtentLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] const store::ShardView& shard() const noexcept { return shard_; }
  [[nodiscard]] const store::SlotsView& slots() const noexcept { return slots_; }
  /// Empty when there are none yet.
  [[nodiscard]] const store::PullView& pulls() const noexcept { return pulls_; }
  /// Takes pull buffers that were made meanwhile. @return whether there are any.
  bool find_pulls(const Session& session);
  /// Whether it holds somebody's values.
  [[nodiscard]] bool is_initialised(const Session& session) const noexcept;
  /// Blob of the worker whose values it began with, empty if there is none.
  [[nodiscard]] std::span<const std::byte> blob() const noexcept;

  [[nodiscard]] std::size_t first_param() const noexcept { return first_param_; }
  /// What belongs to this extent of one entry a parameter of the stream.
  template <class T>
  [[nodiscard]] std::span<T> own(std::span<T> all) const noexcept {
    return all.subspan(first_param_, layout_.params().size());
  }

  /// This extent's parameters that are not null, as storage scalars, at their places in `values`;
  /// with `streams` past the caches. @return index in the stream of the first that is not finite,
  /// -1 for none.
  std::int64_t widen_into(std::span<const void* const> own_params, std::span<std::byte> values,
                          bool streams) const;
  /// Keeps a copy for write_delta().
  void snapshot(std::span<const void* const> own_params);
  /// Copy minus what is there now, of the carried parameters. @return as widen_into() does.
  std::int64_t write_delta(std::span<const void* const> own_params,
                           std::span<const std::uint8_t> own_carried,
                           std::span<std::byte> values) const;

 private:
  explicit ExtentPart(store::ExtentLayout layout) : layout_(std::move(layout)) {}

  store::ExtentLayout layout_;
  StreamExtent place_{};
  ExtentId id_{};
  std::size_t first_param_ = 0;
  std::shared_ptr<Segment> shard_segment_;
  std::shared_ptr<Segment> slots_segment_;
  std::shared_ptr<Segment> pull_segment_;
  std::shared_ptr<Segment> blob_segment_;
  store::ShardView shard_;
  store::SlotsView slots_;
  store::PullView pulls_;
  std::vector<std::byte> before_;  ///< parameters before the step, in the extent's addressing
};

}  // namespace psplus::worker
