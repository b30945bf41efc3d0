// all_reduce, reduce and reduce_scatter.

#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/collectives.hpp"
#include "collectives/passage.hpp"
#include "collectives/pieces.hpp"

namespace psplus::collectives {
namespace {

// Up to this size every rank reduces everything itself: one hand-over instead of two.
constexpr std::size_t kFlatBytes = std::size_t{16} << 10;

/// Reduces one stretch of everybody's slots.
class SlotReducer {
 public:
  SlotReducer(Group& group, Passage& passage, const ReduceSpec& spec)
      : passage_(passage),
        function_(reduce_function(spec.element, spec.reduction)),
        element_bytes_(element_bytes(spec.element)),
        sources_(group.size()),
        factors_(group.size(), 1.0) {}

  /// Takes everybody's factor; after await_all(0).
  void read_factors() {
    for (std::size_t r = 0; r < factors_.size(); ++r)
      factors_[r] = passage_.header(static_cast<Rank>(r)).factor;
  }

  /// `elements` elements from `offset` bytes on in each slot of `round`, in the order of ranks.
  void reduce(std::uint64_t round, std::size_t offset, std::size_t elements, void* out) {
    for (std::size_t r = 0; r < sources_.size(); ++r)
      sources_[r] = passage_.slot(static_cast<Rank>(r), round) + offset;
    function_(out, {sources_.data(), factors_.data(), sources_.size()}, elements);
  }

  [[nodiscard]] std::size_t bytes_of_element() const noexcept { return element_bytes_; }

 private:
  Passage& passage_;
  ReduceFunction function_;
  std::size_t element_bytes_;
  std::vector<const void*> sources_;
  std::vector<double> factors_;
};

/// Part `part` of `parts` of a stretch of `bytes`, cut at cache lines.
struct Part {
  std::size_t offset;
  std::size_t bytes;
};
Part part_of(std::size_t bytes, std::size_t part, std::size_t parts) {
  const std::size_t share = align_up((bytes + parts - 1) / parts);
  const std::size_t begin = std::min(bytes, share * part);
  return {begin, std::min(share, bytes - begin)};
}

/// The common course of all_reduce and reduce: `out` is null on ranks that receive nothing.
class PipelinedReduce {
 public:
  PipelinedReduce(Group& group, Passage& passage, SlotReducer& reducer, const void* in, void* out,
                  std::size_t bytes)
      : rank_(index(group.rank())),
        ranks_(group.size()),
        passage_(passage),
        reducer_(reducer),
        in_(static_cast<const std::byte*>(in)),
        out_(static_cast<std::byte*>(out)),
        bytes_(bytes),
        chunk_(group.memory().slot_bytes()) {}

  /// Three stages, each a round behind the one before, so that waiting for others overlaps work:
  /// fill the slot; reduce this rank's part of all slots into its own; collect the other parts.
  Status run() {
    const std::uint64_t rounds = rounds_for(bytes_, chunk_);
    for (std::uint64_t step = 0; step < rounds + 2; ++step) {
      if (step < rounds)
        if (Status status = fill(step); !status.ok()) return status;
      if (step >= 1 && step - 1 < rounds)
        if (Status status = reduce_part(step - 1); !status.ok()) return status;
      if (step >= 2)
        if (Status status = collect(step - 2); !status.ok()) return status;
    }
    passage_.finish(rounds);
    return {};
  }

 private:
  [[nodiscard]] std::size_t bytes_in(std::uint64_t round) const {
    return std::min(chunk_, bytes_ - round * chunk_);
  }

  Status fill(std::uint64_t round) {
    if (Status status = passage_.claim(round); !status.ok()) return status;
    std::memcpy(passage_.own(round), in_ + round * chunk_, bytes_in(round));
    passage_.publish(round);
    return {};
  }

  Status reduce_part(std::uint64_t round) {
    if (Status status = passage_.await_all(round); !status.ok()) return status;
    if (round == 0) reducer_.read_factors();
    const Part part = part_of(bytes_in(round), rank_, ranks_);
    std::byte* const own = passage_.own(round) + part.offset;
    reducer_.reduce(round, part.offset, part.bytes / reducer_.bytes_of_element(), own);
    if (out_ != nullptr && part.bytes != 0)
      std::memcpy(out_ + round * chunk_ + part.offset, own, part.bytes);
    passage_.publish_reduced(round);
    return {};
  }

