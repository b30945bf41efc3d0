#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "c10d/origin.hpp"
#include "c10d/torch_compat.hpp"

namespace psplus::pg {

/// Throws DistBackendError in a process forked from `owner`, which was `rank` of a group: a child
/// has the group's memory but not its threads, and the others know nothing of it.
void throw_if_forked(pid_t owner, int rank);

/// One call of a process group: what is to be done, and how it ended.
///
/// Thread safety: as c10d::Work, every method from any thread; `run` or `end` once.
class GroupWork final : public c10d::Work {
 public:
  using Body = std::function<Status(Deadline)>;

  GroupWork(int rank, c10d::OpType type, const char* title, std::uint64_t sequence,
            std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs)
      : Work(rank, type, title, inputs), sequence_(sequence), outputs_(std::move(outputs)) {}

  /// Gives a collective its body; `timeout` counts from when it begins to run.
  void set_body(Body body, milliseconds timeout) {
    body_ = std::move(body);
    timeout_ = timeout;
  }
  /// The thread that wants to wait does this first, where it can move things on itself.
  void set_helper(std::function<void()> helper) { helper_ = std::move(helper); }

  /// Runs the body, and ends with what it returned or threw; callbacks are left to settle().
  void run() noexcept;
  /// Ends the work for those who wait for it; callbacks are left to settle().
  void end(std::exception_ptr error) noexcept;
  /// Whether somebody asked for the future, and callbacks may have to run.
  [[nodiscard]] bool has_future();
  /// Completes the future, if there is one, which runs its callbacks.
  void settle();
  /// end() and settle().
  void complete(std::exception_ptr error) noexcept;
  /// For a receive from any rank; before complete().
  void set_source(int rank) { source_ = rank; }

  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  const std::uint64_t sequence_;
  const pid_t process_ = this_process();
  std::vector<at::Tensor> outputs_;
  Body body_;
  milliseconds timeout_{};
  std::function<void()> helper_;
  int source_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when asked for; guarded by mutex_
  bool settled_ = false;                            // the same
};

/// Several calls as one: done when all are, failed when one is.
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace psplus::pg
