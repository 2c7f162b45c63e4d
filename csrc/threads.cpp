#include "threads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
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

// CPUs that this process may run on. Quotas and SMT are handled in Python (ops/native/cores.py), which sets the number
// before anything runs.
int usable_processors() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
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

// Two cache lines: CPUs prefetch them in pairs.
constexpr size_t APART = 128;

constexpr int64_t LINE = 64;
constexpr int64_t FETCHED = 256 << 10;  // maximum bytes prefetched per thread: a part of its L2

// What a thread prefetches while it waits: the start of its share of a coming job.
class Prefetcher {
  public:
    // For the same job as before, prefetched lines are not prefetched again.
    void begin(const Coming& coming, int64_t self, int64_t all) {
        if (coming.count == 0) return clear();
        if (coming.runs[0].data == job_) return;
        job_ = coming.runs[0].data;
        count_ = 0;
        int64_t units = 0;
        for (int i = 0; i < coming.count; ++i) units = coming.together ? coming.runs[0].units : units + coming.runs[i].units;
        const int64_t pieces = (units + coming.piece - 1) / coming.piece;
        int64_t first = pieces * self / all * coming.piece, last = std::min(units, pieces * (self + 1) / all * coming.piece);
        const int64_t most = coming.together ? FETCHED / coming.count : FETCHED;
        for (int i = 0; i < coming.count && first < last; ++i) {
            const auto [data, own, each] = coming.runs[i];
            const int64_t end = std::min(last, own);
            if (first < end && count_ < MOST) ranges_[count_++] = {data + first * each, std::min((end - first) * each, most)};
            if (!coming.together) first = std::max<int64_t>(first - own, 0), last -= own;
        }
    }
    void clear() { count_ = 0, job_ = nullptr; }
    bool done() const { return count_ == 0; }
    // A few more lines of every range in turn.
    void advance() {
        for (int i = 0; i < count_;) {
            Range& range = ranges_[i];
            for (int line = 0; line < 4 && range.left > 0; ++line, range.at += LINE, range.left -= LINE)
                __builtin_prefetch(range.at, 0, 2);
            if (range.left > 0)
                ++i;
            else
                range = ranges_[--count_];
        }
    }

  private:
    static constexpr int MOST = 2;
    struct Range {
        const uint8_t* at;
        int64_t left;
    };
    Range ranges_[MOST];
    int count_ = 0;
    const void* job_ = nullptr;
};

thread_local Coming coming_to_caller;

