// Steps that compute the update, push it and take the servers' values in one pass.

#include <algorithm>
#include <type_traits>

#include "kernels/kernels.hpp"
#include "worker/use_chunk.hpp"

namespace psplus::worker {
namespace {

/// The part of a parameter that lies in one chunk.
struct Piece {
  Piece(const store::ParamPlace& place, DType dtype, std::uint64_t chunk_begin,
        std::uint64_t chunk_end)
      : from(std::max(chunk_begin, place.byte_offset)),
        scalars((std::min(chunk_end, place.byte_end()) - from) / storage_bytes(place.storage)),
        own_offset((from - place.byte_offset) / storage_bytes(place.storage) *
                   (element_bytes(dtype) / scalars_per_element(dtype))) {}

  template <class T>
  [[nodiscard]] T* in(T* parameter) const noexcept {
    using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
    return parameter == nullptr ? nullptr : static_cast<Byte*>(parameter) + own_offset;
  }

  std::uint64_t from;  ///< in the extent
  std::size_t scalars;
  std::size_t own_offset;  ///< bytes from the parameter's first element
};

/// @return whether the update is finite.
template <class S>
bool step_piece(const FusedParam& param, DType dtype, const Piece& piece, S* update, const S* w,
                double local_scale, bool again, bool streams) {
  const auto& kernels = kernels::best().of<S>();
  const auto scale = static_cast<S>(local_scale);
  void* const value = piece.in(param.value);
  if (param.gradient == nullptr) {
    if (w != nullptr) kernels.pull(dtype, w, nullptr, scale, value, piece.scalars);
    return true;
  }
  if (again) {  // update and state are as they must be: only what was read has changed
    kernels.pull(dtype, w, update, scale, value, piece.scalars);
    return true;
  }
  kernels::StepRun<S> run{.gradient = piece.in(param.gradient),
                          .parameter = value,
                          .update = update,
                          .w = w,
                          .local_scale = scale,
                          .streams = streams};
  for (std::size_t s = 0; s < kernels::kMaxStates; ++s) run.states[s] = piece.in(param.states[s]);
  return kernels.step(dtype, param.rule, run, piece.scalars);
}

}  // namespace

Result<std::int64_t> DenseStream::fused_step(std::span<const FusedParam> params,
                                             std::optional<double> local_scale) {
  if (Status status = wait_for_slot(); !status.ok()) return status;
  carried_.resize(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) carried_[i] = params[i].gradient != nullptr;
  mark_carried();
  std::int64_t first = -1;
  for (const ExtentPart& part : parts_) {
    const auto bad = step_part(part, part.own(params), local_scale);
    if (!bad.ok()) return bad;
    if (first < 0) first = *bad;
  }
  if (local_scale) counters_.bytes_pulled += value_bytes_;
  return first;
}

Result<std::int64_t> DenseStream::step_part(const ExtentPart& part,
                                            std::span<const FusedParam> own_params,
                                            std::optional<double> local_scale) {
  const store::ExtentLayout& layout = part.layout();
  std::byte* const slot = part.slots().values(queue_.next()).data();
  std::int64_t bad = -1;
  const bool streams = value_bytes_ >= kStreamingBytes;
  for (std::uint32_t c = 0; c < layout.chunk_count(); ++c) {
    const ChunkIndex chunk{c};
    const std::uint64_t begin = c * layout.chunk_bytes();
    const auto step_chunk = [&](const std::byte* values, bool again) {
      const auto [first, last] = layout.params_of_chunk(chunk);
      for (std::uint32_t k = first; k < last; ++k) {
        const std::uint32_t i = layout.order()[k];
        const store::ParamPlace& place = layout.places()[i];
        const DType dtype = layout.params()[i].dtype;
        const Piece piece{place, dtype, begin, begin + layout.chunk_bytes()};
        with_storage(place.storage, [&]<class S>(S) {
          const S* const w = values == nullptr
                                 ? nullptr
                                 : reinterpret_cast<const S*>(values + (piece.from - begin));
          const bool finite =
              step_piece(own_params[i], dtype, piece, reinterpret_cast<S*>(slot + piece.from), w,
                         local_scale.value_or(0.0), again, streams);
          const auto at = static_cast<std::int64_t>(part.first_param() + i);
          if (!finite && (bad < 0 || at < bad)) bad = at;
        });
      }
    };
    if (!local_scale) {
      step_chunk(nullptr, false);
    } else if (Status status = use_chunk(part, chunk, step_chunk); !status.ok()) {
      return status;
    }
  }
  return bad;
}

}  // namespace psplus::worker
