// Reads cases from stdin and says what each comparison comes to. A case: arrays, then memory of each capture's own, then
// the handles of conditional nodes, then the words of a node; each a count, then rows of numbers. Of the four captures
// three are compared, and the fourth is the one that is kept.

#include "cuda/comparison.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/verification.h"
#include "error.h"

namespace {

bool Read(uint64_t* value) { return std::scanf("%" SCNx64, value) == 1; }

uint64_t Next() {
  uint64_t value = 0;
  if (!Read(&value)) std::abort();
  return value;
}

}  // namespace

int main() {
  for (uint64_t arrays = 0; Read(&arrays);) {
    flagos::Captures captures;
    flagos::Captures::Graph kept;
    for (uint64_t i = 0; i < arrays; ++i) {
      const uint64_t first = Next(), second = Next();
      captures.arrays.push_back({first, second, Next()});
    }
    for (flagos::Captures::Graph* graph : {&captures.first, &captures.second, &captures.third, &kept}) {
      for (uint64_t i = Next(); i > 0; --i) {
        const uint64_t begin = Next();
        graph->owned.push_back({begin, Next()});
      }
    }
    for (uint64_t i = Next(); i > 0; --i) {
      for (flagos::Captures::Graph* graph : {&captures.first, &captures.second, &captures.third, &kept}) {
        graph->conditionals.push_back({0, Next(), 0});
      }
    }
    std::vector<uint64_t> first, second, third, fourth;
    for (uint64_t i = Next(); i > 0; --i) {
      first.push_back(Next());
      second.push_back(Next());
      third.push_back(Next());
      fourth.push_back(Next());
    }
    // A word that is given as 1 stands for an address of this thread's stack, a different one in each capture; as 17
    // for the same one in all; as 2 for the number 2 beside the upper half of one, in the second capture of one of the
    // program.
    uint64_t on_stack[2] = {0, 0};
    static uint64_t global = 0;
    const auto stands_for = [&on_stack](uint64_t& word, const uint64_t* address, const uint64_t* other) {
      if (word == 1) word = reinterpret_cast<uint64_t>(address);
      if (word == 17) word = reinterpret_cast<uint64_t>(&on_stack[0]);
      if (word == 2) word = reinterpret_cast<uint64_t>(other) >> 32 << 32 | 2;
    };
    for (uint64_t& word : first) stands_for(word, &on_stack[0], &on_stack[0]);
    for (uint64_t& word : second) stands_for(word, &on_stack[1], &global);
    for (uint64_t& word : third) stands_for(word, &on_stack[0], &on_stack[0]);
    for (uint64_t& word : fourth) stands_for(word, &on_stack[1], &on_stack[1]);
    std::vector<flagos::cuda::Known> known;
    std::vector<flagos::cuda::Patch> patches;
    const auto bytes = [](std::vector<uint64_t>& words) { return reinterpret_cast<unsigned char*>(words.data()); };
    const size_t size = first.size() * sizeof(uint64_t);
    try {
      flagos::cuda::Comparison(captures).Compare({bytes(first), bytes(second), bytes(third), size}, "a word", 7, known);
      flagos::cuda::Verification(kept, captures.arrays).Check(bytes(fourth), size, known.data(), "a word", 7, patches);
      for (const flagos::cuda::Patch& patch : patches) {
        std::printf("%zu+%" PRIx64 "@%td ", patch.array, patch.offset, patch.place - fourth.data());
      }
      std::printf("\n");
    } catch (const flagos::Failure& failure) {
      std::printf("refused: %s\n", failure.what());
    }
  }
  return 0;
}
