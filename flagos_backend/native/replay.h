// A plan that was captured as a graph of kernels, and is launched again for other arrays without the interpreter: that of
// a whole program, or of a segment of it.
#ifndef FLAGOS_NATIVE_REPLAY_H_
#define FLAGOS_NATIVE_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flagos {

// Three captures of one plan. In the second its arrays lay in other places than in the first: what differs is what
// depends on where. In the third they lay where they did in the first: what differs means nothing, as parts of a kernel's
// parameters that its library never wrote.
struct Captures {
  struct Array {
    uint64_t first, second;  // where it lay
    uint64_t bytes;
  };
  struct Range {
    uint64_t begin, end;
  };
  struct Graph {
    uint64_t handle;           // the driver's
    std::vector<Range> owned;  // memory of the capture's own, which stays: temporaries
  };
  Graph first, second, third;
  std::vector<Array> arrays;
};

class Replay {
 public:
  virtual ~Replay() = default;
  // Enqueues the plan on the compute stream; `addresses` has one for each array. Throws Failure.
  virtual void Launch(void* const* addresses) = 0;
  // How many addresses it takes.
  virtual size_t arrays() const noexcept = 0;
  virtual size_t nodes() const noexcept = 0;
  // Addresses inside the graph that follow the arrays.
  virtual size_t patches() const noexcept = 0;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_REPLAY_H_
