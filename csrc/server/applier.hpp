#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.hpp"
#include "server/apply_log.hpp"
#include "server/context.hpp"

namespace psplus::server {

/// Carries out the operations of the apply log, a bounded piece at a time.
///
/// Order of writes of a batch: (record opened) -> chunks -> counters -> record closed -> `applied`
/// -> wake. A chunk is done when its entry names the batch, so a successor redoes exactly the
/// chunks that lack it; counters are stored as the record gives them, so storing them twice changes
/// nothing.
class Applier {
 public:
  explicit Applier(Context& context) noexcept : context_(context) {}

  void begin(const Operation& operation);
  /// Does up to `budget` bytes of work. @return whether the operation has ended.
  [[nodiscard]] bool advance(std::size_t budget);
  /// Stores the words that follow a closed batch: for a successor, whose predecessor may have died
  /// between closing and announcing.
  void announce_all();

 private:
  /// A push of the open batch with what it lends of the extent at hand until its batch ends.
  struct Borrowed {
    bool all_params;
    std::uint32_t flags;
    double scale;
    LentPush lent;
  };
  enum class Phase : std::uint8_t { kChunks, kCounters, kClose, kAnnounce, kDone };

  bool advance_batch(std::size_t budget);
  bool advance_cut(const TakeCut& cut, std::size_t budget);
  void enter_extent();
  [[nodiscard]] bool chunk_is_touched(ChunkIndex chunk) const;
  [[nodiscard]] bool carries(const Borrowed& push, std::uint32_t param) const;
  std::size_t apply_piece();
  template <class S>
  void apply_range(std::size_t begin, std::size_t end, const std::vector<const Borrowed*>& terms);
  /// The same where the servers step: values and state of one parameter, which is the `place`-th of
  /// the chunk; the padding between two when there are no terms.
  template <class S>
  void step_range(std::size_t begin, std::size_t end, const std::vector<const Borrowed*>& terms,
                  std::uint32_t param, std::size_t place);
  void write_counts();
  [[nodiscard]] bool steps() const noexcept { return shard_->view.rule().steps(); }
  [[nodiscard]] const std::byte* current_unit() const;
  void flip_chunk();
  void write_counters();
  void announce();

  Context& context_;
  std::optional<Operation> operation_;
  Phase phase_ = Phase::kDone;

  BatchId batch_{};
  StreamId stream_{};
  store::BatchKind kind_{};
  double mean_scale_ = 0;
  std::vector<Borrowed> pushes_;

  // Cursor: extent of the stream, chunk of the extent, byte of the chunk.
  std::uint32_t extent_index_ = 0;
  store::OwnedShard* shard_ = nullptr;
  std::uint32_t chunk_ = 0;
  std::size_t byte_ = 0;
  bool every_push_is_whole_ = false;
};

}  // namespace psplus::server
