// A program that was captured as a graph of kernels, and is launched again for other arrays without the interpreter.
#ifndef FLAGOS_NATIVE_REPLAY_H_
#define FLAGOS_NATIVE_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flagos {

// Two captures of one program whose arrays lay in different places: what differs between them is what depends on where.
struct Captures {
  struct Array {
    uint64_t first, second;  // where it lay
    uint64_t bytes;
  };
  struct Range {
    uint64_t begin, end;
  };
  uint64_t first_graph, second_graph;  // the driver's handles
  std::vector<Array> arrays;
  // Memory of the captures' own, which stays: temporaries.
  std::vector<Range> first_owned, second_owned;
};

class Replay {
 public:
  virtual ~Replay() = default;
  // Enqueues the program on the compute stream; `addresses` has one for each array. Throws Failure.
  virtual void Launch(void* const* addresses) = 0;
  virtual size_t nodes() const noexcept = 0;
  // Addresses inside the graph that follow the arrays.
  virtual size_t patches() const noexcept = 0;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_REPLAY_H_
