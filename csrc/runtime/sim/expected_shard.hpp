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
};

/// What a shard has held after each batch, computed from the pushes alone with arithmetic of its
/// own. All values are whole numbers that float32 holds exactly, so equality is the only right
/// answer.
class ExpectedShard {
 public:
  explicit ExpectedShard(store::ExtentLayout layout);

  /// One push of a batch: `factor` whole units of its values are subtracted (factor = divisor of
  /// its scale); a set replaces.
  struct Term {
    const PushValues* values;
    double multiplier;
    double divisor;
  };
  void subtract(BatchId batch, std::span<const Term> terms);
  void replace(BatchId batch, const PushValues& values);

  /// Whether `bytes` are chunk `chunk` as `batch` left it; else what is wrong.
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
    std::uint32_t offset;
    Storage storage;
  };
  struct Version {
    BatchId batch;
    std::vector<double> values;
  };
  [[nodiscard]] const Version& at_or_before(ChunkIndex chunk, BatchId batch) const;

  store::ExtentLayout layout_;
  std::vector<std::size_t> first_scalar_;
  std::size_t scalar_count_ = 0;
  std::vector<std::vector<Cell>> cells_;        ///< by chunk
  std::vector<std::vector<Version>> versions_;  ///< by chunk, ascending batch, the first is batch 0
};

}  // namespace psplus::sim
