#include "store/store.hpp"

#include "base/format.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace psplus::store {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

Status missing(std::string_view what) {
  return {StatusCode::kInternal, formatted("cannot take over: {} is missing or damaged", what)};
}

}  // namespace

Status Store::create(std::uint64_t job) {
  auto made = source_.create("psplus-control", sizeof(ControlBlock));
  if (!made.ok()) return made.status();
  auto& header = *reinterpret_cast<SegmentHeader*>(made->bytes.data());
  header.magic = SegmentHeader::kMagic;
  header.job = job;
  header.size = made->bytes.size();
  header.id = SegmentId{1};
  header.kind = SegmentKind::kControl;
  control_ = reinterpret_cast<ControlBlock*>(made->bytes.data());
  segments_.emplace(header.id, *made);
  put(control_->next_segment, 2);
  put(control_->next_incarnation, 1);
  put(control_->ready, 1, std::memory_order_release);
  return {};
}

Status Store::adopt(std::vector<SegmentHandle> segments) {
  for (const SegmentHandle& segment : segments) {
    if (Status status = check_header(segment); !status.ok()) return status;
    if (segment.header().kind != SegmentKind::kControl) continue;
    if (segment.bytes.size() != sizeof(ControlBlock)) return missing("the control segment");
    control_ = reinterpret_cast<ControlBlock*>(segment.bytes.data());
  }
  if (control_ == nullptr || control_->ready.load(std::memory_order_acquire) != 1)
    return missing("the control segment");
  // Of two segments for one purpose the newer one counts: the other's server died over it. Shards
  // go before what is as large as they are.
  std::sort(segments.begin(), segments.end(), [](const SegmentHandle& a, const SegmentHandle& b) {
    return a.header().id < b.header().id;
  });
  std::stable_partition(segments.begin(), segments.end(), [](const SegmentHandle& segment) {
    return segment.header().kind == SegmentKind::kShard;
  });
  for (const SegmentHandle& segment : segments) {
    if (segment.header().job != control_->header.job)
      return {StatusCode::kInternal, "cannot take over: segments of two jobs were handed over"};
    if (Status status = index_segment(segment); !status.ok()) return status;
  }
  forget_unused_extents();
  return check_complete();
}

/// An extent is open before anybody holds its shard. When the server dies in between, nobody has
/// registered it: whoever asked for it asks again. Segments are offered in the order in which they
/// were made, so the extents that are missing are the last ones.
void Store::forget_unused_extents() {
  for (std::size_t e = kMaxExtents; e-- > 0;) {
    ExtentEntry& extent = control_->extents[e];
    if (extent.open.load(std::memory_order_acquire) == 0 || shards_.contains(e)) continue;
    const std::uint32_t of = extent.stream.load(kRelaxed);
    const std::uint32_t place = extent.place.load(kRelaxed);
    if (of >= kMaxStreams || place >= kMaxStreamExtents)
      continue;  // check_complete() names the shard
    StreamEntry& stream = control_->streams[of];
    const bool used = std::any_of(
        std::begin(stream.members), std::end(stream.members), [&](const StreamMember& member) {
          return static_cast<StreamMemberState>(member.state.load(kRelaxed)) !=
                     StreamMemberState::kAbsent &&
                 (member.extents.load(kRelaxed) >> place & 1) != 0;
        });
    if (used) continue;
    if (place == 0) put(stream.open, 0);
    put(stream.extent_count, place);
    put(extent.open, 0);
    put(control_->layout_version, static_cast<std::uint32_t>(e));
  }
}

Status Store::index_segment(const SegmentHandle& segment) {
  const SegmentHeader& header = segment.header();
  switch (header.kind) {
    case SegmentKind::kControl:
      segments_.emplace(header.id, segment);
      return {};
    case SegmentKind::kShard:
      return index_shard(segment);
    case SegmentKind::kMailbox:
    case SegmentKind::kSlots:
    case SegmentKind::kPull:
      return index_worker_segment(segment);
    case SegmentKind::kBlob:
      blobs_[header.owner] = header.id;
      segments_.emplace(header.id, segment);
      return {};
  }
  return missing("a segment of a known kind");
}

Status Store::index_shard(const SegmentHandle& segment) {
  const SegmentHeader& header = segment.header();
  if (header.owner >= kMaxExtents) return missing("a shard");
  const ExtentEntry& entry = control_->extents[header.owner];
  if (entry.open.load(std::memory_order_acquire) == 0 ||
      entry.shard_segment.load(kRelaxed) != raw(header.id))
    return {};  // its extent was never opened
  ShardView view{segment.bytes};
  if (Status status = view.check(); !status.ok()) return status;
  auto layout = ExtentLayout::parse(view.layout_bytes());
  if (!layout.ok()) return layout.status();
  if (!view.fits(*layout)) return missing(formatted("the layout of extent {}", header.owner));
  auto free = FreeUnits::derive(view);
  if (!free.ok()) return free.status();
  shards_.emplace(header.owner,
                  OwnedShard{view, std::move(free).value(), std::move(layout).value()});
  segments_.emplace(header.id, segment);
  return {};
}

