#pragma once

#include <coroutine>
#include <exception>
#include <utility>

namespace psplus::sim {

/// A coroutine without a result. It starts when it is awaited or resumed for the first time; an
/// exception leaves through whoever awaits it. Destroying it destroys everything it was awaiting,
/// at whatever point it stood: that is how a simulated process is killed.
class [[nodiscard]] Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  struct FinalAwaiter {
    [[nodiscard]] bool await_ready() const noexcept { return false; }
    std::coroutine_handle<> await_suspend(Handle handle) const noexcept;
    void await_resume() const noexcept {}
  };
  struct promise_type {
    std::coroutine_handle<> continuation = std::noop_coroutine();
    std::exception_ptr error;

    Task get_return_object() noexcept { return Task{Handle::from_promise(*this)}; }
    [[nodiscard]] std::suspend_always initial_suspend() const noexcept { return {}; }
    [[nodiscard]] FinalAwaiter final_suspend() const noexcept { return {}; }
    void unhandled_exception() noexcept { error = std::current_exception(); }
    void return_void() const noexcept {}
  };

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  ~Task() { reset(); }

  [[nodiscard]] explicit operator bool() const noexcept { return handle_ != nullptr; }
  [[nodiscard]] bool done() const noexcept { return handle_.done(); }
  [[nodiscard]] std::exception_ptr error() const noexcept { return handle_.promise().error; }
  [[nodiscard]] std::coroutine_handle<> handle() const noexcept { return handle_; }
  void reset() noexcept {
    if (auto handle = std::exchange(handle_, nullptr)) handle.destroy();
  }

  // Awaiting a task runs it and goes on when it has ended.
  [[nodiscard]] bool await_ready() const noexcept { return false; }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> waiting) const noexcept {
    handle_.promise().continuation = waiting;
    return handle_;
  }
  void await_resume() const {
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
  }

 private:
  explicit Task(Handle handle) noexcept : handle_(handle) {}
  Handle handle_ = nullptr;
};

inline std::coroutine_handle<> Task::FinalAwaiter::await_suspend(Handle handle) const noexcept {
  return handle.promise().continuation;
}

}  // namespace psplus::sim
