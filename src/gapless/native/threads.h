// A team of threads that does one job at a time: the caller and its helpers, in step by barriers.
//
// Owns: the helpers, and how they wait. A wait first spins for a short time, then sleeps, so that an idle engine uses no
// processor and a busy neighbour is not fought. Knows nothing of the job.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace gapless {

constexpr auto SPIN_TIME = std::chrono::microseconds(100);

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Wait until `value` is no longer `old`.
inline void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
    const auto until = std::chrono::steady_clock::now() + SPIN_TIME;
    do {
        for (int i = 0; i < 64; i++) {
            if (value.load(std::memory_order_acquire) != old) return;
            pause_briefly();
        }
    } while (std::chrono::steady_clock::now() < until);
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

class Team {
  public:
    typedef std::function<void(int)> Job;

    explicit Team(int num_threads) : num_threads_(num_threads) {
        for (int i = 1; i < num_threads; i++) helpers_.emplace_back([this, i] { help(i); });
    }

    ~Team() {
        job_ = nullptr;
        begin();
        for (std::thread& helper : helpers_) helper.join();
    }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return num_threads_; }

    // Every thread calls job(its number); returns when all have.
    void run(const Job& job) {
        job_ = &job;
        begin();
        job(0);
        barrier();
    }

    // Called by every thread of a running job, the same number of times.
    void barrier() {
        if (num_threads_ == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (num_here_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
            num_here_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            phase_.notify_all();
        } else {
            wait_for_change(phase_, phase);
        }
    }

  private:
    void begin() {
        start_.fetch_add(1, std::memory_order_release);
        start_.notify_all();
    }

    void help(int number) {
        for (uint32_t seen = 0;; seen++) {
            wait_for_change(start_, seen);
            if (job_ == nullptr) return;
            (*job_)(number);
            barrier();
        }
    }

    const int num_threads_;
    std::vector<std::thread> helpers_;
    const Job* job_ = nullptr;
    alignas(64) std::atomic<uint32_t> start_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> num_here_{0};
};

}  // namespace gapless
