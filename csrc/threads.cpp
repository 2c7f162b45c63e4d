#include "threads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace bankfull {
namespace {

#if defined(__linux__)

// What the control group allows, in whole processors; 0: no limit. Both generations of the interface are asked.
int quota() {
    double allowed = 0, period = 0;
    std::string word;
    if (std::ifstream file("/sys/fs/cgroup/cpu.max"); file >> word >> period && word != "max")
        allowed = std::strtod(word.c_str(), nullptr);
    else if (std::ifstream old("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"); old >> allowed && allowed > 0)
        std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
    return allowed > 0 && period > 0 ? std::max(1, int(allowed / period + 0.999)) : 0;
}

// Two threads of one core share its arithmetic: a second worker there only fights the first.
int physical_cores(const cpu_set_t& set) {
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &set)) continue;
        std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        std::string siblings;
        cores.insert(file >> siblings ? siblings : std::to_string(cpu));
    }
    return int(cores.size());
}

#endif

int available_cores() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) {
        const int cores = physical_cores(set), most = quota();
        return most ? std::min(cores, most) : cores;
    }
#endif
    const unsigned count = std::thread::hardware_concurrency();
    return count ? int(count) : 1;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
  public:
    explicit Pool(int threads) : shares_(size_t(threads)) {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
            epoch_.fetch_add(1);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    int threads() const { return int(shares_.size()); }

    void run(int64_t count, int64_t piece, Task task, const void* job) {
        task_ = task;
        job_ = job;
        piece_ = piece;
        const int64_t pieces = (count + piece - 1) / piece, all = threads();
        for (int64_t i = 0; i < all; ++i) {
            shares_[i].next.store(pieces * i / all * piece, std::memory_order_relaxed);
            shares_[i].end = std::min(count, pieces * (i + 1) / all * piece);
        }
        inside_.store(OPEN, std::memory_order_release);
        epoch_.fetch_add(1);  // sequentially consistent with sleepers_: one of the two sides sees the other
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        work(0);
        inside_.fetch_and(~OPEN, std::memory_order_acq_rel);
        for (int spins = 0; inside_.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins < SPINS)
                relax();
            else
                std::this_thread::yield();
        }
    }

  private:
    static constexpr uint32_t OPEN = 1u << 31;
    static constexpr int SPINS = 2000;  // some tens of microseconds: the end of a piece that another thread has begun
    static constexpr std::chrono::microseconds PATIENCE{300};

    // A worker's own share first, then what others have left: whoever wrote some rows is likely to read them again, and
    // has them in its own cache.
    void work(int64_t self) {
        const int64_t all = threads();
        for (int64_t i = 0; i < all; ++i) {
            Share& share = shares_[self + i < all ? self + i : self + i - all];
            while (share.next.load(std::memory_order_relaxed) < share.end) {
                const int64_t begin = share.next.fetch_add(piece_, std::memory_order_relaxed);
                if (begin < share.end) task_(job_, begin, std::min(begin + piece_, share.end));
            }
        }
    }

    // A job's fields may be read only between joining and leaving: the caller changes them when nobody is inside.
    bool join() {
        uint32_t seen = inside_.load(std::memory_order_acquire);
        while (seen & OPEN)
            if (inside_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return true;
        return false;
    }

    // Is there a new job within the time that a host takes between two steps?
    bool soon(uint32_t done) const {
        const auto until = std::chrono::steady_clock::now() + PATIENCE;
        do
            for (int spins = 0; spins < 64; ++spins) {
                if (epoch_.load(std::memory_order_acquire) != done) return true;
                relax();
            }
        while (std::chrono::steady_clock::now() < until);
        return epoch_.load() != done;
    }

    void serve(int self) {
        uint32_t done = 0;
        while (!stop_.load()) {
            if (!soon(done)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, [&] { return epoch_.load() != done; });
                sleepers_.fetch_sub(1);
            }
            done = epoch_.load();
            if (join()) {
                work(self);
                inside_.fetch_sub(1, std::memory_order_acq_rel);
            }
        }
    }

    Task task_ = nullptr;
    const void* job_ = nullptr;
    int64_t piece_ = 1;
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    std::vector<Share> shares_;  // one for each thread
    alignas(64) std::atomic<uint32_t> inside_{0};  // OPEN while the job takes helpers, plus the helpers inside
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

struct Shared {
    std::mutex turn;
    std::unique_ptr<Pool> pool;
};

// Never destroyed: workers may still sleep in it while the process exits.
Shared* shared = new Shared;

Pool& pool() {
    if (!shared->pool) {
#if defined(__unix__) || defined(__APPLE__)
        // A forked child has the caller's thread only: it starts over with an empty pool of its own.
        static const int registered = pthread_atfork(nullptr, nullptr, [] { shared = new Shared; });
        (void)registered;
#endif
        shared->pool = std::make_unique<Pool>(available_cores());
    }
    return *shared->pool;
}

}  // namespace

void parallel(int64_t count, int64_t piece, Task task, const void* job) {
    if (count <= piece) {
        if (count > 0) task(job, 0, count);
        return;
    }
    std::lock_guard<std::mutex> lock(shared->turn);
    pool().run(count, piece, task, job);
}

int threads() {
    std::lock_guard<std::mutex> lock(shared->turn);
    return pool().threads();
}

void set_threads(int count) {
    std::lock_guard<std::mutex> lock(shared->turn);
    if (pool().threads() == count) return;
    shared->pool.reset();
    shared->pool = std::make_unique<Pool>(count);
}

float* scratch(int64_t floats) {
    thread_local std::unique_ptr<float[]> buffer;
    thread_local int64_t size = 0;
    if (size < floats) {
        buffer.reset(new float[size_t(floats)]);
        size = floats;
    }
    return buffer.get();
}

}  // namespace bankfull
