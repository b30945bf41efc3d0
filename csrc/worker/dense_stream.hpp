#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.hpp"
#include "base/status.hpp"
#include "kernels/step.hpp"
#include "store/layout.hpp"
#include "store/mailbox.hpp"
#include "worker/extent_part.hpp"
#include "worker/push_queue.hpp"
#include "worker/session.hpp"
#include "worker/step_vector.hpp"

namespace psplus::worker {

/// From this size on what is written goes past the caches: the next to read it, the server
/// or the next forward pass, would find it evicted anyway.
constexpr std::uint64_t kStreamingBytes = std::uint64_t{8} << 20;

struct StreamOptions {
  StreamId stream{};
  store::Mode mode = store::Mode::kAsync;
  store::PullMode pull = store::PullMode::kMapped;
  std::uint64_t bound = store::kNoBound;  ///< staleness bound in steps
  store::Rule rule{};                     ///< with the state planes of the first extent
  nanoseconds timeout = std::chrono::seconds{60};
  nanoseconds straggler_timeout = std::chrono::seconds{1800};
};

/// One parameter in a fused step: contiguous elements of the declared dtype.
struct FusedParam {
  const void* gradient = nullptr;  ///< null: not pushed; the parameter takes the servers' value
  void* value = nullptr;
  void* states[kernels::kMaxStates] = {};  ///< as many as rule.state_count()
  kernels::StepRule rule;
};

/// State that an extent begins with, where the servers step: of each plane the own parameters'
/// elements, and the steps that are in it.
struct FirstState {
  std::span<const std::vector<const void*>> planes;
  std::span<const std::uint64_t> counts;
};

/// What a worker knows when it has begun a snapshot.
struct Observation {
  std::uint64_t observed = 0;           ///< foreign pushes between the last two snapshots
  std::optional<std::uint64_t> actual;  ///< staleness of the last acknowledged push
  std::uint64_t step = 0;               ///< the step that the worker is at, from 1
  std::uint32_t num_workers = 0;
  std::vector<std::uint64_t> step_vector;  ///< gate counters by rank
  std::vector<double> rates;               ///< pushes a second by rank, 0 while unknown
};

/// One worker's end of a stream of dense parameters.
///
/// A step begins with begin_step(). By the generic path, snapshot() copies the parameters, whatever
/// optimizer there is steps on them, and write_delta() makes the difference the push. By the fused
/// path, fused_step() does all of it in one pass, and the pull too. Where the servers step,
/// write_gradients() is all that the worker does.
///
/// A stream begins with one extent; add_extent() appends others. A push is one step over all of
/// them: it names those of which it carries anything. A snapshot is one over all of them too.
///
/// Parameters are passed as pointers to contiguous elements of the declared dtype, in the order of
/// params(). Calls that wait follow the session's time-out rules.
/// Thread safety: none; one thread steps.
class DenseStream {
 public:
  /// Registers the stream and waits until this worker counts in it. Errors: kLayoutMismatch,
  /// kConfig, kTimeout (names the workers that are missing).
  static Result<std::unique_ptr<DenseStream>> open(std::shared_ptr<Session> session,
                                                   StreamOptions options,
                                                   store::ExtentLayout layout,
                                                   std::span<const std::byte> blob);

  /// Whether the last extent began with this worker's values.
  [[nodiscard]] bool provides() const {
    return session_->provides(options_.stream, parts_.back().place());
  }
  /// Whether the stream held values when this worker opened it.
  [[nodiscard]] bool rejoined() const noexcept { return rejoined_; }
  /// Blob of the worker whose values the last extent began with, empty if there is none.
  [[nodiscard]] std::span<const std::byte> blob() const noexcept { return parts_.back().blob(); }

  /// Appends the parameters `params`. Their values are `own`, if this worker is the first to come,
  /// else those that the servers hold; they are in `values` then. Not before or after other
  /// workers, and waits for none but the first. When it fails the stream is as it was, and the call
  /// may be repeated. Errors: as open(); throws what ExtentLayout throws.
  /// `state` has as many planes as the servers shall keep for the extent.
  Status add_extent(std::vector<store::ParamSpec> params, std::span<const std::byte> blob,
                    std::span<const void* const> own, std::span<void* const> values,
                    const FirstState& state = {});