/// After the shards: sizes are those of the layout.
Status Store::index_worker_segment(const SegmentHandle& segment) {
  const SegmentHeader& header = segment.header();
  if (header.owner >= kMaxMembers || header.extent >= kMaxExtents)
    return missing("a worker's segment");
  const MemberEntry& entry = control_->members[header.owner];
  const auto state = static_cast<MemberState>(entry.state.load(std::memory_order_acquire));
  if ((state != MemberState::kLive && state != MemberState::kDraining) ||
      entry.incarnation.load(kRelaxed) != raw(header.incarnation))
    return {};
  const MemberId member{static_cast<std::uint16_t>(header.owner)};
  const ExtentId extent{static_cast<std::uint16_t>(header.extent)};
  if (header.kind == SegmentKind::kMailbox) {
    if (segment.bytes.size() != sizeof(MailboxBlock)) return missing("a mailbox");
    mailboxes_[header.owner] = reinterpret_cast<MailboxBlock*>(segment.bytes.data());
  } else {
    if (!shards_.contains(header.extent)) return {};  // its extent was never opened
    const ExtentLayout& layout = shards_.at(header.extent).layout;
    const Rule rule = shards_.at(header.extent).view.rule();
    const bool slots = header.kind == SegmentKind::kSlots;
    const std::size_t expected = slots ? SlotsView::segment_bytes(layout, rule)
                                       : PullView::segment_bytes(layout.value_bytes());
    // Left over from an extent of the same number that was forgotten. Sizes are sealed, so a
    // segment that somebody relies on has the right one; check_complete() misses it else.
    if (segment.bytes.size() != expected) return {};
    if (slots)
      slots_.insert_or_assign(key(member, extent),
                              Owned<SlotsView>{{segment.bytes, layout, rule}, header.id});
    else
      pulls_.insert_or_assign(key(member, extent),
                              Owned<PullView>{{segment.bytes, layout.value_bytes()}, header.id});
  }
  segments_.emplace(header.id, segment);
  return {};
}

Status Store::check_complete() const {
  for (std::size_t e = 0; e < kMaxExtents; ++e)
    if (control_->extents[e].open.load(std::memory_order_acquire) == 1 && !shards_.contains(e))
      return missing(formatted("the shard of extent {}", e));
  for (std::size_t m = 0; m < kMaxMembers; ++m) {
    const MemberEntry& entry = control_->members[m];
    const auto state = static_cast<MemberState>(entry.state.load(std::memory_order_acquire));
    if (state != MemberState::kLive && state != MemberState::kDraining) continue;
    const MemberId member{static_cast<std::uint16_t>(m)};
    if (!has_mailbox(member)) return missing(formatted("the mailbox of member {}", m));
    for (const StreamEntry& stream : control_->streams) {
      if (stream.open.load(std::memory_order_acquire) == 0) continue;
      const PushMark dedup = PushMark::unpack(stream.members[m].dedup.load(kRelaxed));
      const auto stream_state =
          static_cast<StreamMemberState>(stream.members[m].state.load(std::memory_order_acquire));
      if (stream_state == StreamMemberState::kAbsent ||
          raw(dedup.incarnation) != entry.incarnation.load(kRelaxed))
        continue;
      const std::uint64_t registered = stream.members[m].extents.load(kRelaxed);
      for (std::uint32_t i = 0; i < stream.extent_count.load(kRelaxed); ++i)
        if ((registered >> i & 1) != 0 &&
            !slots(member, ExtentId{stream.extents[i].load(kRelaxed)}))
          return missing(formatted("a slots segment of member {}", m));
    }
  }
  return {};
}

Result<SegmentHandle> Store::make(SegmentKind kind, std::size_t size, std::uint32_t owner,
                                  ExtentId extent, Incarnation incarnation) {
  auto made = source_.create(formatted("psplus-{}", to_string(kind)), size);
  if (!made.ok()) return made.status();
  const std::uint32_t id = control_->next_segment.load(kRelaxed);
  put(control_->next_segment, id + 1);
  auto& header = *reinterpret_cast<SegmentHeader*>(made->bytes.data());
  header.magic = SegmentHeader::kMagic;
  header.job = control_->header.job;
  header.size = made->bytes.size();
  header.id = SegmentId{id};
  header.kind = kind;
  header.owner = owner;
  header.extent = raw(extent);
  header.incarnation = incarnation;
  segments_.emplace(header.id, *made);
  return made;
}

