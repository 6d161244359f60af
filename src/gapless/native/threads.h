// A team of threads that does one job at a time, in phases: the caller, and whichever helpers have a processor.
//
// A phase is a number of units. Each thread first takes the units of its own share, then what is left of the others'.
// A phase is over when its units are done, not when every thread has come by: a helper that gets no processor holds
// nobody up, and joins in wherever the job has got to. Waits spin for a short time, then sleep, so that an idle engine
// uses no processor. Owns the helpers; knows nothing of the job.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <system_error>
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

// Wait until `value` is no longer `old`. Who changes it must do so in sequential order: notify_all of GNU's library reads
// the number of sleepers without a fence, and a processor may do that before a mere release is seen. Then none is woken.
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

    // Where the system gives no more threads, the team is smaller: a seat that stays empty holds nobody up either.
    explicit Team(int num_threads) : seats_(num_threads) {
        helpers_.reserve(num_threads);
        try {
            for (int i = 1; i < num_threads; i++) helpers_.emplace_back([this, i] { help(i); });
        } catch (const std::system_error&) {
        }
    }

    ~Team() {
        stopping_ = true;
        start();
        for (std::thread& helper : helpers_) helper.join();
    }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return seats_.size(); }

    // The caller calls job(0), and helpers job(their number), at any time until it is over, even twice. Outside its
    // phases the job may not write.
    void run(const Job& job) {
        job_ = &job;
        first_phase_ = phase_.load(std::memory_order_relaxed);
        door_.store(OPEN, std::memory_order_release);
        start();
        enter(0);
        uint32_t inside = door_.fetch_and(~OPEN, std::memory_order_acq_rel) & ~OPEN;
        for (; inside != 0; inside = door_.load(std::memory_order_acquire)) wait_for_change(door_, inside);
    }

    // Called by every thread with the same `count`: action(unit) is done once for each; returns when all are.
    template <class Action>
    void phase(int thread, int count, Action action) {
        if (count == 0) return;
        const uint32_t mine = seats_[thread].phase++;
        const int num_threads = size();
        for (int i = 0; i < num_threads; i++) {
            const int whose = (thread + i) % num_threads;
            const int first = (int64_t)count * whose / num_threads, end = (int64_t)count * (whose + 1) / num_threads;
            for (int unit; (unit = take(seats_[whose].taken, mine, end - first)) >= 0;) {
                action(first + unit);
                if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) next_phase(mine);
            }
        }
        wait_for_change(phase_, mine);
    }

  private:
    static constexpr uint32_t OPEN = 1u << 31;

    struct alignas(64) Seat {
        std::atomic<uint64_t> taken{0};  // the phase, and how many of this thread's units are taken in it
        uint32_t phase = 0;              // that the thread comes to next
    };

    // A unit of the phase, or -1 when none is left or the phase is over.
    static int take(std::atomic<uint64_t>& taken, uint32_t phase, int size) {
        uint64_t old = taken.load(std::memory_order_acquire);
        while (old >> 32 == phase && (int)(uint32_t)old < size)
            if (taken.compare_exchange_weak(old, old + 1, std::memory_order_acq_rel)) return (int)(uint32_t)old;
        return -1;
    }

    void next_phase(uint32_t mine) {
        num_done_.store(0, std::memory_order_relaxed);
        for (Seat& seat : seats_) seat.taken.store((uint64_t)(mine + 1) << 32, std::memory_order_release);
        phase_.store(mine + 1);
        phase_.notify_all();
    }

    void start() {
        num_starts_.fetch_add(1);
        num_starts_.notify_all();
    }

    void enter(int thread) {
        seats_[thread].phase = first_phase_;
        (*job_)(thread);
    }

    void help(int number) {
        for (uint32_t seen = 0;;) {
            wait_for_change(num_starts_, seen);
            seen = num_starts_.load(std::memory_order_acquire);
            if (stopping_) return;
            uint32_t door = door_.load(std::memory_order_acquire);
            while (door & OPEN)
                if (door_.compare_exchange_weak(door, door + 1, std::memory_order_acq_rel)) {
                    enter(number);
                    door_.fetch_sub(1);
                    door_.notify_all();
                    break;
                }
        }
    }

    std::vector<Seat> seats_;
    std::vector<std::thread> helpers_;
    const Job* job_ = nullptr;
    uint32_t first_phase_ = 0;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> num_starts_{0};
    alignas(64) std::atomic<uint32_t> door_{0};  // whether the job is open to helpers, and how many are inside
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> num_done_{0};
};

}  // namespace gapless
