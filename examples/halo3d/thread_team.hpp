// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_EXAMPLES_HALO3D_THREAD_TEAM_HPP
#define MPGPU_EXAMPLES_HALO3D_THREAD_TEAM_HPP

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

/// CPU threads that process tasks together. The calling thread is one of them.
class thread_team {
  public:
    explicit thread_team(int threads) {
        for (int i = 1; i < threads; ++i) {
            others_.emplace_back([this] { serve(); });
        }
    }
    thread_team(const thread_team &) = delete;
    thread_team(thread_team &&) = delete;
    thread_team &operator=(const thread_team &) = delete;
    thread_team &operator=(thread_team &&) = delete;
    ~thread_team() {
        {
            const std::lock_guard<std::mutex> locked(mutex_);
            is_over_ = true;
        }
        begun_.notify_all();
        for (std::thread &other : others_) {
            other.join();
        }
    }

    /// Calls `task(i)` for each i below `count`, distributed among the threads, and waits for all calls. `task` must
    /// not throw.
    void run(std::size_t count, const std::function<void(std::size_t)> &task) {
        if (count < 2) { // not worth waking a thread
            for (std::size_t i = 0; i < count; ++i) {
                task(i);
            }
            return;
        }
        {
            const std::lock_guard<std::mutex> locked(mutex_);
            task_ = &task;
            count_ = count;
            next_ = 0;
            at_work_ = others_.size();
            ++round_;
        }
        begun_.notify_all();
        take();
        std::unique_lock<std::mutex> locked(mutex_);
        done_.wait(locked, [this] { return at_work_ == 0; });
    }

  private:
    void take() {
        for (std::size_t i = next_++; i < count_; i = next_++) {
            (*task_)(i);
        }
    }
    void serve() {
        std::uint64_t seen = 0;
        std::unique_lock<std::mutex> locked(mutex_);
        for (;;) {
            begun_.wait(locked, [&] { return is_over_ || round_ != seen; });
            if (is_over_) {
                return;
            }
            seen = round_;
            locked.unlock();
            take();
            locked.lock();
            if (--at_work_ == 0) {
                done_.notify_one();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable begun_;
    std::condition_variable done_;
    const std::function<void(std::size_t)> *task_ = nullptr;
    std::size_t count_ = 0;
    std::atomic<std::size_t> next_ = 0;
    std::size_t at_work_ = 0; ///< number of other threads that have not finished the current tasks
    std::uint64_t round_ = 0;
    bool is_over_ = false;
    std::vector<std::thread> others_;
};

#endif // MPGPU_EXAMPLES_HALO3D_THREAD_TEAM_HPP
