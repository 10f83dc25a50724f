// Pool: threads that work off a list of items together with their caller.
//
// Decoding calls it some hundred times a token, microseconds apart, so a worker first spins, and sleeps only when
// nothing came for a while. Items are taken one by one, and a worker that is late does not join at all: on a machine
// that is busy with other things the caller does the work alone instead of waiting for a thread that has no core.
// Kernels give every item its own output, so results do not depend on who took what.
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
        }
        state_->wake.notify_all();
        for (std::thread& worker : state_->workers) worker.join();
        delete state_;
    }

    int size() const { return size_; }

    // Call f(item, thread) for every item in [0, items), on threads [0, size()); returns when all is done. Thread 0 is
    // the caller. Several callers take turns.
    template <class F>
    void run(int64_t items, F&& f) {
        if (size_ == 1 || items <= 1) {
            for (int64_t i = 0; i < items; i++) f(i, 0);
            return;
        }
        State& s = *state_;
        std::lock_guard<std::mutex> turn(s.turn);
        s.context = &f;
        s.call = [](void* context, int64_t item, int thread) { (*(std::remove_reference_t<F>*)context)(item, thread); };
        s.items = items;
        s.next.store(0, std::memory_order_relaxed);
        s.left.store(0, std::memory_order_relaxed);
        uint64_t open = s.gate.load(std::memory_order_relaxed) + EPOCH;
        s.gate.store(open);
        if (s.sleepers.load() > 0) {
            { std::lock_guard<std::mutex> lock(s.mutex); }  // a worker between its look at the gate and its sleep first
            s.wake.notify_all();
        }
        s.work(0);
        int joined = (int)(s.gate.exchange(open + EPOCH) % EPOCH);
        for (int spins = 0; s.left.load(std::memory_order_acquire) < joined; spins++) {
            relax();
            if (spins > 1000) std::this_thread::yield();  // the worker has lost its core to someone
        }
    }

    // In the child of a fork there are no workers, and a lock may be held by a thread that is gone: begin anew.
    void after_fork() { start(); }

private:
    static constexpr uint64_t EPOCH = 1 << 16;

    struct State {
        // Number of the job times EPOCH, plus how many workers have joined it. Odd: open; even: no one joins any more.
        std::atomic<uint64_t> gate{0};
        std::atomic<int64_t> next{0};
        std::atomic<int> left{0}, sleepers{0};
        std::atomic<bool> stop{false};
        int64_t items = 0;
        void* context = nullptr;
        void (*call)(void*, int64_t, int) = nullptr;
        std::mutex turn, mutex;
        std::condition_variable wake;
        std::vector<std::thread> workers;

        bool is_new(uint64_t seen) const {
            uint64_t epoch = gate.load(std::memory_order_acquire) / EPOCH;
            return epoch % 2 == 1 && epoch != seen;
        }

        void work(int thread) {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) call(context, i, thread);
        }
    };

    void start() {
        state_ = new State;  // after a fork the old one is left alone: its threads cannot be joined
        for (int i = 1; i < size_; i++) state_->workers.emplace_back(serve, state_, i);
    }

    static void serve(State* state, int thread) {
        State& s = *state;
        uint64_t seen = 0;
        while (!s.stop) {
            if (!spin(s, seen)) {
                std::unique_lock<std::mutex> lock(s.mutex);
                s.sleepers.fetch_add(1);
                s.wake.wait(lock, [&] { return s.is_new(seen) || s.stop; });
                s.sleepers.fetch_sub(1);
            }
            uint64_t gate = s.gate.load();
            if (gate / EPOCH % 2 == 0 || gate / EPOCH == seen) continue;
            if (!s.gate.compare_exchange_strong(gate, gate + 1)) continue;
            seen = gate / EPOCH;
            s.work(thread);
            s.left.fetch_add(1, std::memory_order_release);
        }
    }

    // True as soon as there is a new job; false when none came for a while. Others may have the core meanwhile.
    static bool spin(const State& s, uint64_t seen) {
        constexpr std::chrono::microseconds SPIN(200);
        auto begin = std::chrono::steady_clock::now();
        do {
            for (int i = 0; i < 64; i++) {
                if (s.is_new(seen)) return true;
                relax();
            }
            std::this_thread::yield();
        } while (std::chrono::steady_clock::now() - begin < SPIN);
        return false;
    }

    int size_;
    State* state_;
};