  Status collect(std::uint64_t round) {
    if (out_ != nullptr) {
      if (Status status = passage_.await_all_reduced(round); !status.ok()) return status;
      for (std::size_t i = 0; i < passage_.peers(); ++i) {
        const Rank peer = passage_.peer(i);
        const Part part = part_of(bytes_in(round), index(peer), ranks_);
        if (part.bytes != 0)
          std::memcpy(out_ + round * chunk_ + part.offset, passage_.slot(peer, round) + part.offset,
                      part.bytes);
      }
    }
    passage_.release(round);
    return {};
  }

  std::size_t rank_;
  std::size_t ranks_;
  Passage& passage_;
  SlotReducer& reducer_;
  const std::byte* in_;
  std::byte* out_;
  std::size_t bytes_;
  std::size_t chunk_;
};

Status reduce_to(Group& group, const Call& call, const void* in, void* out, std::size_t elements,
                 const ReduceSpec& spec, Deadline deadline) {
  Passage passage{group, call, deadline};
  SlotReducer reducer{group, passage, spec};
  const std::size_t bytes = call.bytes;
  if (bytes > kFlatBytes) return PipelinedReduce{group, passage, reducer, in, out, bytes}.run();

  if (Status status = passage.claim(0); !status.ok()) return status;
  if (bytes != 0) std::memcpy(passage.own(0), in, bytes);
  passage.publish(0);
  if (out != nullptr || bytes == 0) {
    if (Status status = passage.await_all(0); !status.ok()) return status;
    if (spec.reduction == Reduction::premul_sum) reducer.read_factors();
    reducer.reduce(0, 0, elements, out);
  }
  passage.finish(1);
  return {};
}

}  // namespace

Status all_reduce(Group& group, const void* in, void* out, std::size_t elements,
                  const ReduceSpec& spec, Deadline deadline) {
  const Call call{.collective = Collective::all_reduce,
                  .element = spec.element,
                  .reduction = spec.reduction,
                  .bytes = elements * element_bytes(spec.element),
                  .factor = spec.factor};
  return reduce_to(group, call, in, out, elements, spec, deadline);
}

Status reduce(Group& group, Rank root, const void* in, void* out, std::size_t elements,
              const ReduceSpec& spec, Deadline deadline) {
  check_rank(group, root);
  const Call call{.collective = Collective::reduce,
                  .root = root,
                  .element = spec.element,
                  .reduction = spec.reduction,
                  .bytes = elements * element_bytes(spec.element),
                  .factor = spec.factor};
  return reduce_to(group, call, in, group.rank() == root ? out : nullptr, elements, spec, deadline);
}

Status reduce_scatter(Group& group, std::span<const void* const> ins,
                      std::span<const std::size_t> elements, void* out, const ReduceSpec& spec,
                      Deadline deadline) {
  check_length(group, ins.size(), "inputs");
  check_length(group, elements.size(), "element counts");
  const std::size_t element = element_bytes(spec.element);
  std::size_t total = 0;
  std::size_t longest = 0;
  for (const std::size_t count : elements) {
    total += count * element;
    longest = std::max(longest, count * element);
  }
  const Call call{.collective = Collective::reduce_scatter,
                  .element = spec.element,
                  .reduction = spec.reduction,
                  .bytes = total,
                  .factor = spec.factor};
  Passage passage{group, call, deadline};
  SlotReducer reducer{group, passage, spec};

  // A slot holds one piece for each destination, one after the other.
  const std::size_t piece = piece_bytes(group);
  const std::uint64_t rounds = rounds_for(longest, piece);
  const std::size_t mine = index(group.rank());
  const auto fill = [&](std::uint64_t round) -> Status {
    if (Status status = passage.claim(round); !status.ok()) return status;
    for (std::size_t to = 0; to < ins.size(); ++to)
      copy_piece(passage.own(round) + to * piece, ins[to], elements[to] * element, round, piece);
    passage.publish(round);
    return {};
  };
  if (Status status = fill(0); !status.ok()) return status;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    if (round + 1 < rounds)
      if (Status status = fill(round + 1); !status.ok()) return status;
    if (Status status = passage.await_all(round); !status.ok()) return status;
    if (round == 0) reducer.read_factors();
    const std::size_t bytes = bytes_in_piece(elements[mine] * element, round, piece);
    if (bytes != 0)
      reducer.reduce(round, mine * piece, bytes / element,
                     static_cast<std::byte*>(out) + round * piece);
    passage.release(round);
  }
  passage.finish(rounds);
  return {};
}

}  // namespace psplus::collectives
