#include "cpu/thread_pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>

#include "spin.h"

namespace flagos::cpu {
namespace {

// Parts of ThreadPool::loop_, from the low bits up: threads inside, open or not, number.
constexpr uint64_t kInside = 1, kOpen = uint64_t{1} << 16, kNumber = uint64_t{1} << 17;
uint64_t NumberOf(uint64_t loop) { return loop / kNumber; }
bool IsEmpty(uint64_t loop) { return loop % kOpen == 0; }

// How long a thread looks for what it waits for before it sleeps: waking it takes about as long, and the loops of a
// program follow one another sooner.
constexpr std::chrono::microseconds kPatience{50};

// Those that the process might run on when this was first asked; none where the system does not say.
const cpu_set_t& Processors() {
  static const cpu_set_t found = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_ZERO(&set);
    return set;
  }();
  return found;
}

int NumProcessors() {
  const int count = CPU_COUNT(&Processors());
  return count > 0 ? count : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// Of more threads, one beside the caller is no great loss.
constexpr int kMostSentAway = 8;

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
  for (uint64_t seen = 0;;) {
    seen = AwaitLoopAfter(seen);
    if (!Enter(seen)) continue;
    TakeChunks();
    Leave();
  }
}

uint64_t ThreadPool::AwaitLoopAfter(uint64_t number) {
  const auto is_there = [&] { return NumberOf(loop_.load()) != number; };
  if (!ComesSoon(is_there, kPatience)) {
    std::unique_lock<std::mutex> lock(mutex_);
    ++asleep_;  // before the look at the loop, as OpenLoop looks at this after it
    start_.wait(lock, is_there);
    --asleep_;
  }
  return NumberOf(loop_.load());
}

bool ThreadPool::Enter(uint64_t number) {
  uint64_t loop = loop_.load();
  while ((loop & kOpen) != 0 && NumberOf(loop) == number) {
    if (!loop_.compare_exchange_weak(loop, loop + kInside)) continue;
    came_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  return false;
}

void ThreadPool::Leave() {
  if (!IsEmpty(loop_.fetch_sub(kInside) - kInside) || !caller_waits_.load()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  done_.notify_one();
}

// A thread that the system wakes, or leaves, where the caller runs comes when the loop is over, and may stay there for as
// long as the two take turns. It is sent away, and may then run anywhere again.
void ThreadPool::SendAway() {
  const int processor = sched_getcpu();
  cpu_set_t others = Processors();
  if (processor < 0 || processor >= CPU_SETSIZE) return;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others) == 0) return;
  for (std::thread& thread : threads_) {
    pthread_setaffinity_np(thread.native_handle(), sizeof others, &others);
    pthread_setaffinity_np(thread.native_handle(), sizeof others, &Processors());
  }
}

// Loops may also be too short, or too far apart, for anybody to come in time: there it is tried ever more rarely.
void ThreadPool::NoteWhoCame() {
  const uint32_t came = came_.load(std::memory_order_relaxed);
  if (came != seen_come_ || num_threads_ > kMostSentAway) {
    seen_come_ = came;
    missed_ = 0;
    patience_ = kFewestMissed;
  } else if (++missed_ == patience_) {
    SendAway();
    missed_ = 0;
    patience_ = std::min(2 * patience_, kMostMissed);
  }
}

void ThreadPool::OpenLoop() {
  loop_.store((NumberOf(loop_.load()) + 1) * kNumber + kOpen);
  if (asleep_.load() == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  start_.notify_all();
}

void ThreadPool::CloseLoop() {
  loop_.fetch_and(~kOpen);
  const auto is_empty = [&] { return IsEmpty(loop_.load()); };
  if (ComesSoon(is_empty, kPatience)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  caller_waits_.store(true);  // before the look at the loop, as Leave looks at this after it
  done_.wait(lock, is_empty);
  caller_waits_.store(false);
}

void ThreadPool::ParallelFor(int64_t count, int64_t grain, Body body, void* user) {
  if (count <= 0) return;
  std::unique_lock<std::mutex> busy(busy_, std::defer_lock);
  if (num_threads_ == 1 || count <= grain || !busy.try_lock()) {
    body(user, 0, count);
    return;
  }
  body_ = body;
  user_ = user;
  count_ = count;
  // Four chunks a thread: enough to even out, few enough to cost nothing.
  chunk_ = std::max(grain, (count + num_threads_ * 4 - 1) / (num_threads_ * 4));
  next_.store(0, std::memory_order_relaxed);
  if (const ParallelRegion open_mp = t_open_mp ? FindOpenMp() : nullptr; open_mp != nullptr) {
    // As many threads as torch's operators take: a team of another size would be made anew at each change between them.
    open_mp([](void* pool) { static_cast<ThreadPool*>(pool)->TakeChunks(); }, this, /*num_threads=*/0, 0);
    return;
  }
  OpenLoop();
  TakeChunks();
  CloseLoop();
  NoteWhoCame();
}

OpenMpScope::OpenMpScope(bool wanted) : before_(t_open_mp) { t_open_mp = before_ || wanted; }

OpenMpScope::~OpenMpScope() { t_open_mp = before_; }

}  // namespace flagos::cpu
