#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/format.hpp"
#include "runtime/sim/checker.hpp"
#include "runtime/sim/link.hpp"
#include "runtime/sim/random.hpp"
#include "runtime/sim/reader.hpp"
#include "runtime/sim/scenario.hpp"
#include "runtime/sim/scheduler.hpp"
#include "runtime/sim/server.hpp"
#include "runtime/sim/worker.hpp"

namespace psplus::sim {

/// What became of a history.
struct Outcome {
  std::optional<Violation> violation;
  bool lost = false;  ///< the server and all who held its segments died: nothing was promised
  std::uint64_t pushes = 0;
  std::uint64_t server_deaths = 0;
  std::uint64_t worker_deaths = 0;
  std::set<std::string> killed_while;  ///< by timed kills: first words of what they were doing
  std::uint64_t reads = 0;
  std::uint64_t stores = 0;
  nanoseconds duration{};              ///< virtual
  std::vector<std::string> trace;      ///< what happened, if the scenario asks for it
  std::vector<double> mean_staleness;  ///< by stream; the first steps of each life left out
};

/// One job on one simulated host: a server, its workers and some readers, in virtual time.
/// Single-threaded and deterministic: equal scenarios have equal outcomes.
class World {
 public:
  explicit World(const Scenario& scenario);
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  ~World();

  /// Runs the history to its end: all workers gone, a violation, or the limit of time.
  [[nodiscard]] Outcome run();

  [[nodiscard]] const Scenario& scenario() const noexcept { return scenario_; }
  [[nodiscard]] Scheduler& scheduler() noexcept { return scheduler_; }
  [[nodiscard]] Checker& checker() noexcept { return checker_; }
  [[nodiscard]] Server& server() noexcept { return *server_; }
  [[nodiscard]] std::uint64_t next_job_number() noexcept { return random_.next() | 1; }
  [[nodiscard]] const store::ExtentLayout& layout(StreamId stream, StreamExtent extent) {
    return checker_.shard(stream, extent).layout();
  }

  // The network.
  /// A new link to the server, or null when nobody listens.
  [[nodiscard]] LinkPtr connect(Worker& worker);
  void send_to_server(const LinkPtr& link, ToServerMail mail);
  void send_to_worker(const LinkPtr& link, ToWorkerMail mail);
  /// The server closes a link: its worker notices after what was sent before.
  void hang_up(const LinkPtr& link);
  void ring_doorbell(std::uint64_t server_life);
  void wake(MemberId member, StreamId stream);

  // What happens to the server.
  [[nodiscard]] bool may_kill_server() const;
  void server_is_up();
  void server_has_died(std::map<server::ConnectionId, LinkPtr> links);
  void server_has_stopped(const std::map<server::ConnectionId, LinkPtr>& links);
  // What happens to workers.
  void worker_has_ended(Worker& worker, bool by_fault);

  /// The segment of an extent's shard; empty before there is one.
  [[nodiscard]] store::SegmentHandle shard(StreamId stream, StreamExtent extent) const;
  void count_read() noexcept { ++outcome_.reads; }
  /// Adds a line to the trace, if there is one.
  template <class... Args>
  void note(fmt::format_string<Args...> format, Args&&... args) {
    if (scenario_.trace) add_to_trace(formatted(format, std::forward<Args>(args)...));
  }

 private:
  /// Whatever a scenario does to a rank, it is given up after so many lives.
  static constexpr std::uint32_t kMaxLives = 12;

  void add_to_trace(std::string text);
  void start_worker(std::uint32_t rank, nanoseconds delay);
  void schedule_faults();
  void start_successor();
  void end_of_job();
  [[nodiscard]] std::string who_waits() const;
  [[nodiscard]] nanoseconds draw(Range range) { return random_.duration(range.least, range.most); }

  const Scenario scenario_;
  Random random_;
  Scheduler scheduler_;
  Checker checker_;
  std::unique_ptr<Server> server_;
  std::vector<std::unique_ptr<Worker>> workers_;  ///< all lives; the last of each rank may be alive
  std::vector<Worker*> current_;                  ///< by rank
  std::vector<std::uint32_t> lives_;              ///< by rank
  std::vector<std::unique_ptr<Reader>> readers_;
  std::uint64_t next_connection_ = 1;
  std::map<SegmentId, store::SegmentHandle> shards_;  ///< all that were ever offered in this job
  bool over_ = false;
  Outcome outcome_;
};

}  // namespace psplus::sim
