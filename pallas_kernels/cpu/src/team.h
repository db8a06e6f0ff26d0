// A parallel loop on XLA's own thread pool, cheap enough for work of a few microseconds.
//
// Waking a pool thread costs more than many of our loops take, so a helper that has joined stays
// and spins for the next loop of the same step; it leaves the pool thread when none has come for
// `kPatience`.  The caller always works too, and does everything alone if no helper is there, so
// no loop ever waits for a thread to become free.
//
// Each worker has a share of neighbouring items, so that what it reads is one stream, and takes from
// the end of another's share when its own is done (Blumofe and Leiserson, 1999).
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

  // Who may work in a loop: one more than the largest `worker`.
  static int workers(xla::ffi::ThreadPool& pool) {
    return int(std::max<int64_t>(1, std::min<int64_t>(pool.num_threads(), kMostWorkers)));
  }

  // Calls f(i) for every i in [0, n), on several threads: for few items, of any size.
  template <class F>
  void each(xla::ffi::ThreadPool& pool, int n, const F& f) {
    loop(pool, n, false, [&](int begin, int end, int) {
      for (int i = begin; i < end; i++) f(i);
    });
  }

  // Calls f(begin, end, worker) for runs that make up [0, n): for many items of about one size.
  // Runs are as long as an even end allows, for between two of them a stream of reads stops.
  template <class F>
  void runs(xla::ffi::ThreadPool& pool, int n, const F& f) {
    loop(pool, n, true, f);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kPatience{150};
  static constexpr int kMostWorkers = 64;
  static constexpr int kBits = 20;  // of an item's number

  // Items [next, end) of a loop; the loop's number tells a late thread that it looks at another.
  struct Span {
    uint32_t loop, next, end;

    uint64_t packed() const {
      return uint64_t(loop) << 2 * kBits | uint64_t(next) << kBits | end;
    }
    static Span of(uint64_t bits) {
      constexpr uint32_t kMask = (1u << kBits) - 1;
      return {uint32_t(bits >> 2 * kBits), uint32_t(bits >> kBits) & kMask, uint32_t(bits) & kMask};
    }
  };
  struct alignas(64) Share {
    std::atomic<uint64_t> span{0};
  };

  template <class F>
  void loop(xla::ffi::ThreadPool& pool, int n, bool halves, const F& f) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    const bool alone = !lock.owns_lock();  // another step runs at the same time: it has the helpers
    if (n <= 1 || n >= 1 << kBits || alone) {
      if (n > 0) f(0, n, 0);
      return;
    }
    call_ = [](const void* context, int begin, int end, int worker) {
      (*static_cast<const F*>(context))(begin, end, worker);
    };
    context_ = &f;
    halves_ = halves;
    done_.store(0, std::memory_order_relaxed);
    loop_++;
    const int workers = std::min(Team::workers(pool), n);
    workers_.store(workers, std::memory_order_relaxed);
    for (int w = 0; w < workers; w++) {
      const int begin = int(long(n) * w / workers), end = int(long(n) * (w + 1) / workers);
      shares_[w].span.store(Span{loop_, uint32_t(begin), uint32_t(end)}.packed(),
                            std::memory_order_release);
    }
    hire(pool, workers - 1);
    work(0);
    for (int spins = 0; done_.load(std::memory_order_acquire) < n; spins++) {
      if (spins < 20000) {
        _mm_pause();
      } else {
        sched_yield();  // whoever has the last item is not running
      }
    }
  }

  // Takes some items from the front of a share, or from its end, and does them.  Whoever has taken
  // items may read the loop's fields: they do not change before all of them are done.
  int work_on(Share& share, bool front, int self) {
    int num_done = 0;
    uint64_t bits = share.span.load(std::memory_order_acquire);
    for (;;) {
      const Span span = Span::of(bits);
      if (span.next >= span.end) return num_done;
      const uint32_t left = span.end - span.next, count = halves_ ? (left + 1) / 2 : 1;
      Span rest = span;
      (front ? rest.next += count : rest.end -= count);
      if (!share.span.compare_exchange_weak(bits, rest.packed(), std::memory_order_acq_rel))
        continue;
      const int begin = int(front ? span.next : rest.end);
      call_(context_, begin, begin + int(count), self);
      num_done += int(count);
      bits = share.span.load(std::memory_order_acquire);
    }
  }

  // Works as long as there is something to do; false if there was nothing.
  bool work(int self) {
    int num_done = work_on(shares_[self], true, self);
    const int workers = workers_.load(std::memory_order_relaxed);
    for (int i = 1; i <= workers; i++)
      num_done += work_on(shares_[(self + i) % workers], false, self);
    if (num_done > 0) done_.fetch_add(num_done, std::memory_order_release);
    return num_done > 0;
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
    const int self = take_place();
    auto last = Clock::now();
    for (int spins = 0;; spins++) {
      if (work(self)) {
        spins = 0;
        last = Clock::now();
      } else if (spins % 64 == 63 && Clock::now() - last > kPatience) {
        break;
      } else {
        _mm_pause();
      }
    }
    places_.fetch_and(~(uint64_t(1) << self), std::memory_order_release);
    helpers_.fetch_sub(1);
  }

  // The lowest free number of a helper.
  int take_place() {
    uint64_t taken = places_.load(std::memory_order_acquire);
    for (;;) {
      const int place = __builtin_ctzll(~taken);
      if (places_.compare_exchange_weak(taken, taken | uint64_t(1) << place,
                                        std::memory_order_acq_rel))
        return place;
    }
  }

  std::mutex mutex_;
  Share shares_[kMostWorkers];
  alignas(64) std::atomic<int> done_{0};
  alignas(64) void (*call_)(const void*, int, int, int) = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> halves_{false};
  uint32_t loop_ = 0;
  std::atomic<int> workers_{1};
  std::atomic<int> helpers_{0};
  std::atomic<uint64_t> places_{1};  // a bit for each worker's number in use; 0 is the caller
};

}  // namespace jaxserve
