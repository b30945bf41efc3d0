#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "c10d/buffers.hpp"
#include "c10d/executor.hpp"
#include "c10d/hosts.hpp"
#include "c10d/origin.hpp"
#include "c10d/torch_compat.hpp"
#include "c10d/work.hpp"
#include "collectives/collectives.hpp"
#include "collectives/messages.hpp"

namespace psplus::pg {

/// The process group behind init_process_group("psplus").
///
/// CPU tensors travel through shared memory when all ranks share a host; when hosts have several
/// ranks each, collectives through shared memory within hosts and Gloo between them; else through
/// an inner Gloo group. CUDA tensors through an inner NCCL group, made when the first one comes.
/// Collectives on CPU tensors run in the order submitted; sends and receives beside them.
///
/// Thread safety: every method from any thread; collectives must be submitted in the same order on
/// all ranks. In a forked child every call throws, and destruction only drops what is the child's.
class ProcessGroupPSPlus final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  struct Setup;
  /// Makes an inner group for the ranks of a group; called by all of them or by none.
  using MakeBackend = std::function<BackendPtr(const Setup&)>;

  /// How a group is set up.
  struct Setup {
    c10::intrusive_ptr<c10d::Store> store;  ///< this group's own keys
    int rank;
    int size;
    milliseconds timeout;  ///< of calls that name none
    std::string host_id;   ///< equal for ranks that may share memory
    std::vector<std::uint64_t> global_ranks;
    MakeBackend make_gloo;
    MakeBackend make_nccl;
  };

  /// Meets the other ranks. Throws DistBackendError when that fails.
  explicit ProcessGroupPSPlus(Setup setup);
  ~ProcessGroupPSPlus() override;

  const std::string getBackendName() const override { return "psplus"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  /// Whether CPU tensors travel through shared memory.
  [[nodiscard]] bool shares_memory() const noexcept { return host_ != nullptr; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  bool supportsSplitting() const override { return true; }
  /// A new group of some of this one's `ranks`, in that order; called by these, at least. Null for
  /// a rank that is not among them.
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& opts) override;

  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  /// Wakes everybody who waits, on all ranks, and fails what is queued.
  void abort() override;
  /// Finishes what is queued, or aborts it after a few seconds; then leaves the group. Idempotent.
  void shutdown() override;

 private:
  /// The shared memory and what moves in it; helpers of works may outlive the group.
  struct Host {
    explicit Host(std::unique_ptr<collectives::Group> joined)
        : group(std::move(joined)), messages(*group) {}
    std::unique_ptr<collectives::Group> group;
    collectives::Messages messages;
  };
  /// What a collective is submitted with.
  struct Submission {
    c10d::OpType type;
    const char* title;
    Tensors outputs;
    std::chrono::milliseconds timeout;
    bool async;
  };

  /// Throws in a forked child, before anything that its parent or other ranks see is touched.
  void check_process() const { throw_if_forked(owner_, getRank()); }
  void drop_in_child() noexcept;
  void join_hosts();
  /// The inner group for collectives on such tensors; null for our own, through shared memory or by
  /// host. Throws for other devices, and in a forked child.
  c10d::Backend* inner_for(const at::Device& device);
  /// The same for sends and receives, which between hosts are Gloo's.
  c10d::Backend* inner_for_messages(const at::Device& device);
  c10d::Backend& nccl();
  WorkPtr submit(Submission submission, const Tensors& inputs, GroupWork::Body body);
  WorkPtr note(WorkPtr work);
  WorkPtr receive(std::optional<Rank> from, Tensors& tensors, int tag, c10d::OpType type);
  c10::intrusive_ptr<GroupWork> make_message(c10d::OpType type, const char* title,
                                             const Tensors& tensors);
  WorkPtr start_message(const c10::intrusive_ptr<GroupWork>& work);
  [[nodiscard]] collectives::Group& group() const { return *host_->group; }
  [[nodiscard]] std::size_t ranks() const { return static_cast<std::size_t>(getSize()); }
  [[nodiscard]] bool is_own(Rank rank) const { return static_cast<int>(raw(rank)) == getRank(); }
  [[nodiscard]] milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;

  // Bodies of what several overrides share; they run on the executor.
  Status gather_buffers(const Buffers& outs, const Buffer& in, Deadline deadline);
  Status exchange_buffers(const Buffers& ins, const Buffers& outs, Deadline deadline);
  Status gather_all(const Tensors& outputs, const at::Tensor& input, Deadline deadline);
  Status gather_into(const at::Tensor& output, const at::Tensor& input, Deadline deadline);
  Status scatter_reduced(const at::Tensor& output, const Tensors& inputs,
                         const collectives::ReduceSpec& spec, Deadline deadline);
  Status scatter_reduced_from(const at::Tensor& output, const at::Tensor& input,
                              const collectives::ReduceSpec& spec, Deadline deadline);
  Status reduce_all(const at::Tensor& tensor, const collectives::ReduceSpec& spec,
                    Deadline deadline);
  Status reduce_sparse(at::Tensor& tensor, bool average, Deadline deadline);

  const c10::intrusive_ptr<Options> options_;
  const pid_t owner_;
  const Setup setup_;
  std::shared_ptr<Host> host_;
  BackendPtr gloo_;
  std::shared_ptr<Hosts> hosts_;  // beside gloo_, for collectives

  std::mutex mutex_;  // guards all below but the executor; taken alone
  milliseconds timeout_;
  BackendPtr nccl_;
  std::uint64_t sequence_ = 0;
  bool coalescing_ = false;
  bool coalescing_nccl_ = false;
  std::vector<WorkPtr> coalesced_;
  bool shut_down_ = false;
  std::map<std::vector<int>, int> splits_;  // groups made of these ranks so far

  const std::shared_ptr<Executor> executor_ = std::make_shared<Executor>();
};

}  // namespace psplus::pg