Result<SegmentId> Store::create_mailbox(MemberId member, Incarnation incarnation) {
  auto made =
      make(SegmentKind::kMailbox, sizeof(MailboxBlock), raw(member), ExtentId{}, incarnation);
  if (!made.ok()) return made.status();
  mailboxes_[index(member)] = reinterpret_cast<MailboxBlock*>(made->bytes.data());
  for (MailStream& stream : mailboxes_[index(member)]->streams)
    stream.published.store(PushMark{incarnation, Sequence{0}}.pack(), kRelaxed);
  return made->header().id;
}

Result<SegmentId> Store::create_shard(ExtentId extent, const ExtentLayout& layout, Rule rule) {
  auto made = make(SegmentKind::kShard, ShardView::segment_bytes(layout, rule), raw(extent), extent,
                   Incarnation{});
  if (!made.ok()) return made.status();
  ShardView::format(made->bytes, layout, rule);
  ShardView view{made->bytes};
  auto free = FreeUnits::derive(view);
  if (!free.ok()) return free.status();
  shards_.insert_or_assign(index(extent), OwnedShard{view, std::move(free).value(), layout});
  return made->header().id;
}

Result<SegmentId> Store::create_slots(MemberId member, Incarnation incarnation, ExtentId extent) {
  const ExtentLayout& layout = shard(extent).layout;
  const Rule rule = shard(extent).view.rule();
  auto made = make(SegmentKind::kSlots, SlotsView::segment_bytes(layout, rule), raw(member), extent,
                   incarnation);
  if (!made.ok()) return made.status();
  const SegmentId id = made->header().id;
  slots_.insert_or_assign(key(member, extent), Owned<SlotsView>{{made->bytes, layout, rule}, id});
  return id;
}

Result<SegmentId> Store::create_pull(MemberId member, Incarnation incarnation, ExtentId extent) {
  const std::uint64_t value_bytes = shard(extent).layout.value_bytes();
  auto made = make(SegmentKind::kPull, PullView::segment_bytes(value_bytes), raw(member), extent,
                   incarnation);
  if (!made.ok()) return made.status();
  const SegmentId id = made->header().id;
  pulls_.insert_or_assign(key(member, extent), Owned<PullView>{{made->bytes, value_bytes}, id});
  return id;
}

Result<SegmentId> Store::create_blob(ExtentId extent, std::span<const std::byte> bytes) {
  auto made =
      make(SegmentKind::kBlob, kPageBytes + bytes.size(), raw(extent), extent, Incarnation{});
  if (!made.ok()) return made.status();
  std::copy(bytes.begin(), bytes.end(), made->bytes.begin() + kPageBytes);
  blobs_[index(extent)] = made->header().id;
  return made->header().id;
}

std::vector<SegmentId> Store::drop_member(MemberId member) {
  std::vector<SegmentId> dropped;
  for (const auto& [id, segment] : segments_) {
    const SegmentHeader& header = segment.header();
    const bool of_a_member = header.kind == SegmentKind::kMailbox ||
                             header.kind == SegmentKind::kSlots ||
                             header.kind == SegmentKind::kPull;
    if (of_a_member && header.owner == raw(member)) dropped.push_back(id);
  }
  mailboxes_[index(member)] = nullptr;
  std::erase_if(slots_, [&](const auto& item) { return item.first >> 16 == raw(member); });
  std::erase_if(pulls_, [&](const auto& item) { return item.first >> 16 == raw(member); });
  for (const SegmentId id : dropped) segments_.erase(id);
  return dropped;
}

SlotsView Store::slots(MemberId member, ExtentId extent) const {
  const auto found = slots_.find(key(member, extent));
  return found == slots_.end() ? SlotsView{} : found->second.view;
}

PullView Store::pull(MemberId member, ExtentId extent) const {
  const auto found = pulls_.find(key(member, extent));
  return found == pulls_.end() ? PullView{} : found->second.view;
}

SegmentId Store::slots_id(MemberId member, ExtentId extent) const {
  const auto found = slots_.find(key(member, extent));
  return found == slots_.end() ? SegmentId{} : found->second.id;
}

SegmentId Store::pull_id(MemberId member, ExtentId extent) const {
  const auto found = pulls_.find(key(member, extent));
  return found == pulls_.end() ? SegmentId{} : found->second.id;
}

SegmentId Store::blob(ExtentId extent) const {
  const auto found = blobs_.find(index(extent));
  return found == blobs_.end() ? SegmentId{} : found->second;
}

}  // namespace psplus::store
