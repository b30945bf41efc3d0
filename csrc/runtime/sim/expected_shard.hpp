#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "store/layout.hpp"

namespace psplus::sim {

/// Contents of a push as its worker meant them: whole numbers, one a scalar, in layout order.
struct PushValues {
  std::vector<double> scalars;
  std::vector<bool> carried;  ///< by parameter
  /// Where the server steps, by parameter: learning rates, or in a set of state the steps in it.
  std::vector<double> rates;
  std::vector<std::uint64_t> counts;
};

/// What a shard has held after each batch, computed from the pushes alone with arithmetic of its
/// own. All values are whole numbers that float32 holds exactly, so equality is the only right
/// answer.
class ExpectedShard {
 public:
  /// `has_momentum`: pushes are gradients of SGD with momentum 1.
  explicit ExpectedShard(store::ExtentLayout layout, bool has_momentum = false);

  /// One push of a batch: `factor` whole units of its values are subtracted (factor = divisor of
  /// its scale); a set replaces.
  struct Term {
    const PushValues* values;
    double multiplier;
    double divisor;
  };
  void subtract(BatchId batch, std::span<const Term> terms);
  /// The same for gradients: a step for each term, or one on their mean.
  void step(BatchId batch, std::span<const Term> terms, bool mean);
  void replace(BatchId batch, const PushValues& values);
  void replace_state(BatchId batch, const PushValues& values);

  /// Whether `bytes` are chunk `chunk` as `batch` left it; else what is wrong. Of a whole unit also
  /// whether state and counts are.
  [[nodiscard]] std::optional<std::string> compare(ChunkIndex chunk, BatchId batch,
                                                   std::span<const std::byte> bytes) const;
  /// The last batch not after `batch` that changed `chunk`; 0 when none did.
  [[nodiscard]] BatchId last_change(ChunkIndex chunk, BatchId batch) const;
  [[nodiscard]] const store::ExtentLayout& layout() const noexcept { return layout_; }
  /// Index of the first scalar of `param` in PushValues::scalars.
  [[nodiscard]] std::size_t first_scalar(std::size_t param) const { return first_scalar_[param]; }
  [[nodiscard]] std::size_t scalar_count() const noexcept { return scalar_count_; }

 private:
  /// A scalar's place within its chunk.
  struct Cell {
    std::size_t scalar;
    std::uint32_t param;
    std::uint32_t place;  ///< of the parameter among those of the chunk
    std::uint32_t offset;
    Storage storage;
  };
  struct Version {
    BatchId batch;
    std::vector<double> values;
    std::vector<double> buffers;        ///< momentum, by cell
    std::vector<std::uint64_t> counts;  ///< by place
  };
  [[nodiscard]] const Version& at_or_before(ChunkIndex chunk, BatchId batch) const;

  [[nodiscard]] std::optional<std::string> compare_cells(ChunkIndex chunk, BatchId batch,
                                                         std::span<const std::byte> area,
                                                         const std::vector<double>& expected,
                                                         std::string_view what) const;

  store::ExtentLayout layout_;
  bool has_momentum_;
  std::vector<std::size_t> first_scalar_;
  std::size_t scalar_count_ = 0;
  std::vector<std::vector<Cell>> cells_;        ///< by chunk
  std::vector<std::vector<Version>> versions_;  ///< by chunk, ascending batch, the first is batch 0
};

}  // namespace psplus::sim
