// Loops of the shared pool from several threads at once: of all sizes, with pauses that let its threads fall asleep or
// not, and loops inside loops. Prints how many elements were not visited exactly once. With "apart", on the first two
// of its processors: from how many of them the caller does not get rid of the pool's thread, once that is stuck there.

#include "cpu/thread_pool.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace {

using flagos::cpu::ThreadPool;

struct Loop {
  std::vector<std::atomic<int>> visits;
  bool nests, lingers;
};

void Visit(void* user, int64_t begin, int64_t end) {
  Loop& loop = *static_cast<Loop*>(user);
  if (loop.lingers && begin == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  for (int64_t i = begin; i < end; ++i) loop.visits[static_cast<size_t>(i)].fetch_add(1);
  if (!loop.nests) return;
  Loop inner{std::vector<std::atomic<int>>(64), false, false};
  ThreadPool::Shared().ParallelFor(64, 1, Visit, &inner);
  for (const std::atomic<int>& visits : inner.visits) {
    if (visits != 1) loop.visits[static_cast<size_t>(begin)].fetch_add(100);
  }
}

int64_t Wrong(unsigned seed, int loops) {
  std::mt19937 random(seed);
  const auto below = [&](unsigned bound) { return random() % bound; };
  int64_t wrong = 0;
  for (int i = 0; i < loops; ++i) {
    const size_t count = below(8) == 0 ? below(3) : below(3000);
    Loop loop{std::vector<std::atomic<int>>(count), below(4) == 0, below(20) == 0};
    ThreadPool::Shared().ParallelFor(static_cast<int64_t>(count), 1 + below(200), Visit, &loop);
    for (const std::atomic<int>& visits : loop.visits) wrong += visits != 1;
    if (below(50) == 0) std::this_thread::sleep_for(std::chrono::microseconds(below(200)));
  }
  return wrong;
}

struct Parts {
  const std::thread::id caller = std::this_thread::get_id();
  cpu_set_t callers;
  std::atomic<int> stuck{0}, freed{0};
};

// The pool's thread binds itself to the caller's processor, where it can come in time only by chance.
void Stick(void* user, int64_t, int64_t) {
  Parts& parts = *static_cast<Parts*>(user);
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(10);
  while (std::chrono::steady_clock::now() < end) {
  }
  if (std::this_thread::get_id() == parts.caller) return;
  cpu_set_t mine;
  if (sched_getaffinity(0, sizeof mine, &mine) != 0) std::abort();
  if (parts.stuck == 0) {
    if (sched_setaffinity(0, sizeof parts.callers, &parts.callers) != 0) std::abort();
    ++parts.stuck;
  } else if (CPU_COUNT(&mine) > 1) {
    ++parts.freed;
  }
}

// From each of the caller's processors in turn: how many of them the pool's thread stayed on.
int Apart() {
  cpu_set_t all;
  if (sched_getaffinity(0, sizeof all, &all) != 0) std::abort();
  for (int processor = 0, found = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &all) && ++found > 2) CPU_CLR(processor, &all);
  }
  if (sched_setaffinity(0, sizeof all, &all) != 0) std::abort();
  ThreadPool& pool = ThreadPool::Shared();
  int stayed = 0;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (!CPU_ISSET(processor, &all)) continue;
    Parts parts;
    CPU_ZERO(&parts.callers);
    CPU_SET(processor, &parts.callers);
    if (sched_setaffinity(0, sizeof parts.callers, &parts.callers) != 0) std::abort();
    for (int i = 0; i < 20000 && parts.freed == 0; ++i) pool.ParallelFor(8, 1, Stick, &parts);
    stayed += parts.freed == 0;
  }
  std::printf("%d\n", stayed);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "apart") == 0) {
    const int status = Apart();
    std::fflush(stdout);
    std::_Exit(status);
  }
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 0;
  std::atomic<int64_t> wrong{Wrong(seed, 2000)};
  std::vector<std::thread> callers;
  for (unsigned i = 1; i <= 3; ++i) callers.emplace_back([&wrong, seed, i] { wrong += Wrong(seed + i, 2000); });
  for (std::thread& caller : callers) caller.join();
  std::printf("%lld\n", static_cast<long long>(wrong.load()));
  std::fflush(stdout);
  std::_Exit(0);  // the pool's threads remain
}
