// A fixed set of threads that share one loop at a time. The caller works too; nested or concurrent loops run alone.
#ifndef FLAGOS_NATIVE_CPU_THREAD_POOL_H_
#define FLAGOS_NATIVE_CPU_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace flagos::cpu {

class ThreadPool {
 public:
  // Runs body(user, begin, end) over disjoint ranges that cover [0, count); returns when all are done.
  using Body = void (*)(void* user, int64_t begin, int64_t end);

  // The process's pool: one thread for each processor it may run on, made at first use and never destroyed, because
  // work may still run while the process exits.
  static ThreadPool& Shared();

  int num_threads() const { return num_threads_; }

  void ParallelFor(int64_t count, int64_t grain, Body body, void* user);

 private:
  explicit ThreadPool(int num_threads);
  void Work();
  uint64_t AwaitLoopAfter(uint64_t number);
  bool Enter(uint64_t number);
  void Leave();
  void TakeChunks();
  void OpenLoop();
  void CloseLoop();
  void SendAway();
  void NoteWhoCame();

  const int num_threads_;
  std::vector<std::thread> threads_;
  std::mutex busy_;  // held by the one loop in progress
  // The number of the last loop, whether it takes more threads, and how many of the pool's are in it: kNumber, kOpen and
  // kInside of thread_pool.cc. A thread that comes late finds it closed, and nobody waits for that.
  std::atomic<uint64_t> loop_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> caller_waits_{false};
  std::mutex mutex_;
  std::condition_variable start_, done_;
  // What the threads in the loop do; changes while it is closed and none is in it.
  Body body_ = nullptr;
  void* user_ = nullptr;
  int64_t count_ = 0, chunk_ = 0;
  std::atomic<int64_t> next_{0};
  // How often one of the pool's threads came in time for a loop, and what the caller knows of it: how many loops in a row
  // it has been alone in, and after how many it sends the others away from its processor.
  static constexpr int kFewestMissed = 8, kMostMissed = 8192;
  std::atomic<uint32_t> came_{0};
  uint32_t seen_come_ = 0;
  int missed_ = 0, patience_ = kFewestMissed;
};

// While one lives, loops of this thread run on the OpenMP threads that PyTorch's operators use from it. After an operator
// these spin for a while, and would take the processors from a pool beside them.
class OpenMpScope {
 public:
  explicit OpenMpScope(bool wanted);
  ~OpenMpScope();
  OpenMpScope(const OpenMpScope&) = delete;
  OpenMpScope& operator=(const OpenMpScope&) = delete;

 private:
  const bool before_;
};

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_THREAD_POOL_H_
