// Pool: threads that run one function at a time together with their caller.
//
// Decoding calls it some hundred times a token, microseconds apart, so a worker first spins on `epoch` and sleeps only
// when nothing came for a while. The caller is worker 0. Who does which part is the function's own choice, by the
// index it is given; kernels cut their output by that index, so that results do not depend on timing.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
inline void relax() { asm volatile("yield"); }
#else
inline void relax() {}
#endif

class Pool {
public:
    explicit Pool(int threads) : size_(threads < 1 ? 1 : threads) { start(); }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(state_->mutex);
            state_->stop = true;
            state_->epoch.fetch_add(1);
        }
        state_->wake.notify_all();
        for (std::thread& worker : state_->workers) worker.join();
        delete state_;
    }

    int size() const { return size_; }

    // Call f(index, size) on every thread, index 0 on this one; returns when all have. Callers take turns.
    template <class F>
    void run(F&& f) {
        if (size_ == 1) return f(0, 1);
        State& s = *state_;
        std::lock_guard<std::mutex> turn(s.turn);
        s.context = &f;
        s.call = [](void* context, int index, int size) { (*(std::remove_reference_t<F>*)context)(index, size); };
        s.pending.store(size_ - 1, std::memory_order_relaxed);
        s.epoch.fetch_add(1);
        if (s.sleepers.load() > 0) {
            { std::lock_guard<std::mutex> lock(s.mutex); }  // a worker between its check and its sleep goes first
            s.wake.notify_all();
        }
        f(0, size_);
        for (int spins = 0; s.pending.load(std::memory_order_acquire) > 0; spins++) {
            relax();
            if (spins > 20000) std::this_thread::yield();  // a worker has lost its core to someone
        }
    }

    // In the child of a fork there are no workers, and a lock may be held by a thread that is gone: begin anew.
    void after_fork() { start(); }

private:
    struct State {
        std::mutex turn, mutex;
        std::condition_variable wake;
        std::atomic<uint64_t> epoch{0};
        std::atomic<int> pending{0}, sleepers{0};
        bool stop = false;
        void* context = nullptr;
        void (*call)(void*, int, int) = nullptr;
        std::vector<std::thread> workers;
    };

    void start() {
        state_ = new State;  // after a fork the old one is left alone: its threads cannot be joined
        for (int i = 1; i < size_; i++) state_->workers.emplace_back(work, state_, i, size_);
    }

    static void work(State* state, int index, int size) {
        State& s = *state;
        for (uint64_t seen = 0;; seen++) {
            if (!spin(s, seen)) {
                std::unique_lock<std::mutex> lock(s.mutex);
                s.sleepers.fetch_add(1);
                s.wake.wait(lock, [&] { return s.epoch.load() != seen; });
                s.sleepers.fetch_sub(1);
            }
            if (s.stop) return;
            s.call(s.context, index, size);
            s.pending.fetch_sub(1, std::memory_order_release);
        }
    }

    // True as soon as there is a new epoch; false when none came within SPIN.
    static bool spin(State& s, uint64_t seen) {
        constexpr std::chrono::microseconds SPIN(200);
        auto begin = std::chrono::steady_clock::now();
        do {
            for (int i = 0; i < 64; i++) {
                if (s.epoch.load(std::memory_order_acquire) != seen) return true;
                relax();
            }
        } while (std::chrono::steady_clock::now() - begin < SPIN);
        return false;
    }

    int size_;
    State* state_;
};
