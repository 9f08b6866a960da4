// A plan that was captured as a graph of kernels, and is launched again for other arrays without the interpreter: that of
// a whole program, or of a segment of it.
#ifndef FLAGOS_NATIVE_REPLAY_H_
#define FLAGOS_NATIVE_REPLAY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace flagos {

// Three captures of one plan, each with temporaries in memory of its own. In the second its arrays lay in other places than
// in the first: what differs is what depends on where. In the third they lay where they did in the first: what differs
// means nothing, as parts of a kernel's parameters that its library never wrote.
struct Captures {
  struct Array {
    uint64_t first, second;  // where it lay
    uint64_t bytes;
    // What stands in for another one says which: it was given to a transport by an address of its own, to be told whether
    // the graph has that address. A replay puts the other's there.
    size_t stands_for = kItself;
    static constexpr size_t kItself = SIZE_MAX;
  };
  struct Range {
    uint64_t begin, end;
  };
  // A node whose body, a graph too, runs as a byte of the device's memory says. All are the driver's.
  struct Conditional {
    uint64_t node;
    uint64_t handle;  // what the byte is set by: a parameter of kernels, another one in each capture
    uint64_t body;
  };
  struct Graph {
    uint64_t handle;                        // the driver's
    std::vector<Range> owned;               // where its temporaries are
    std::vector<Conditional> conditionals;  // in the order they were captured in, those inside others too

    bool Owns(uint64_t address) const noexcept {
      return std::any_of(owned.begin(), owned.end(),
                         [address](const Range& r) { return r.begin <= address && address < r.end; });
    }
  };
  Graph first, second, third;
  std::vector<Array> arrays;  // what stands in comes last
};

// Puts conditional nodes into what is captured. Streams are the driver's. Throws Failure.
class Conditionals {
 public:
  virtual ~Conditionals() = default;
  // A node that follows what was captured on `stream`, and is followed by what will be. Its body runs if the byte at
  // `flag` is not zero; it is captured on `inside` from now on. `repeats`: the body says whether it runs again.
  virtual Captures::Conditional Open(uint64_t stream, uint64_t flag, bool repeats, uint64_t inside) = 0;
  // Ends a body, whatever fails; one that repeats runs again if the byte at `flag` is not zero. No flag: 0.
  virtual void Close(uint64_t inside, uint64_t handle, uint64_t flag) = 0;
};

class Replay {
 public:
  virtual ~Replay() = default;
  // Enqueues the plan on the compute stream; `addresses` has one for each array. Throws Failure.
  virtual void Launch(void* const* addresses) = 0;
  // Gives the graph up: it is neither launched again nor looked at. Does not wait for what was launched, nor for a launch
  // that waits.
  virtual void Drop() noexcept = 0;
  virtual bool dropped() const noexcept = 0;
  // How many addresses it takes.
  virtual size_t arrays() const noexcept = 0;
  virtual size_t nodes() const noexcept = 0;
  // Addresses inside the graph that follow the arrays.
  virtual size_t patches() const noexcept = 0;
};

// What captures prove of every graph of their plan; needs them no longer.
class Proof {
 public:
  virtual ~Proof() = default;
  // A replay of one more capture, with arrays where those of the first lay and temporaries anywhere; or of the first. It
  // outlives the replay. Throws Failure(UNIMPLEMENTED) that says what in it is not as it must be.
  virtual std::unique_ptr<Replay> MakeReplay(const Captures::Graph& kept) const = 0;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_REPLAY_H_