  Status publish_values(std::span<const void* const> params);
  /// Sets a plane of the servers' state, and steps taken, by parameter. Of extents that lack the
  /// plane nothing is read. Who gives the first values sets all planes before.
  Status publish_plane(std::uint32_t plane, std::span<const void* const> params,
                       std::span<const std::uint64_t> counts);
  /// Of the first extent: @return true when the servers hold somebody's values; false when this
  /// worker is the one that must publish_values() now (also because the one before it died).
  Result<bool> wait_initialised();
  /// The step's gradients were computed on the last snapshot taken.
  void begin_step() noexcept { computed_on_ = seen_.foreign(session_->member()); }
  void snapshot(std::span<const void* const> params);
  /// @return index of the first parameter with a difference that is not finite, -1 if there is
  /// none.
  Result<std::int64_t> write_delta(std::span<const void* const> params,
                                   std::span<const std::uint8_t> carried);
  /// Waits until there is a slot for the step's push: write_delta() and fused_step() then do not.
  Status wait_for_slot();
  /// Steps on all parameters, writing the updates into the next push slot. With a `local_scale`
  /// also parameter = W - local_scale * update; without one parameters stay as they are.
  /// @return as write_delta() does.
  Result<std::int64_t> fused_step(std::span<const FusedParam> params,
                                  std::optional<double> local_scale);
  /// Where the servers step: writes gradients, null for what is not pushed, and their options into
  /// the next push slot. @return as write_delta() does. Errors: kConfig for options that servers
  /// cannot step by.
  Result<std::int64_t> write_gradients(std::span<const void* const> gradients,
                                       std::span<const store::StepOptions> options);
  /// The servers' state as it is now, each chunk consistent in itself: planes that an extent lacks
  /// stay as they are. `counts`: steps taken, by parameter.
  Status read_state(std::span<const std::span<void* const>> planes,
                    std::span<std::uint64_t> counts);
  Status write_nothing();
  /// Index of the first carried parameter of the prepared push with a value that `scale` makes
  /// infinite or NaN, -1 if there is none.
  [[nodiscard]] std::int64_t first_overflow(double scale) const;
  Status publish(double lambda);
  /// Pushes `values` so that the servers add scale * values, whatever the number of workers.
  /// @return index of the first parameter with a value that is not finite, as it is or scaled, in
  /// which case nothing is pushed if `must_be_finite`; else -1.
  Result<std::int64_t> push_sum(std::span<const void* const> values, double scale,
                                bool must_be_finite);
  /// Waits until own step `steps() - lag` is applied, visible and released.
  Status wait_round(std::uint64_t lag);
  Status observe();
  [[nodiscard]] Observation observation() const;
  Status pull(std::span<void* const> params, double local_scale);
  /// Waits until all own pushes are applied; a pull after it shows W as it is now, also in buffered
  /// mode, where the reply to the last push may be older than what others have pushed since.
  Status refresh();
  /// One state between two batches that contains all own pushes. Begins no snapshot.
  Status pull_cut(std::span<void* const> params);
  /// Stands at the barrier from now on, so that gates do not wait for this worker, and returns at
  /// once; the next barrier() waits at the same one. No pushes in between.
  void arrive();
  Status barrier();
  Status close(nanoseconds timeout);

  [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }
  /// Whether the servers took the last BSP step with other options than this worker's.
  [[nodiscard]] bool was_outvoted() const noexcept {
    return entry().differing.load(std::memory_order_acquire) == raw(session_->options().rank) + 1;
  }
  [[nodiscard]] std::span<const store::ParamSpec> params() const noexcept { return params_; }
  [[nodiscard]] Session& session() noexcept { return *session_; }

  struct Counters {
    std::uint64_t bytes_pushed = 0;
    std::uint64_t bytes_pulled = 0;
    std::uint64_t retries = 0;
    nanoseconds waited{0};
  };
  [[nodiscard]] const Counters& counters() const noexcept { return counters_; }
  /// Pushes of all workers that are applied.
  [[nodiscard]] std::uint64_t total_pushes() const noexcept {
    return entry().total_pushes.load(std::memory_order_acquire);
  }
  /// Gate counters by rank, as they are now.
  [[nodiscard]] std::vector<std::uint64_t> step_vector() const;

