// A parallel loop on XLA's own thread pool, cheap enough for work of a few microseconds.
//
// Waking a pool thread costs more than many of our loops take, so a helper that has joined stays
// and spins for the next loop of the same step; it leaves the pool thread when none has come for
// `kPatience`.  The caller always works too, and does everything alone if no helper is there, so
// no loop ever waits for a thread to become free.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace jaxserve {

class Team {
 public:
  static Team& instance() {
    static Team* team = new Team;  // never destroyed: a helper may outlive static destructors
    return *team;
  }

  // Calls f(i) for every i in [0, n), on several threads.
  template <class F>
  void each(xla::ffi::ThreadPool& pool, int n, const F& f) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (n <= 1 || !lock.owns_lock()) {  // another step runs at the same time: it has the helpers
      for (int i = 0; i < n; i++) f(i);
      return;
    }
    call_ = &Team::call<F>;
    context_ = &f;
    count_ = n;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t loop = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(loop << 32 | uint32_t(n), std::memory_order_release);
    hire(pool, std::min<int64_t>(pool.num_threads(), n) - 1);
    while (work()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < n; spins++) {
      if (spins < 20000) {
        _mm_pause();
      } else {
        sched_yield();  // whoever has the last item is not running
      }
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kPatience{150};

  template <class F>
  static void call(const void* context, int i) {
    (*static_cast<const F*>(context))(i);
  }

  // Takes and does one item; false if there is none.  A ticket is a loop's number and how many of
  // its items are left to take.  Whoever takes one may read the loop's fields: they do not change
  // before all its items are done.
  bool work() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (uint32_t left = uint32_t(ticket)) {
      if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) {
        call_(context_, count_ - int(left));
        done_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
    return false;
  }

  void hire(xla::ffi::ThreadPool& pool, int wanted) {
    for (int have = helpers_.load(); have < wanted;) {
      if (helpers_.compare_exchange_weak(have, have + 1)) {
        pool.Schedule([this] { help(); });
        have++;
      }
    }
  }

  void help() {
    auto last = Clock::now();
    for (int spins = 0;; spins++) {
      if (work()) {
        spins = 0;
        last = Clock::now();
      } else if (spins % 64 == 63 && Clock::now() - last > kPatience) {
        break;
      } else {
        _mm_pause();
      }
    }
    helpers_.fetch_sub(1);
  }

  std::mutex mutex_;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) void (*call_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  int count_ = 0;
  std::atomic<int> helpers_{0};
};

}  // namespace jaxserve
