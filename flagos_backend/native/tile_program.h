// Programs that run as native tiles (cpu/) without the GIL; the Python program they were made from makes their library
// calls, and runs them where several devices take part.
#ifndef FLAGOS_NATIVE_TILE_PROGRAM_H_
#define FLAGOS_NATIVE_TILE_PROGRAM_H_

#include <memory>

#include "cpu/native_program.h"
#include "program.h"

namespace flagos {

// Makes a native program's library calls.
class LibraryCaller {
 public:
  virtual ~LibraryCaller() = default;
  // Reads arrays at `sources`, fills those at `targets`. Throws Failure.
  virtual void CallLibrary(int64_t number, void* const* sources, void* const* targets) = 0;
};

// `words` and `constants` as codegen/native.py wrote them; `caller` is part of `python`. Throws Failure.
std::unique_ptr<Program> MakeTileProgram(std::unique_ptr<Program> python, LibraryCaller* caller,
                                         const std::string& words, const std::string& constants);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_TILE_PROGRAM_H_
