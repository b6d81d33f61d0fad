// A thread pool for jobs that take microseconds. It stays fast when other programs compete for the cores.
//
// A job is `count` independent tasks. The calling thread takes tasks itself and never waits for a helper thread to
// start: a helper that the operating system has not scheduled takes no tasks. The caller waits only for tasks that a
// helper has begun. (With OpenMP's static schedule, every region waits for the slowest thread.) A waiting thread spins
// for the length of a job or two and then sleeps; while it spins, it yields its core regularly.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <mutex>
#include <thread>

#include "simd.h"

namespace argosy {

// A bounded spin wait of about 30 to 60 us, which is longer than the gaps inside a forward pass and shorter than those
// between two. It yields about every microsecond: on an idle machine a yield returns at once; on a busy one it lets the
// thread run that has the work.
class Spin {
 public:
  // Pauses briefly; returns whether to check the condition again rather than sleep.
  bool again() {
    if (++looks_ % kLooksPerYield) {
      _mm_pause();
    } else {
      sched_yield();
    }
    return __rdtsc() - begin_ < kTicks;
  }

 private:
  static constexpr uint64_t kTicks = 130000;  // of the time stamp counter, which runs at 2 to 4 GHz
  static constexpr unsigned kLooksPerYield = 16;

  uint64_t begin_ = __rdtsc();
  unsigned looks_ = 0;
};

class Pool {
 public:
  static Pool& instance() {
    static Pool* pool = new Pool;  // never destroyed: helpers outlive static destructors
    return *pool;
  }

  int threads() const { return helpers_.load(std::memory_order_relaxed) + 1; }

  // Sets the number of threads. Helpers beyond `threads` - 1 sleep and are never ended, which makes resizing cheap.
  void resize(int threads) {
    std::lock_guard<std::mutex> lock(busy_);
    for (; started_ < threads - 1; ++started_) std::thread(&Pool::help, this, started_).detach();
    helpers_.store(threads - 1, std::memory_order_relaxed);
  }

  // Calls task(i) for every i below `count`, the highest first, and returns when all are done. If the pool is in use
  // (two engines in one process), the caller runs all its tasks itself.
  template <class F>
  void run(int count, F&& task) {
    if (count <= 0) return;
    if (count == 1 || threads() == 1 || !busy_.try_lock()) {
      for (int i = count - 1; i >= 0; --i) task(i);
      return;
    }
    run_shared(count, [](void* context, int i) { (*static_cast<F*>(context))(i); }, &task);
    busy_.unlock();
  }

 private:
  using Call = void (*)(void*, int);

  // The ticket holds a job's number (high half) and its number of tasks not yet taken (low half). Taking a task is one
  // compare-exchange on both, so that a late helper can never take a task of a job whose function it has not read.
  static constexpr uint64_t kOneJob = uint64_t{1} << 32;

  void run_shared(int count, Call call, void* context) {
    call_.store(call, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    unfinished_.store(count, std::memory_order_relaxed);
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) | 0xffffffffu) + 1;
    ticket_.store(job + count, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) wake();
    take_tasks(job >> 32);
    for (Spin spin; unfinished_.load(std::memory_order_acquire);) {
      if (spin.again()) continue;
      is_waiting_.store(1, std::memory_order_seq_cst);
      const int left = unfinished_.load(std::memory_order_seq_cst);
      if (left) futex(&unfinished_, FUTEX_WAIT_PRIVATE, left);
      is_waiting_.store(0, std::memory_order_relaxed);
    }
  }

  void take_tasks(uint64_t job) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while ((ticket >> 32) == job && uint32_t(ticket)) {
      const Call call = call_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      call(context, int(uint32_t(ticket)) - 1);
      if (unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1 && is_waiting_.load(std::memory_order_seq_cst))
        futex(&unfinished_, FUTEX_WAKE_PRIVATE, INT_MAX);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void help(int index) {
    uint64_t seen = 0;
    for (;;) {
      const uint64_t job = await_job(seen, index);
      take_tasks(job);
      seen = job;
    }
  }

  uint64_t await_job(uint64_t seen, int index) {
    for (Spin spin;;) {
      const bool is_needed = index < helpers_.load(std::memory_order_relaxed);
      const uint64_t job = ticket_.load(std::memory_order_acquire) >> 32;
      if (is_needed && job != seen) return job;
      if (is_needed && spin.again()) continue;
      const int alarm = alarm_.load(std::memory_order_seq_cst);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      if (!is_needed || (ticket_.load(std::memory_order_seq_cst) >> 32) == seen)
        futex(&alarm_, FUTEX_WAIT_PRIVATE, alarm);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      spin = Spin();
    }
  }

  void wake() {
    alarm_.fetch_add(1, std::memory_order_seq_cst);
    futex(&alarm_, FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  static void futex(std::atomic<int>* word, int operation, int value) {
    syscall(SYS_futex, word, operation, value, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(64) std::atomic<int> unfinished_{0};
  std::atomic<int> is_waiting_{0};
  alignas(64) std::atomic<int> alarm_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<int> helpers_{0};
  int started_ = 0;
  std::mutex busy_;
};

// Calls body(row) for all rows, of `cost` elements each, in tasks large enough to be worth distributing.
template <class F>
inline void parallel_rows(int rows, int64_t cost, F&& body) {
  constexpr int64_t kElementsPerTask = 8192;
  const int per_task = int(cost >= kElementsPerTask ? 1 : kElementsPerTask / cost);
  const int tasks = (rows + per_task - 1) / per_task;
  Pool::instance().run(tasks, [&](int task) {
    const int end = (task + 1) * per_task < rows ? (task + 1) * per_task : rows;
    for (int row = task * per_task; row < end; ++row) body(row);
  });
}

}  // namespace argosy
