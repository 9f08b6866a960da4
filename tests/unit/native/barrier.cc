// Shares of launches, each a thread, that come to a barrier again and again and say yes or not; in every other launch
// one of them fails on the way. Prints how many answers were wrong, and how many shares went on without the others.

#include "barrier.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

namespace {

using flagos::Barrier;
using flagos::Status;

struct Launch {
  explicit Launch(size_t shares, int generations) : barrier(shares), came(static_cast<size_t>(generations)) {}
  Barrier barrier;
  std::vector<std::atomic<size_t>> came;
};

// Whether all say yes in a generation follows from the generation and the launch.
bool Says(unsigned seed, int generation, size_t share, size_t shares) {
  const unsigned mixed = (seed ^ static_cast<unsigned>(generation)) * 2654435761u;
  return mixed % 3 != 0 || mixed / 3 % shares != share;
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937 random(argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 0);
  std::atomic<int> wrong{0}, alone{0};
  for (int number = 0; number < 300; ++number) {
    const size_t shares = 1 + random() % 5;
    const int generations = 20, fails_at = number % 2 == 0 ? generations : static_cast<int>(random() % generations);
    const unsigned seed = static_cast<unsigned>(random());
    Launch launch(shares, generations);
    std::atomic<int> ended_at[5] = {};
    std::vector<std::thread> threads;
    for (size_t share = 0; share < shares; ++share) {
      threads.emplace_back([&, share] {
        int generation = 0;
        try {
          for (; generation < generations; ++generation) {
            if (share == 0 && generation == fails_at) {
              launch.barrier.Abort(Status(FLAGOS_INTERNAL, "as it should"));
              break;
            }
            launch.came[static_cast<size_t>(generation)] += 1;
            bool expected = true;
            for (size_t other = 0; other < shares; ++other) expected &= Says(seed, generation, other, shares);
            wrong += launch.barrier.All(Says(seed, generation, share, shares)) != expected;
            alone += launch.came[static_cast<size_t>(generation)] != shares;
          }
        } catch (const flagos::Failure& failure) {
          wrong += failure.status().code() != FLAGOS_INTERNAL;
        }
        ended_at[share] = generation;
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t share = 0; share < shares; ++share) wrong += ended_at[share] != fails_at;
  }
  std::printf("%d %d\n", wrong.load(), alone.load());
  return 0;
}
