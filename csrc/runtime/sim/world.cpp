#include "runtime/sim/world.hpp"

#include "base/format.hpp"

#include <algorithm>
#include <utility>

namespace psplus::sim {
namespace {

using std::chrono::microseconds;

/// Beyond this a history is in a loop; the longest honest ones need a tenth of it.
constexpr std::uint64_t kMaxActions = 5'000'000;

}  // namespace

World::World(const Scenario& scenario)
    : scenario_(scenario),
      random_(scenario.seed ^ 0x5eed),
      checker_(scenario_),
      server_(std::make_unique<Server>(*this, random_.fork())),
      current_(scenario_.workers, nullptr),
      lives_(scenario_.workers, 0) {}

World::~World() {
  for (const auto& worker : workers_) worker->stop();
  for (const auto& reader : readers_) reader->stop();
}

Outcome World::run() {
  server_->start_fresh();
  for (std::uint32_t rank = 0; rank < scenario_.workers; ++rank)
    start_worker(rank, draw(scenario_.timing.start));
  for (std::uint32_t r = 0; r < scenario_.readers; ++r) {
    readers_.push_back(std::make_unique<Reader>(*this, random_.fork()));
    readers_.back()->begin();
  }
  schedule_faults();
  const TimePoint begin = scheduler_.now();
  while (!over_ && !checker_.violation()) {
    if (!scheduler_.run_next() || scheduler_.now() - begin > scenario_.timing.limit ||
        scheduler_.actions_run() > kMaxActions) {
      checker_.fail("hang", who_waits());
      break;
    }
  }
  outcome_.violation = checker_.violation();
  outcome_.pushes = checker_.pushes_applied();
  outcome_.duration = scheduler_.now() - begin;
  for (std::size_t s = 0; s < scenario_.streams.size(); ++s)
    outcome_.mean_staleness.push_back(
        checker_.mean_staleness(StreamId{static_cast<std::uint16_t>(s)}, 8));
  return outcome_;
}

void World::start_worker(std::uint32_t rank, nanoseconds delay) {
  const std::uint32_t life = lives_[rank]++;
  std::uint64_t dies_at = 0;
  if (rank < scenario_.worker_kills.size() && life < scenario_.worker_kills[rank].size())
    dies_at = scenario_.worker_kills[rank][life].point;
  const auto process = static_cast<std::uint32_t>(1000 + workers_.size());
  workers_.push_back(std::make_unique<Worker>(*this, random_.fork(), Rank{rank}, process, dies_at));
  current_[rank] = workers_.back().get();
  current_[rank]->begin(delay);
}

void World::schedule_faults() {
  for (const TimedKill& kill : scenario_.timed_kills)
    scheduler_.after(kill.at, [this, kill] {
      Worker& worker = *current_[kill.rank];
      if (!worker.running()) return;
      outcome_.killed_while.insert(worker.doing().substr(0, worker.doing().find(' ')));
      worker.kill();
    });
  for (const Freeze& freeze : scenario_.freezes)
    scheduler_.after(freeze.at, [this, freeze] {
      note("rank {} freezes", freeze.rank);
      current_[freeze.rank]->freeze_until(scheduler_.now() + freeze.duration);
    });
  for (const BrokenLink& broken : scenario_.broken_links)
    scheduler_.after(broken.at, [this, broken] {
      const LinkPtr link = current_[broken.rank]->link();
      if (link == nullptr) return;
      note("the link of rank {} breaks", broken.rank);
      scheduler_.after(draw(scenario_.timing.wake), [this, link] { server_->lose(link); });
      hang_up(link);
    });
}

LinkPtr World::connect(Worker& worker) {
  if (!server_->listens()) return nullptr;
  auto link = std::make_shared<Link>();
  link->id = server::ConnectionId{next_connection_++};
  link->server_life = server_->life();
  link->worker = &worker;
  server_->accept(link);
  return link;
}

void World::send_to_server(const LinkPtr& link, ToServerMail mail) {
  link->last_to_server =
      std::max(link->last_to_server, scheduler_.now() + draw(scenario_.timing.message));
  scheduler_.at(link->last_to_server,
                [this, link, mail = std::move(mail)] { server_->receive(link, mail); });
}

void World::send_to_worker(const LinkPtr& link, ToWorkerMail mail) {
  link->last_to_worker =
      std::max(link->last_to_worker, scheduler_.now() + draw(scenario_.timing.message));
  for (const store::SegmentHandle& segment : mail.segments)
    if (segment.header().kind == store::SegmentKind::kShard) shards_[segment.header().id] = segment;
  scheduler_.at(link->last_to_worker,
                [link, mail = std::move(mail)] { link->worker->deliver(link, mail); });
}

void World::hang_up(const LinkPtr& link) {
  link->last_to_worker =
      std::max(link->last_to_worker, scheduler_.now() + draw(scenario_.timing.wake));
  scheduler_.at(link->last_to_worker, [link] { link->worker->link_lost(link); });
}

void World::ring_doorbell(std::uint64_t server_life) {
  scheduler_.after(draw(scenario_.timing.wake),
                   [this, server_life] { server_->ring(server_life); });
}

void World::wake(MemberId member, StreamId /*stream*/) {
  for (Worker* const worker : current_)
    if (worker != nullptr && worker->attached() && worker->member() == member)
      scheduler_.after(draw(scenario_.timing.wake), [worker] { worker->wake(); });
}

bool World::may_kill_server() const {
  // While nobody has published anything, a new job can begin in place of a lost one.
  return checker_.nothing_published() ||
         std::any_of(current_.begin(), current_.end(),
                     [](const Worker* worker) { return worker != nullptr && worker->attached(); });
}

void World::server_has_died(std::map<server::ConnectionId, LinkPtr> links) {
  ++outcome_.server_deaths;
  note("the server dies");
  for (const auto& [id, link] : links) {
    link->open_at_server = false;
    link->last_to_worker =
        std::max(link->last_to_worker, scheduler_.now() + draw(scenario_.timing.death));
    scheduler_.at(link->last_to_worker, [link] { link->worker->link_lost(link); });
  }
  scheduler_.after(draw(scenario_.timing.restart) / 4, [this] { start_successor(); });
}

/// Any attached worker hands over what it holds, and nothing else.
void World::start_successor() {
  std::vector<Worker*> able;
  bool waits = false;
  for (Worker* const worker : current_) {
    if (worker == nullptr || !worker->may_hand_over()) continue;
    if (worker->frozen())
      waits = true;
    else
      able.push_back(worker);
  }
  if (!able.empty()) {
    const Worker& starter = *able[random_.below(able.size())];
    note("rank {} starts a successor", raw(starter.rank()));
    server_->start_over(starter.held_segments());
  } else if (waits) {
    scheduler_.after(milliseconds{1}, [this] { start_successor(); });
  } else if (checker_.nothing_published()) {
    shards_.clear();
    server_->start_fresh();
  } else {
    outcome_.lost = true;  // the last worker that could hand over has died too
    over_ = true;
  }
}

void World::server_is_up() {
  for (Worker* const worker : current_)
    if (worker != nullptr)
      scheduler_.after(draw(scenario_.timing.message), [worker] { worker->server_is_up(); });
}

void World::server_has_stopped(const std::map<server::ConnectionId, LinkPtr>& links) {
  const auto present = static_cast<std::size_t>(
      std::count_if(current_.begin(), current_.end(), [](const Worker* worker) {
        return worker != nullptr && worker->attached() && worker->may_still_publish();
      }));
  note("the server stops");
  checker_.stopped(present);
  // Workers that died before the job began leave no job behind; a new one begins with the others.
  const bool begun = !checker_.nothing_published();
  if (begun || checker_.violation()) return end_of_job();
  for (const auto& [id, link] : links) hang_up(link);
  scheduler_.after(microseconds{1}, [this] {
    shards_.clear();
    server_->start_fresh();
  });
}

void World::end_of_job() {
  over_ = true;
  outcome_.stores += server_->stores();
  checker_.observe();
  for (std::uint16_t s = 0; s < scenario_.streams.size(); ++s) {
    const StreamId stream{s};
    if (shard(stream, StreamExtent{0}).bytes.empty()) continue;
    checker_.finish(stream);
    for (std::uint16_t e = 0; e < scenario_.streams[s].extents.size(); ++e)
      if (const auto segment = shard(stream, StreamExtent{e}); !segment.bytes.empty())
        checker_.finish(stream, StreamExtent{e}, store::ShardView{segment.bytes});
  }
}

void World::worker_has_ended(Worker& worker, bool by_fault) {
  const std::uint32_t rank = raw(worker.rank());
  note("rank {} ends{} while {}", rank, by_fault ? " by a fault" : "", worker.doing());
  if (const LinkPtr link = worker.link())
    scheduler_.after(draw(scenario_.timing.death), [this, link] { server_->lose(link); });
  if (!by_fault) return;
  ++outcome_.worker_deaths;
  // Before a job has begun it waits for all its workers, so the dead are always replaced.
  const std::uint32_t life = lives_[rank] - 1;
  bool restarts = true;
  if (rank < scenario_.worker_kills.size() && life < scenario_.worker_kills[rank].size())
    restarts = scenario_.worker_kills[rank][life].restarts;
  if (!restarts && !checker_.nothing_published()) return;
  if (lives_[rank] > kMaxLives) return;
  scheduler_.after(draw(scenario_.timing.restart), [this, rank] {
    if (!over_) start_worker(rank, nanoseconds{0});
  });
}

store::SegmentHandle World::shard(StreamId stream, StreamExtent extent) const {
  const store::ControlBlock* const control = checker_.control();
  if (control == nullptr) return {};
  const store::StreamEntry& entry = control->streams[index(stream)];
  if (entry.open.load() == 0 || raw(extent) >= entry.extent_count.load()) return {};
  const std::uint16_t id = entry.extents[index(extent)].load();
  const auto found = shards_.find(SegmentId{control->extents[id].shard_segment.load()});
  return found == shards_.end() ? store::SegmentHandle{} : found->second;
}

void World::add_to_trace(std::string text) {
  const std::chrono::duration<double, std::milli> now = scheduler_.now() - TimePoint{};
  outcome_.trace.push_back(formatted("{:.4f} ms  {}", now.count(), text));
}

std::string World::who_waits() const {
  std::string text = server_->listens() ? "the server lives" : "there is no server";
  for (const Worker* const worker : current_)
    if (worker != nullptr && worker->running())
      text += formatted("; rank {} is {}", raw(worker->rank()), worker->doing());
  return text;
}

}  // namespace psplus::sim
