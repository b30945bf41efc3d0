#include "runtime/sim/server.hpp"

#include <utility>
#include <variant>

#include "base/format.hpp"
#include "base/overloaded.hpp"
#include "runtime/sim/world.hpp"

namespace psplus::sim {

Server::Server(World& world, Random random) : world_(world), random_(random) {
  if (const auto refused = world.scenario().refused_segment) source_.refuse(*refused + 1);
}

void Server::begin_life() {
  ++life_;
  stores_ = 0;
  batches_opened_ = 0;
  last_batch_ = 0;
  last_store_.reset();
  links_.clear();
  inbox_.clear();
  listens_ = false;
  turn_scheduled_ = false;
  stopped_ = false;
  const auto& kills = world_.scenario().server_kills;
  if (life_ <= kills.size() && kills[life_ - 1].batch == 0) last_store_ = kills[life_ - 1].store;
}

void Server::start_fresh() {
  begin_life();
  store_ = std::make_unique<store::Store>(source_, this);
  try {
    Status created = store_->create(world_.next_job_number());
    // Memory is refused once: the worker that started this server starts another.
    if (!created.ok()) created = store_->create(world_.next_job_number());
    if (!created.ok()) return world_.checker().fail("protocol", created.message());
    world_.checker().begin(store_->segments().begin()->second);
    core_ = std::make_unique<server::Core>(*store_, world_.scenario().config);
    listens_ = true;
    world_.server_is_up();
    tick();
  } catch (const Killed&) {
    die();
  }
}

void Server::start_over(std::vector<store::SegmentHandle> segments) {
  begin_life();
  store_ = std::make_unique<store::Store>(source_, this);
  try {
    const Status adopted = store_->adopt(std::move(segments));
    if (!adopted.ok()) return world_.checker().fail("protocol", adopted.message());
    // A worker that was cut off unawares may hand over a job that ended before anybody published.
    if (&store_->control() != world_.checker().control())
      world_.checker().begin(store_->segments().begin()->second);
    core_ = std::make_unique<server::Core>(*store_, world_.scenario().config);
    core_->recover(world_.scheduler().now());
    carry_out_effects();
    listens_ = true;
    world_.server_is_up();
    tick();
    schedule_turn(nanoseconds{0});
  } catch (const Killed&) {
    die();
  }
}

/// Each store takes some time, during which the other processes run.
void Server::before_write() {
  world_.checker().observe();
  ++stores_;
  const auto& kills = world_.scenario().server_kills;
  const auto state =
      store::RecordState::unpack(store_->control().record.state.load(std::memory_order_relaxed));
  if (state.open && raw(state.batch) != last_batch_) {
    last_batch_ = raw(state.batch);
    ++batches_opened_;
    if (life_ <= kills.size() && kills[life_ - 1].batch == batches_opened_)
      last_store_ = stores_ + kills[life_ - 1].store - 1;
  }
  world_.scheduler().advance_to(world_.scheduler().now() +
                                random_.duration(nanoseconds{0}, world_.scenario().timing.store));
  if (last_store_ && stores_ >= *last_store_ && world_.may_kill_server()) throw Killed{};
}

void Server::die() {
  listens_ = false;
  core_.reset();
  store_.reset();
  inbox_.clear();
  world_.server_has_died(std::exchange(links_, {}));
}

void Server::receive(const LinkPtr& link, ToServerMail mail) {
  if (!listens() || link->server_life != life_ || !link->open_at_server) return;
  auto message = wire::decode_to_server(mail.bytes);
  if (!message.ok()) return world_.checker().fail("protocol", message.status().message());
  inbox_.push_back(server::Received{.from = link->id,
                                    .message = std::move(*message),
                                    .layout = std::move(mail.layout),
                                    .blob = std::move(mail.blob)});
  schedule_turn(nanoseconds{0});
}

void Server::lose(const LinkPtr& link) {
  if (!listens() || link->server_life != life_ || !link->open_at_server) return;
  link->open_at_server = false;
  inbox_.push_back(server::Lost{link->id});
  schedule_turn(nanoseconds{0});
}

void Server::ring(std::uint64_t life) {
  if (!listens() || life != life_) return;
  inbox_.push_back(server::Doorbell{});
  schedule_turn(nanoseconds{0});
}

void Server::tick() {
  if (!listens()) return;
  inbox_.push_back(server::Tick{});
  schedule_turn(nanoseconds{0});
  world_.scheduler().after(world_.scenario().timing.tick, [this, life = life_] {
    if (life == life_) tick();
  });
}

void Server::schedule_turn(nanoseconds delay) {
  if (turn_scheduled_) return;
  turn_scheduled_ = true;
  world_.scheduler().after(delay, [this, life = life_] {
    if (life != life_ || !listens()) return;
    turn();
  });
}

/// One look at the inbox and one piece of work, as the loop of a real runtime does it.
void Server::turn() {
  try {
    store::HalfWord& sleeps = store_->control().server_sleeps;
    sleeps.store(0, std::memory_order_relaxed);
    if (!inbox_.empty()) {
      const server::Event event = std::move(inbox_.front());
      inbox_.pop_front();
      handle(event);
    }
    bool busy = !stopped_ && work();
    if (!busy && inbox_.empty() && !stopped_) {
      // Announces its sleep, then looks once more: a publisher sees the one or is seen by the
      // other.
      sleeps.store(1, std::memory_order_seq_cst);
      busy = work();
      if (busy) sleeps.store(0, std::memory_order_relaxed);
    }
    turn_scheduled_ = false;
    if (!stopped_ && (busy || !inbox_.empty())) schedule_turn(nanoseconds{0});
    world_.checker().observe();
  } catch (const Killed&) {
    die();
  }
}

bool Server::work() {
  handle(server::Doorbell{});
  if (stopped_) return false;
  const bool busy = core_->step(world_.scenario().budget_bytes, world_.scheduler().now());
  carry_out_effects();
  return busy;
}

void Server::handle(const server::Event& event) {
  if (const auto* const received = std::get_if<server::Received>(&event))
    world_.note("the server handles message {} from {}", received->message.index(),
                raw(received->from));
  if (const auto* const lost = std::get_if<server::Lost>(&event))
    world_.note("the server loses {}", raw(lost->connection));
  core_->handle(event, world_.scheduler().now());
  carry_out_effects();
}

/// A server can also be killed between two effects.
void Server::carry_out_effects() {
  for (const server::Effect& effect : core_->take_effects()) {
    before_write();
    std::visit(Overloaded{
                   [&](const server::Send& send) { carry_out(send); },
                   [&](const server::Wake& wake) { world_.wake(wake.member, wake.stream); },
                   [&](const server::Disconnect& disconnect) {
                     const auto found = links_.find(disconnect.connection);
                     if (found == links_.end()) return;
                     found->second->open_at_server = false;
                     world_.hang_up(found->second);
                     links_.erase(found);
                   },
                   [&](const server::Log& log) { world_.note("the server says: {}", log.text); },
                   [&](const server::Stop&) {
                     stopped_ = true;
                     world_.server_has_stopped(std::exchange(links_, {}));
                   },
               },
               effect);
  }
}

void Server::carry_out(const server::Send& send) {
  const auto found = links_.find(send.to);
  if (found == links_.end()) return;
  ToWorkerMail mail{.bytes = wire::encode(send.message), .segments = {}};
  for (const SegmentId id : send.segments) {
    const auto segment = store_->segments().find(id);
    if (segment == store_->segments().end()) return;  // dropped since: nobody needs it
    mail.segments.push_back(segment->second);
  }
  world_.send_to_worker(found->second, std::move(mail));
}

}  // namespace psplus::sim
