#include "support/server_harness.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include <gtest/gtest.h>

#include "server/gate.hpp"
#include "support/status_matchers.hpp"

namespace psplus::testing {
namespace {

constexpr std::uint64_t kJob = 0x1234'5678'9abc'def1;

template <class S>
void write_as(std::span<const double> values, std::byte* at) {
  for (const double value : values) {
    const S scalar = static_cast<S>(value);
    std::memcpy(at, &scalar, sizeof(S));
    at += sizeof(S);
  }
}

template <class S>
std::vector<double> read_as(const std::byte* at, std::size_t count) {
  std::vector<double> values(count);
  for (double& value : values) {
    S scalar;
    std::memcpy(&scalar, at, sizeof(S));
    value = static_cast<double>(scalar);
    at += sizeof(S);
  }
  return values;
}

}  // namespace

ServerHarness::ServerHarness(server::Config config, Pushes pushes)
    : config_(config),
      pushes_(std::move(pushes)),
      store_(std::make_unique<store::Store>(source, &kill)) {
  EXPECT_OK(store_->create(kJob));
  core_ = std::make_unique<server::Core>(*store_, config_, pushes_(*store_));
}

TestWorker& ServerHarness::connect() {
  TestWorker& worker = workers.emplace_back();
  worker.connection = server::ConnectionId{++connections_};
  return worker;
}

TestWorker& ServerHarness::attach(std::uint32_t rank, std::uint32_t world_size) {
  TestWorker& worker = connect();
  worker.rank = rank;
  send(worker, wire::Attach{.protocol = wire::kProtocolVersion,
                            .rank = Rank{rank},
                            .world_size = world_size,
                            .process = 1000 + rank});
  return worker;
}

void ServerHarness::send(TestWorker& from, wire::ToServer message,
                         std::span<const std::byte> layout, std::span<const std::byte> blob) {
  handle(server::Received{.from = from.connection,
                          .message = std::move(message),
                          .layout = {layout.begin(), layout.end()},
                          .blob = {blob.begin(), blob.end()}});
}

void ServerHarness::open(TestWorker& from, StreamId id, const store::ExtentLayout& layout,
                         wire::OpenStream how, std::span<const std::byte> blob) {
  how.stream = id;
  const auto bytes = layout.serialize();
  how.layout_bytes = bytes.size();
  how.blob_bytes = blob.size();
  how.has_blob = !blob.empty();
  send(from, how, bytes, blob);
  if (from.connected && store_->has_mailbox(from.member))
    from.queues.insert_or_assign(id, worker::PushQueue{mail(from, id), from.incarnation});
}

void ServerHarness::lose(TestWorker& worker) {
  worker.connected = false;
  handle(server::Lost{worker.connection});
}

void ServerHarness::tick(nanoseconds later) {
  now += later;
  handle(server::Tick{});
}

void ServerHarness::run(std::size_t budget) {
  doorbell();
  do deliver();
  while (core_->step(budget, now));
  deliver();
}

void ServerHarness::handle(const server::Event& event) {
  core_->handle(event, now);
  deliver();
}

void ServerHarness::deliver() {
  for (auto effects = core_->take_effects(); !effects.empty(); effects = core_->take_effects()) {
    for (server::Effect& effect : effects) {
      if (auto* const sent = std::get_if<server::Send>(&effect)) {
        const auto to = std::find_if(workers.begin(), workers.end(),
                                     [&](const TestWorker& w) { return w.connection == sent->to; });
        if (to == workers.end() || !to->connected) continue;
        to->inbox.push_back(sent->message);
        if (const auto* const welcome = std::get_if<wire::Welcome>(&sent->message)) {
          to->member = welcome->member;
          to->incarnation = welcome->incarnation;
        }
        if (const auto* const drop = std::get_if<wire::Drop>(&sent->message))
          to->held.erase(drop->segment);
        for (const SegmentId id : sent->segments)
          if (const auto found = store_->segments().find(id); found != store_->segments().end())
            to->held.emplace(id, found->second);
        if (const auto* const offer = std::get_if<wire::Offer>(&sent->message);
            offer != nullptr && to->answers_offers)
          core_->handle(server::Received{.from = to->connection,
                                         .message = wire::Holding{offer->segment},
                                         .layout = {},
                                         .blob = {}},
                        now);
      } else if (const auto* const wake = std::get_if<server::Wake>(&effect)) {
        wakes.push_back(*wake);
      } else if (const auto* const drop = std::get_if<server::Disconnect>(&effect)) {
        for (TestWorker& worker : workers)
          if (worker.connection == drop->connection) worker.connected = false;
      } else if (const auto* const line = std::get_if<server::Log>(&effect)) {
        log.push_back(line->text);
      } else {
        stopped = true;
      }
    }
  }
}

Status ServerHarness::take_over(std::uint64_t kill_at) {
  kill.arm(kill_at);
  core_.reset();
  std::map<SegmentId, store::SegmentHandle> held;
  for (const TestWorker& worker : workers)
    if (worker.connected) held.insert(worker.held.begin(), worker.held.end());
  std::vector<store::SegmentHandle> handed_over;
  for (const auto& [id, segment] : held) handed_over.push_back(segment);
  auto successor = std::make_unique<store::Store>(source, &kill);
  if (Status status = successor->adopt(std::move(handed_over)); !status.ok()) return status;
  store_ = std::move(successor);
  core_ = std::make_unique<server::Core>(*store_, config_, pushes_(*store_));
  core_->recover(now);
  kill.disarm();
  deliver();
  return {};
}

void ServerHarness::reconnect(TestWorker& worker) {
  worker.connection = server::ConnectionId{++connections_};
}

void ServerHarness::resume(TestWorker& worker) {
  reconnect(worker);
  send(worker, wire::Resume{.protocol = wire::kProtocolVersion,
                            .job = kJob,
                            .member = worker.member,
                            .incarnation = worker.incarnation});
}

Status ServerHarness::push(TestWorker& worker, StreamId stream, std::span<const double> values,
                           worker::PushInfo info) {
  if (!values.empty()) {
    const ExtentId extent{control().streams[index(stream)].extents[0].load()};
    write(store_->shard(extent).layout, 0, values, slot(worker, stream));
  }
  return worker.queues.at(stream).publish(info);
}

std::span<std::byte> ServerHarness::slot(TestWorker& worker, StreamId stream, std::uint32_t e) {
  const ExtentId extent{control().streams[index(stream)].extents[e].load()};
  return store_->slots(worker.member, extent).values(worker.queues.at(stream).next());
}

std::span<std::uint64_t> ServerHarness::bitmap(TestWorker& worker, StreamId stream,
                                               std::uint32_t e) {
  const ExtentId extent{control().streams[index(stream)].extents[e].load()};
  return store_->slots(worker.member, extent).bitmap(worker.queues.at(stream).next());
}

std::span<store::StepOptions> ServerHarness::options(TestWorker& worker, StreamId stream,
                                                     std::uint32_t e) {
  const ExtentId extent{control().streams[index(stream)].extents[e].load()};
  return store_->slots(worker.member, extent).options(worker.queues.at(stream).next());
}

void ServerHarness::write(const store::ExtentLayout& layout, std::size_t param,
                          std::span<const double> values, std::span<std::byte> extent) {
  const store::ParamPlace& place = layout.places()[param];
  ASSERT_EQ(values.size(), place.scalar_count);
  if (place.storage == Storage::float32)
    write_as<float>(values, extent.data() + place.byte_offset);
  else
    write_as<double>(values, extent.data() + place.byte_offset);
}

std::vector<std::byte> ServerHarness::unit(ExtentId extent, ChunkIndex chunk) {
  const store::ShardView& view = store_->shard(extent).view;
  std::vector<std::byte> bytes(view.header().unit_bytes);
  EXPECT_OK(view.read_chunk(chunk, bytes));
  return bytes;
}

std::vector<double> ServerHarness::area(ExtentId extent, std::size_t param, std::size_t number) {
  const store::ExtentLayout& layout = store_->shard(extent).layout;
  const auto chunk_bytes = static_cast<std::ptrdiff_t>(layout.chunk_bytes());
  std::vector<std::byte> bytes;
  for (std::uint32_t c = 0; c < layout.chunk_count(); ++c) {
    const auto whole = unit(extent, ChunkIndex{c});
    const auto first = whole.begin() + static_cast<std::ptrdiff_t>(number) * chunk_bytes;
    bytes.insert(bytes.end(), first, first + chunk_bytes);
  }
  return values_in(layout, param, bytes);
}

std::vector<std::uint64_t> ServerHarness::step_counts(ExtentId extent, std::size_t param) {
  const store::OwnedShard& shard = store_->shard(extent);
  std::vector<std::uint64_t> counts;
  for (std::uint32_t c = 0; c < shard.layout.chunk_count(); ++c) {
    const auto [first, last] = shard.layout.params_of_chunk(ChunkIndex{c});
    const auto whole = unit(extent, ChunkIndex{c});
    for (std::uint32_t i = first; i < last; ++i)
      if (shard.layout.order()[i] == param)
        std::memcpy(&counts.emplace_back(),
                    whole.data() + shard.view.counts_offset() + (i - first) * sizeof(counts[0]),
                    sizeof(counts[0]));
  }
  return counts;
}

std::vector<double> ServerHarness::values_in(const store::ExtentLayout& layout, std::size_t param,
                                             std::span<const std::byte> extent) {
  const store::ParamPlace& place = layout.places()[param];
  const std::byte* const at = extent.data() + place.byte_offset;
  return place.storage == Storage::float32 ? read_as<float>(at, place.scalar_count)
                                           : read_as<double>(at, place.scalar_count);
}

store::MemberState ServerHarness::state(const TestWorker& worker) const {
  return server::member_state(control(), worker.member);
}

}  // namespace psplus::testing
