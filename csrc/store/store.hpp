#pragma once

#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/ids.hpp"
#include "base/status.hpp"
#include "store/control.hpp"
#include "store/layout.hpp"
#include "store/mailbox.hpp"
#include "store/segment_header.hpp"
#include "store/shard.hpp"

namespace psplus::store {

/// Runs before each store that a server makes into shared state. The simulator ends the server
/// here, so that a successor meets every state that a killed process can leave behind.
class WriteHook {
 public:
  virtual ~WriteHook() = default;
  virtual void before_write() = 0;
};

/// A shard as its server sees it.
struct OwnedShard {
  ShardView view;
  FreeUnits free;
  ExtentLayout layout;
};

/// Every segment of one server: all of its state that outlives it. Not thread-safe.
class Store {
 public:
  /// `source` and `hook` (may be null) must outlive the store.
  explicit Store(SegmentSource& source, WriteHook* hook = nullptr) noexcept
      : source_(source), hook_(hook) {}

  /// Begins a job: makes its control segment. `job` is a random number, not 0.
  Status create(std::uint64_t job);
  /// Takes over a predecessor's segments, in any order. Leaves out what belonged to a worker that
  /// had not joined completely. kInternal when a segment is missing or damaged.
  Status adopt(std::vector<SegmentHandle> segments);

  Result<SegmentId> create_mailbox(MemberId member, Incarnation incarnation);
  Result<SegmentId> create_shard(ExtentId extent, const ExtentLayout& layout, Rule rule = {});
  Result<SegmentId> create_slots(MemberId member, Incarnation incarnation, ExtentId extent);
  Result<SegmentId> create_pull(MemberId member, Incarnation incarnation, ExtentId extent);
  Result<SegmentId> create_blob(ExtentId extent, std::span<const std::byte> bytes);
  /// Forgets the segments of one worker; returns their ids.
  std::vector<SegmentId> drop_member(MemberId member);

  [[nodiscard]] ControlBlock& control() const noexcept { return *control_; }
  [[nodiscard]] bool has_mailbox(MemberId member) const noexcept {
    return mailboxes_[index(member)] != nullptr;
  }
  [[nodiscard]] MailStream& mail(MemberId member, StreamId stream) const noexcept {
    return mailboxes_[index(member)]->streams[index(stream)];
  }
  [[nodiscard]] MailboxBlock& mailbox(MemberId member) const noexcept {
    return *mailboxes_[index(member)];
  }
  [[nodiscard]] OwnedShard& shard(ExtentId extent) { return shards_.at(index(extent)); }
  /// Push slots and pull buffers; empty views when there are none.
  [[nodiscard]] SlotsView slots(MemberId member, ExtentId extent) const;
  [[nodiscard]] PullView pull(MemberId member, ExtentId extent) const;
  [[nodiscard]] SegmentId slots_id(MemberId member, ExtentId extent) const;
  [[nodiscard]] SegmentId pull_id(MemberId member, ExtentId extent) const;
  /// Blob of an extent, 0 for none.
  [[nodiscard]] SegmentId blob(ExtentId extent) const;

  /// All segments by ascending id: the order in which they are offered.
  [[nodiscard]] const std::map<SegmentId, SegmentHandle>& segments() const noexcept {
    return segments_;
  }

  /// The only way in which a server stores into a word that others read.
  template <class T>
  void put(std::atomic<T>& word, std::type_identity_t<T> value,
           std::memory_order order = std::memory_order_relaxed) {
    before_write();
    word.store(value, order);
  }
  void before_write() {
    if (hook_ != nullptr) hook_->before_write();
  }

 private:
  Result<SegmentHandle> make(SegmentKind kind, std::size_t size, std::uint32_t owner,
                             ExtentId extent, Incarnation incarnation);
  Status index_segment(const SegmentHandle& segment);
  Status index_shard(const SegmentHandle& segment);
  Status index_worker_segment(const SegmentHandle& segment);
  void forget_unused_extents();
  Status check_complete() const;
  [[nodiscard]] static std::uint32_t key(MemberId member, ExtentId extent) noexcept {
    return static_cast<std::uint32_t>(raw(member)) << 16 | raw(extent);
  }

  SegmentSource& source_;
  WriteHook* hook_;
  ControlBlock* control_ = nullptr;
  std::map<SegmentId, SegmentHandle> segments_;
  MailboxBlock* mailboxes_[kMaxMembers] = {};
  std::unordered_map<std::size_t, OwnedShard> shards_;
  template <class View>
  struct Owned {
    View view;
    SegmentId id;
  };
  std::unordered_map<std::uint32_t, Owned<SlotsView>> slots_;
  std::unordered_map<std::uint32_t, Owned<PullView>> pulls_;
  std::unordered_map<std::size_t, SegmentId> blobs_;
};

}  // namespace psplus::store
