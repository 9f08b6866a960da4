// Loops of the shared pool from several threads at once: of all sizes, with pauses that let its threads fall asleep or
// not, and loops inside loops. Prints how many elements were not visited exactly once.

#include "cpu/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
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

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 0;
  std::atomic<int64_t> wrong{Wrong(seed, 2000)};
  std::vector<std::thread> callers;
  for (unsigned i = 1; i <= 3; ++i) callers.emplace_back([&wrong, seed, i] { wrong += Wrong(seed + i, 2000); });
  for (std::thread& caller : callers) caller.join();
  std::printf("%lld\n", static_cast<long long>(wrong.load()));
  std::fflush(stdout);
  std::_Exit(0);  // the pool's threads remain
}
