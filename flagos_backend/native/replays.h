// The replays of one program as a whole, one for each accelerator it runs on: made after its first runs, launched
// without the GIL, which only those take that say what they enqueued: in which devices meet. A program that can only be
// replayed in parts is run by the interpreter, which launches those.
#ifndef FLAGOS_NATIVE_REPLAYS_H_
#define FLAGOS_NATIVE_REPLAYS_H_

#include <chrono>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "barrier.h"
#include "program.h"
#include "python.h"
#include "replay.h"

namespace flagos {

// A program on one accelerator, from its captures on without its plan.
struct Replayed {
  Replay* replay = nullptr;
  PyObject* kept = nullptr;  // owns the replay, the graph, and the memory of its temporaries
  // For each output, the argument that it is written over, or -1.
  std::vector<int64_t> overwritten;
  // Until then who watches over the device knows that something is launched. Of the device's thread.
  std::chrono::steady_clock::time_point watched_until{};
  ~Replayed();
};

class Replays {
 public:
  // Both outlive this object. `runner`: of bridge.py.
  Replays(const ProgramInfo& info, PyObject* const& runner) : info_(info), runner_(runner) {}

  bool Has(const Device& device);
  // NULL: this launch goes through the interpreter. `in_place`: the arguments that the program uses up are its alone.
  std::shared_ptr<Replayed> Find(const Place& place, const std::vector<Argument>& arguments, bool in_place);
  // What one launch reads and writes. `copies`: used again once the replay is enqueued, and written behind it.
  struct Arrays {
    std::vector<void*> addresses;
    std::vector<Ref<Block>> results, copies;
  };
  // All that asks for memory.
  Arrays Prepare(const Replayed& replayed, const Place& place, std::vector<Argument>& arguments,
                 const std::vector<Memory*>& memories) const;
  // Whether it launched: nothing, where `replayed` is NULL.
  bool Launch(Replayed* replayed, const Arrays& arrays) const;
  // The same of a launch in whose replays the devices meet: all of them do, or none.
  bool LaunchTogether(Replayed* replayed, const Place& place, const Arrays& arrays, Barrier& barrier) const;
  // Counts a run through the interpreter; after some of them has the program captured, whole or in parts.
  void Ran(const Place& place);

 private:
  void Watch(Replayed& replayed, const Place& place) const;
  void Capture(const Place& place);
  void Keep(const Place& place, python::Reader& reader);

  const ProgramInfo& info_;
  PyObject* const& runner_;
  std::mutex mutex_;
  std::unordered_map<int64_t, int> runs_;  // by device id
  std::unordered_map<int64_t, std::shared_ptr<Replayed>> replayed_;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_REPLAYS_H_
