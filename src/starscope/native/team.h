// Threads that wait for work between steps and meet at barriers within one.
//
// A job runs on every thread at once, `thread` telling them apart. Between two barriers they share out work by taking
// numbers from one counter, which every barrier sets back to zero:
//
//     team.run([&](int thread) {
//         for (size_t i; (i = team.take(4)) < count;) work(i, std::min(i + 4, count));
//         team.barrier();
//         ...
//     });
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace starscope {

class Team {
  public:
    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Runs job(thread) for thread = 0 .. size()-1, 0 on the calling thread, and returns when all have returned. A job
    // must not throw. One caller at a time. std::system_error when the threads cannot be started; the team can be used
    // again then.
    void run(const std::function<void(int)>& job);

    // Returns on every thread once all have called it. Called within a job, by all threads or none.
    void barrier();

    // The first of the next `count` numbers that nobody has taken since the last barrier.
    size_t take(size_t count) { return next_.fetch_add(count, std::memory_order_relaxed); }

  private:
    void start();
    void stop();
    void work(int thread, uint32_t seen);

    const int size_;
    long process_ = 0;  // whose threads these are: after a fork the child has none
    const std::function<void(int)>* job_ = nullptr;
    std::vector<std::thread> helpers_;
    bool stopping_ = false;

    // Each on a cache line of its own: the threads spin on them.
    alignas(64) std::atomic<uint32_t> jobs_{0};      // jobs begun; helpers wait for it to change
    alignas(64) std::atomic<int> running_{0};        // helpers that have not finished the job
    alignas(64) std::atomic<uint32_t> barriers_{0};  // barriers passed
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<size_t> next_{0};
};

}  // namespace starscope
