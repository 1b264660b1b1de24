#include "team.h"

#include <unistd.h>

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace starscope {
namespace {

// Longer than any phase of a decoding step differs between threads; shorter than a user would notice as load.
constexpr auto kSpin = std::chrono::microseconds(50);

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#endif
}

// Waits until `value` is no longer `old`: awake at first, then asleep.
template <typename T>
void wait_for_change(const std::atomic<T>& value, T old) {
    const auto asleep = std::chrono::steady_clock::now() + kSpin;
    for (;;) {
        for (int i = 0; i < 64; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            pause();
        }
        if (std::chrono::steady_clock::now() >= asleep) break;
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(int threads) : size_(threads) {}

Team::~Team() {
    if (process_ != getpid()) {
        for (std::thread& helper : helpers_) helper.detach();  // they belong to the parent
        return;
    }
    stop();
}

void Team::stop() {
    stopping_ = true;
    jobs_.fetch_add(1, std::memory_order_release);
    jobs_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
    helpers_.clear();
    stopping_ = false;
}

void Team::start() {
    for (std::thread& helper : helpers_) helper.detach();  // they belong to the parent, perhaps in the middle of a job
    helpers_.clear();
    arrived_.store(0, std::memory_order_relaxed);
    const uint32_t seen = jobs_.load(std::memory_order_relaxed);
    try {
        for (int thread = 1; thread < size_; ++thread) helpers_.emplace_back(&Team::work, this, thread, seen);
    } catch (...) {
        stop();
        throw;
    }
    process_ = getpid();
}

void Team::work(int thread, uint32_t seen) {
    for (;;) {
        wait_for_change(jobs_, seen);
        seen = jobs_.load(std::memory_order_acquire);
        if (stopping_) return;
        (*job_)(thread);
        if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_all();
    }
}

void Team::run(const std::function<void(int)>& job) {
    next_.store(0, std::memory_order_relaxed);
    if (size_ == 1) return job(0);
    if (process_ != getpid()) start();
    job_ = &job;
    running_.store(size_ - 1, std::memory_order_relaxed);
    jobs_.fetch_add(1, std::memory_order_release);
    jobs_.notify_all();
    job(0);
    for (int left; (left = running_.load(std::memory_order_acquire)) != 0;) wait_for_change(running_, left);
}

void Team::barrier() {
    if (size_ == 1) {
        next_.store(0, std::memory_order_relaxed);
        return;
    }
    const uint32_t passed = barriers_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        barriers_.fetch_add(1, std::memory_order_release);
        barriers_.notify_all();
    } else {
        wait_for_change(barriers_, passed);
    }
}

}  // namespace starscope
