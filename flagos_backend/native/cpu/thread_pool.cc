#include "cpu/thread_pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>

namespace flagos::cpu {
namespace {

int NumProcessors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<ThreadPool*> shared_pool{nullptr};

// Of GCC's OpenMP: runs fn(data) on that many threads, the caller's among them; 0 is what the caller's thread has set.
using ParallelRegion = void (*)(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags);
std::atomic<bool> forked{false};
thread_local bool t_open_mp = false;

// What torch's operators share their loops with; nullptr where it is another OpenMP, or in a forked child, in which that
// one would wait for threads that are not there.
ParallelRegion FindOpenMp() {
  if (forked.load(std::memory_order_relaxed)) return nullptr;
  static const ParallelRegion found = [] {
    void* library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<ParallelRegion>(library == nullptr ? nullptr : dlsym(library, "GOMP_parallel"));
  }();
  return found;
}

// A forked child has none of the threads: it makes a pool of its own at first use.
void ForgetPool() {
  shared_pool.store(nullptr, std::memory_order_release);
  forked.store(true, std::memory_order_relaxed);
}

}  // namespace

ThreadPool& ThreadPool::Shared() {
  ThreadPool* pool = shared_pool.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  static std::mutex* const making = [] {
    pthread_atfork(nullptr, nullptr, &ForgetPool);
    return new std::mutex;
  }();
  std::lock_guard<std::mutex> lock(*making);
  pool = shared_pool.load(std::memory_order_acquire);
  if (pool == nullptr) {
    pool = new ThreadPool(NumProcessors());
    shared_pool.store(pool, std::memory_order_release);
  }
  return *pool;
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { Work(); });
}

void ThreadPool::TakeChunks() {
  for (;;) {
    const int64_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
    if (begin >= count_) return;
    body_(user_, begin, std::min(begin + chunk_, count_));
  }
}

void ThreadPool::Work() {
  uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
    }
    TakeChunks();
    std::lock_guard<std::mutex> lock(mutex_);
    if (--active_ == 0) done_.notify_one();
  }
}

void ThreadPool::ParallelFor(int64_t count, int64_t grain, Body body, void* user) {
  if (count <= 0) return;
  std::unique_lock<std::mutex> busy(busy_, std::defer_lock);
  if (num_threads_ == 1 || count <= grain || !busy.try_lock()) {
    body(user, 0, count);
    return;
  }
  const ParallelRegion open_mp = t_open_mp ? FindOpenMp() : nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    body_ = body;
    user_ = user;
    count_ = count;
    // Four chunks a thread: enough to even out, few enough to cost nothing.
    chunk_ = std::max(grain, (count + num_threads_ * 4 - 1) / (num_threads_ * 4));
    next_.store(0, std::memory_order_relaxed);
    if (open_mp == nullptr) {
      active_ = num_threads_ - 1;
      ++generation_;
    }
  }
  if (open_mp != nullptr) {
    // As many threads as torch's operators take: a team of another size would be made anew at each change between them.
    open_mp([](void* pool) { static_cast<ThreadPool*>(pool)->TakeChunks(); }, this, /*num_threads=*/0, 0);
    return;
  }
  start_.notify_all();
  TakeChunks();
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return active_ == 0; });
}

OpenMpScope::OpenMpScope(bool wanted) : before_(t_open_mp) { t_open_mp = before_ || wanted; }

OpenMpScope::~OpenMpScope() { t_open_mp = before_; }

}  // namespace flagos::cpu
