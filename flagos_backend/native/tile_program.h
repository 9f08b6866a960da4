// Programs that run as native tiles (cpu/) without the GIL; the Python program they were made from makes their library
// calls, by which the devices of a launch meet as well.
#ifndef FLAGOS_NATIVE_TILE_PROGRAM_H_
#define FLAGOS_NATIVE_TILE_PROGRAM_H_

#include <memory>
#include <string>
#include <vector>

#include "cpu/native_program.h"
#include "program.h"

namespace flagos {

// Makes a native program's library calls.
class LibraryCaller {
 public:
  virtual ~LibraryCaller() = default;
  // On behalf of one share of a launch; `state` as for Program::Run. Reads arrays at `sources`, fills those at `targets`.
  // Where a target is null it becomes the address of a block in the device's memory that joins `allocated`. Drops
  // `done`, blocks of earlier calls, for which it has the interpreter at hand. Throws Failure.
  virtual void CallLibrary(const Place& place, LaunchState* state, int64_t number, void* const* sources, void** targets,
                           std::vector<Ref<Block>>& allocated, std::vector<Ref<Block>>& done) = 0;
  // Drops blocks that calls allocated, with the interpreter; without it they would only be noted to be dropped.
  virtual void Drop(std::vector<Ref<Block>>& blocks) noexcept = 0;
};

// `bytecode` and `constants` as codegen/cpu/emitter.py wrote them; `functions`: the addresses of its machine code;
// `caller` is part of `python`. Throws Failure.
std::unique_ptr<Program> MakeTileProgram(std::unique_ptr<Program> python, LibraryCaller* caller,
                                         const std::string& bytecode, const std::string& constants,
                                         const std::vector<int64_t>& functions);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_TILE_PROGRAM_H_