 private:
  DenseStream(std::shared_ptr<Session> session, StreamOptions options);
  void append(ExtentPart part);
  Result<bool> wait_initialised(const ExtentPart& part);
  enum class Gate : std::uint8_t { kStep, kBarrier };
  /// Waits until `ready()`; `what` completes "waited for" in the message. `gate`: where others may
  /// be behind.
  Status wait(std::string_view what, const std::function<bool()>& ready, Gate gate = Gate::kStep);
  /// Why a wait that began at `since` must end: server silent, or a peer silent or too slow.
  /// `told`: whether this wait has warned of slow workers.
  [[nodiscard]] Status still_hopeful(std::string_view what, TimePoint since, Gate gate,
                                     bool& told) const;
  [[nodiscard]] std::string missing_workers(TimePoint since, Gate gate, bool& all_alive) const;
  Status wait_applied();
  Status request_cut();
  Status publish_set(std::uint32_t flags, std::uint64_t extents, std::uint64_t bytes);
  /// Into the next slot. @return whether the extent has such a plane.
  bool write_plane(const ExtentPart& part, std::uint32_t plane,
                   std::span<const void* const> own_params,
                   std::span<const std::uint64_t> own_counts);
  Status publish_push(std::uint32_t flags, std::uint64_t extents, double lambda);
  /// Bitmaps, flags and extents of the push in the next slot, of what carried_ says.
  void mark_carried();
  /// Calls `use(values, again)` with chunk `chunk` of the snapshot at hand, see read_in_place().
  template <class Use>
  Status use_chunk(const ExtentPart& part, ChunkIndex chunk, Use use);
  Status pull_part(const ExtentPart& part, std::span<void* const> own_params, double local_scale);
  Result<std::int64_t> step_part(const ExtentPart& part, std::span<const FusedParam> own_params,
                                 std::optional<double> local_scale);
  void copy_out(const ExtentPart& part, const std::byte* values, ChunkIndex chunk,
                std::span<void* const> own_params, double local_scale) const;
  [[nodiscard]] store::MailStream& mail() const noexcept {
    return session_->mailbox().streams[index(options_.stream)];
  }
  [[nodiscard]] const store::StreamEntry& entry() const noexcept {
    return session_->control().streams[index(options_.stream)];
  }
  [[nodiscard]] std::vector<std::uint64_t> by_rank(const std::vector<std::uint64_t>& members) const;

  const std::shared_ptr<Session> session_;
  const StreamOptions options_;
  std::vector<ExtentPart> parts_;         ///< by StreamExtent; one at least
  std::vector<store::ParamSpec> params_;  ///< of all parts, one after another
  std::uint64_t value_bytes_ = 0;         ///< of all parts
  PushQueue queue_;

  bool rejoined_ = false;
  bool closed_ = false;
  bool left_ = false;                 ///< closed, and all of its pushes are in
  std::uint64_t base_clock_ = 0;      ///< gate counter at which this worker entered
  std::uint64_t barriers_ = 0;        ///< barriers this worker has passed
  std::uint64_t steps_ = 0;           ///< steps published
  std::uint64_t cuts_ = 0;            ///< cuts requested
  std::optional<std::uint32_t> cut_;  ///< pull buffer that holds the snapshot at hand (buffered)
  std::optional<std::uint64_t> refreshed_at_;  ///< steps_ when that snapshot came from refresh()

  std::vector<std::byte> copy_;         ///< of a chunk, where reading in place is not possible
  std::uint32_t prepared_flags_ = 0;    ///< of the push in the next slot
  std::uint64_t prepared_extents_ = 0;  ///< likewise
  std::uint32_t layout_version_ = 0;
  std::vector<std::uint8_t> carried_;  ///< by parameter of the stream
  StepVector seen_;                    ///< vector of the last snapshot
  std::uint64_t observed_ = 0;
  std::uint64_t computed_on_ = 0;  ///< foreign pushes in the snapshot that the push was computed on
  Counters counters_;
};

}  // namespace psplus::worker
