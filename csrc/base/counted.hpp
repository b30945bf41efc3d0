#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace psplus {

/// Counts whoever is in a scope, in a variable that `lock`'s mutex guards, and notifies `changed`
/// when one leaves, which may be by an exception and without the lock.
class Counted {
 public:
  Counted(std::size_t& count, std::condition_variable& changed, std::unique_lock<std::mutex>& lock)
      : count_(count), changed_(changed), lock_(lock) {
    ++count_;
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() {
    if (!lock_.owns_lock()) lock_.lock();
    --count_;
    changed_.notify_all();
  }

 private:
  std::size_t& count_;
  std::condition_variable& changed_;
  std::unique_lock<std::mutex>& lock_;
};

}  // namespace psplus
