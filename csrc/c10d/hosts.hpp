#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "c10d/torch_compat.hpp"
#include "collectives/collectives.hpp"

namespace psplus::pg {

/// The ranks of a group on several hosts. Those of a host share memory; one of them, the leader,
/// speaks for all with the leaders of other hosts, so that each byte leaves a host once.
///
/// Ranks of a host's own group are places in its list of ranks, and messages say so.
///
/// Thread safety: as collectives::Group.
class Hosts {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  /// Makes the group among the leaders of `size` hosts.
  using MakeLeaders =
      std::function<BackendPtr(const c10::intrusive_ptr<c10d::Store>&, int rank, int size)>;

  /// Called by all ranks. @return null, on all alike, when no host has two ranks or the ranks of
  /// one cannot share memory. Errors: as join_host.
  static Result<std::unique_ptr<Hosts>> meet(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                             int size, const std::string& host_id,
                                             const MakeLeaders& make_leaders, Deadline deadline);

  /// 16-bit floats are rounded once a host and once at the end. Averages of integers are exact.
  Status all_reduce(const at::Tensor& tensor, const collectives::ReduceSpec& spec,
                    Deadline deadline);
  Status broadcast(int root, const at::Tensor& tensor, Deadline deadline);
  Status barrier(Deadline deadline);

  /// Ends a call under way, from any thread.
  void abort() noexcept;
  /// Closes what this rank has; after the last call.
  void leave() noexcept;
  /// In a forked child.
  void forget() noexcept;

 private:
  Hosts(std::vector<std::vector<int>> hosts, std::size_t own, int size,
        std::unique_ptr<collectives::Group> local, BackendPtr leaders)
      : hosts_(std::move(hosts)),
        own_(own),
        size_(size),
        local_(std::move(local)),
        leaders_(std::move(leaders)) {}

  Status reduce_bytes(void* data, std::size_t elements, const collectives::ReduceSpec& spec,
                      Deadline deadline);
  void reduce_among_leaders(void* data, std::size_t elements, const collectives::ReduceSpec& spec,
                            Deadline deadline);
  Status lead(const std::function<void()>& talk);
  void await(const c10::intrusive_ptr<c10d::Work>& work, Deadline deadline) const;
  [[nodiscard]] Status placed(Status status);

  const std::vector<std::vector<int>> hosts_;  ///< ranks by host, both in the order of ranks
  const std::size_t own_;                      ///< this rank's host
  const int size_;
  std::unique_ptr<collectives::Group> local_;
  BackendPtr leaders_;  ///< null on a rank that is not its host's first, and after a failure
};

}  // namespace psplus::pg
