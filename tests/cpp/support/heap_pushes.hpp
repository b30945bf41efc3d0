#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "server/push_source.hpp"

namespace psplus::testing {

/// Pushes as a network would bring them: each in buffers of its own, which outlive a server and are
/// freed when the push is released. What a worker wrote into its slot is moved out when it is first
/// borrowed, and the slot filled with NaN, so that whoever reads slots behind the source is seen.
class HeapPushes {
 public:
  /// A source for one life of a server over these buffers.
  [[nodiscard]] std::unique_ptr<server::PushSource> source(store::Store& store) {
    return std::make_unique<Source>(*this, store);
  }
  [[nodiscard]] std::size_t held() const noexcept { return pushes_.size(); }
  [[nodiscard]] std::size_t released() const noexcept { return released_; }

 private:
  struct Buffers {
    std::vector<std::byte> values;
    std::vector<std::uint64_t> bitmap;
    std::vector<store::StepOptions> options;
  };
  using Key = std::tuple<StreamId, MemberId, Sequence>;

  class Source final : public server::PushSource {
   public:
    Source(HeapPushes& pushes, store::Store& store) : pushes_(pushes), store_(store) {}

    server::LentPush borrow(StreamId stream, MemberId member, Sequence sequence,
                            ExtentId extent) override {
      const auto last = pushes_.last_released_.find({stream, member});
      if (last != pushes_.last_released_.end() && raw(sequence) <= raw(last->second))
        ADD_FAILURE() << "push " << raw(sequence) << " was borrowed after its release";
      auto [found, first] = pushes_.pushes_[{stream, member, sequence}].try_emplace(extent);
      Buffers& buffers = found->second;
      if (first) {
        const store::SlotsView slots = store_.slots(member, extent);
        buffers.values = moved_out(slots.values(sequence));
        buffers.bitmap = moved_out(slots.bitmap(sequence));
        buffers.options = moved_out(slots.options(sequence));
      }
      return {.values = buffers.values, .bitmap = buffers.bitmap, .options = buffers.options};
    }

    void release(StreamId stream, MemberId member, Sequence sequence) override {
      Sequence& last = pushes_.last_released_[{stream, member}];
      EXPECT_LE(raw(last), raw(sequence));
      last = sequence;
      EXPECT_FALSE(store::RecordState::unpack(store_.control().record.state.load()).open)
          << "released in the middle of a batch";
      const auto past = pushes_.pushes_.upper_bound({stream, member, sequence});
      for (auto p = pushes_.pushes_.lower_bound({stream, member, Sequence{}}); p != past;) {
        p = pushes_.pushes_.erase(p);
        ++pushes_.released_;
      }
      server::SlotSource(store_).release(stream, member, sequence);
    }

   private:
    template <class T>
    static std::vector<T> moved_out(std::span<T> from) {
      std::vector<T> to(from.begin(), from.end());
      const auto bytes = std::as_writable_bytes(from);
      std::fill(bytes.begin(), bytes.end(), std::byte{0xff});
      return to;
    }
    HeapPushes& pushes_;
    store::Store& store_;
  };

  std::map<Key, std::map<ExtentId, Buffers>> pushes_;
  std::map<std::pair<StreamId, MemberId>, Sequence> last_released_;
  std::size_t released_ = 0;
};

}  // namespace psplus::testing
