#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "c10d/links.hpp"
#include "c10d/torch_compat.hpp"
#include "collectives/collectives.hpp"

namespace psplus::pg {

/// The collectives of ranks on several hosts. Those of a host share memory, and nothing travels
/// between hosts twice: as few bytes as if each host had one rank.
///
/// What has to come to a host once is received by one rank, its speaker, which is the root of a
/// call on the root's host and else the host's first rank. What is meant for one rank goes there
/// directly. Arguments are those of the functions in collectives.hpp, ranks those of the whole
/// group, and reduced results have the same bits on all of them.
///
/// When a call fails the group is given up on all hosts, and later calls fail with the same reason:
/// whoever saw it (a rank of the lost one's host) tells the others through the store.
///
/// Thread safety: as collectives::Group.
class Hosts {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  /// Makes a Gloo group of all ranks.
  using MakeGloo = std::function<BackendPtr(const c10::intrusive_ptr<c10d::Store>&)>;

  /// Called by all ranks. @return null, on all alike, when no host has two ranks or the ranks of
  /// one cannot share memory. Errors: as join_host.
  static Result<std::unique_ptr<Hosts>> meet(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                             int size, const std::string& host_id,
                                             const MakeGloo& make_gloo, Deadline deadline);

  /// 16-bit floats are rounded once a host and once at the end. Averages of integers are exact.
  Status all_reduce(const at::Tensor& tensor, const collectives::ReduceSpec& spec,
                    Deadline deadline);
  Status reduce(Rank root, const at::Tensor& tensor, const collectives::ReduceSpec& spec,
                Deadline deadline);
  Status reduce_scatter(const std::vector<at::Tensor>& ins, const at::Tensor& out,
                        const collectives::ReduceSpec& spec, Deadline deadline);

  Status broadcast(Rank root, void* data, std::size_t bytes, Deadline deadline);
  Status all_gather(const void* in, std::span<void* const> outs, std::span<const std::size_t> bytes,
                    Deadline deadline);
  Status gather(Rank root, const void* in, std::span<void* const> outs, std::size_t bytes,
                Deadline deadline);
  Status scatter(Rank root, std::span<const void* const> ins, void* out, std::size_t bytes,
                 Deadline deadline);
  Status all_to_all(std::span<const void* const> ins, std::span<const std::size_t> in_bytes,
                    std::span<void* const> outs, std::span<const std::size_t> out_bytes,
                    Deadline deadline);
  Status barrier(Deadline deadline);

  /// Ends a call under way, from any thread.
  void abort() noexcept;
  /// Closes what this rank has; after the last call.
  void leave() noexcept;
  /// In a forked child.
  void forget() noexcept;

 private:
  /// Where the ranks are, and what that makes of this one.
  struct Places {
    std::vector<std::vector<Rank>> hosts;  ///< ranks by host, both in the order of ranks
    std::vector<std::size_t> host_of;      ///< by rank
    std::vector<Rank> place_of;            ///< by rank: its number among those of its host
    Rank rank;
    std::size_t own;  ///< this rank's host
  };

  Hosts(Places places, c10::intrusive_ptr<c10d::Store> store,
        std::unique_ptr<collectives::Group> local, BackendPtr gloo)
      : places_(std::move(places)),
        store_(std::move(store)),
        local_(std::move(local)),
        links_(std::move(gloo), names(places_)) {}

  static Places sort(const std::vector<std::string>& ids, Rank rank);
  static std::vector<std::string> names(const Places& places);

  [[nodiscard]] const std::vector<Rank>& here() const { return places_.hosts[places_.own]; }
  [[nodiscard]] bool is_here(Rank rank) const {
    return places_.host_of[index(rank)] == places_.own;
  }
  [[nodiscard]] Rank place(Rank rank) const { return places_.place_of[index(rank)]; }
  /// The speakers of all hosts.
  [[nodiscard]] std::vector<Rank> speakers(std::optional<Rank> root = {}) const;
  /// Of one value a rank, those of this host's ranks.
  template <class T>
  [[nodiscard]] std::vector<T> of_host(std::span<T const> all) const;

  Status together(const std::function<Status()>& call);
  std::string reason_for(const Status& found);
  Status exchange(std::span<const Links::Outgoing> sends, std::span<const Links::Incoming> receives,
                  Deadline deadline, const std::function<Status()>& meanwhile = {});

  /// Within this host, what its speaker has from others.
  Status spread(Rank speaker, void* data, std::size_t bytes, Deadline deadline);

  Status pass_on(const std::vector<Rank>& speakers, std::size_t from, void* data, std::size_t bytes,
                 Deadline deadline, const std::function<Status()>& meanwhile);
  Status reduce_among(const std::vector<Rank>& speakers, std::optional<std::size_t> to, void* data,
                      std::size_t elements, const collectives::ReduceSpec& spec, Deadline deadline);

  const Places places_;
  const c10::intrusive_ptr<c10d::Store>
      store_;  // a connection of our own: others may wait on theirs
  std::unique_ptr<collectives::Group> local_;
  Links links_;
  Status failure_;  // of the calls so far
  std::atomic<bool> aborted_{false};
};

}  // namespace psplus::pg