class Pool {
  public:
    // `usable`: number of CPUs.
    Pool(int threads, int usable) : shares_(size_t(threads)), patience_(threads > 4 && threads <= usable ? LONG : SHORT) {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
            turn_.fetch_add(1);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    int threads() const { return int(shares_.size()); }

    void run(int64_t count, int64_t piece, Task task, const void* job) {
        task_ = task;
        job_ = job;
        count_ = count;
        piece_ = piece;
        pieces_ = (count + piece - 1) / piece;
        if (coming_.count != coming_to_caller.count || coming_.runs[0].data != coming_to_caller.runs[0].data)
            coming_ = coming_to_caller;
        const uint32_t open = turn_.load(std::memory_order_relaxed) + 1;
        turn_.store(open);  // sequentially consistent with sleepers_: at least one side sees the other
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        work(0, open);
        turn_.store(open + 1);
        prefetcher_.begin(coming_, 0, threads());
        for (size_t i = 1; i < shares_.size(); ++i) wait_for(shares_[i]);
    }

  private:
    // How long a worker spins. The host takes some hundred microseconds between two steps, and a millisecond with many
    // requests; waking many threads takes as long as a step. On few CPUs, others need them meanwhile.
    static constexpr std::chrono::microseconds SHORT{300}, LONG{2000};
    static constexpr std::chrono::microseconds ALONE{50};  // ... and without yielding its CPU
    static constexpr int SPINS = 2000;  // some tens of microseconds: the rest of another thread's piece

    // A thread's cache line: the pieces taken from its share, and whether it is working.
    struct alignas(APART) Share {
        std::atomic<uint64_t> taken{0};  // turn in the upper half, taken pieces in the lower; for another turn: none yet
        alignas(APART) std::atomic<bool> inside{false};
    };

    void wait_for(const Share& share) {
        for (int spins = 0; share.inside.load(std::memory_order_acquire); ++spins) {
            if (!prefetcher_.done())
                prefetcher_.advance();
            else if (spins < SPINS)
                relax();
            else
                std::this_thread::yield();
        }
    }

    // The next piece of a share, as an index in the share; -1 if all are taken.
    static int64_t take(Share& share, uint32_t turn, int64_t pieces) {
        uint64_t seen = share.taken.load(std::memory_order_relaxed);
        for (;;) {
            const int64_t next = seen >> 32 == turn ? int64_t(seen & 0xffffffff) : 0;
            if (next >= pieces) return -1;
            if (share.taken.compare_exchange_weak(seen, uint64_t(turn) << 32 | uint64_t(next + 1),
                                                  std::memory_order_relaxed))
                return next;
        }
    }

    // A worker takes its own share first, then what others have left: the thread that wrote some rows is likely to read
    // them again, and has them in its cache.
    void work(int64_t self, uint32_t turn) {
        const int64_t all = threads();
        for (int64_t i = 0; i < all; ++i) {
            const int64_t owner = self + i < all ? self + i : self + i - all;
            const int64_t first = pieces_ * owner / all, pieces = pieces_ * (owner + 1) / all - first;
            if (pieces == 0) continue;
            for (int64_t next; (next = take(shares_[size_t(owner)], turn, pieces)) >= 0;) {
                const int64_t begin = (first + next) * piece_;
                task_(job_, begin, std::min(begin + piece_, count_));
            }
        }
    }

    static bool is_new(uint32_t turn, uint32_t done) { return (turn & 1) != 0 && turn != done; }

    // Whether a new job arrives within the time that a host takes between two steps.
    bool soon(uint32_t done, bool woken, Prefetcher& prefetcher) const {
        const auto begun = std::chrono::steady_clock::now();
        auto now = begun;
        do {
            // The caller may need this CPU: a woken thread runs instead of another one.
            if (woken || now > begun + ALONE) std::this_thread::yield();
            for (int spins = 0; spins < 64; ++spins) {
                if (is_new(turn_.load(std::memory_order_acquire), done)) return true;
                if (prefetcher.done())
                    relax();
                else
                    prefetcher.advance();
            }
            now = std::chrono::steady_clock::now();
        } while (now < begun + patience_);
        return is_new(turn_.load(), done);
    }

    // A job's fields may be read only while `inside` is set and the turn was open after that: the caller closes the
    // turn before it reads `inside`, and changes the fields only once all workers are outside.
    void serve(int self) {
        Share& own = shares_[size_t(self)];
        Prefetcher prefetcher;
        uint32_t done = 0;
        bool woken = false;
        for (;;) {
            woken = !soon(done, woken, prefetcher);
            if (woken) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, [&] { return is_new(turn_.load(), done); });
                sleepers_.fetch_sub(1);
            }
            if (stop_.load()) return;
            own.inside.store(true);
            const uint32_t turn = turn_.load();
            if (turn & 1) {
                work(self, turn);
                prefetcher.begin(coming_, self, threads());
                done = turn;
            }
            own.inside.store(false, std::memory_order_release);
        }
    }

    // The job. No thread writes these while others read them.
    alignas(APART) Task task_ = nullptr;
    const void* job_ = nullptr;
    int64_t count_ = 0, piece_ = 1, pieces_ = 0;
    Coming coming_;
    Prefetcher prefetcher_;  // the caller's
    std::vector<Share> shares_;  // one per thread
    const std::chrono::microseconds patience_;
    alignas(APART) std::atomic<uint32_t> turn_{0};  // odd while a job accepts helpers
    alignas(APART) std::atomic<int> sleepers_{0};
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
std::atomic<int> wanted{0};  // threads; 0: not set

int usable() {
    static const int count = usable_processors();
    return count;
}

int count_of_threads() {
    const int count = wanted.load();
    return count ? count : usable();
}

Pool& pool() {
    const int count = count_of_threads();
    if (!shared->pool || shared->pool->threads() != count) {
#if defined(__unix__) || defined(__APPLE__)
        // A forked child has only the caller's thread: it starts over with its own empty pool.
        static const int registered = pthread_atfork(nullptr, nullptr, [] { shared = new Shared; });
        (void)registered;
#endif
        shared->pool.reset();
        shared->pool = std::make_unique<Pool>(count, usable());
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
    pool().run(count, std::max(piece, count >> 31), task, job);
}

int threads() { return count_of_threads(); }

void set_threads(int count) { wanted.store(count); }

void announce(const Coming& coming) { coming_to_caller = coming; }

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
