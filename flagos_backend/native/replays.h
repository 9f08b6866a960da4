// The replays of one program, one for each accelerator it runs on: made after its first runs, launched without the GIL.
#ifndef FLAGOS_NATIVE_REPLAYS_H_
#define FLAGOS_NATIVE_REPLAYS_H_

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "program.h"
#include "python.h"
#include "replay.h"

namespace flagos {

// A program on one accelerator, from its captures on without the interpreter.
struct Replayed {
  std::unique_ptr<Replay> replay;
  PyObject* kept = nullptr;  // the graph, and the memory of its temporaries
  // For each output, the argument that it is written over, or -1.
  std::vector<int64_t> overwritten;
  ~Replayed();
};

class Replays {
 public:
  // Both outlive this object. `runner`: of runtime/bridge.py.
  Replays(const ProgramInfo& info, PyObject* const& runner) : info_(info), runner_(runner) {}

  bool Has(const Device& device);
  // NULL: this launch goes through the interpreter. `in_place`: the arguments that the program uses up are its alone.
  std::shared_ptr<Replayed> Find(const Place& place, const std::vector<Argument>& arguments, bool in_place);
  std::vector<Ref<Block>> Run(Replayed& replayed, const Place& place, std::vector<Argument>& arguments,
                              const std::vector<Memory*>& memories) const;
  // Counts a run through the interpreter; after some of them captures the program, if it can be.
  void Ran(const Place& place);

 private:
  void Capture(const Place& place);

  const ProgramInfo& info_;
  PyObject* const& runner_;
  std::mutex mutex_;
  std::unordered_map<int64_t, int> runs_;  // by device id
  std::unordered_map<int64_t, std::shared_ptr<Replayed>> replayed_;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_REPLAYS_H_
