// Reads what bridge.py says of a compiled program.
#ifndef FLAGOS_NATIVE_DESCRIPTION_H_
#define FLAGOS_NATIVE_DESCRIPTION_H_

#include <optional>
#include <string>
#include <vector>

#include "collective.h"
#include "program.h"
#include "python.h"

namespace flagos {

// The native form of a program, if it has one.
struct NativeForm {
  std::string bytecode;  // empty: none
  std::string constants;
  struct Call {
    std::vector<Shape> operands, results;
    std::optional<Collective> collective;  // what devices of this process do in its place
  };
  std::vector<Call> calls;
  std::vector<int64_t> functions;  // addresses of machine code, which the bridge keeps as long as the program
  std::vector<int64_t> lapack;     // addresses of LAPACK's routines, where it calls any

  NativeForm() = default;
  // `devices`: of a launch.
  NativeForm(python::Reader reader, int64_t devices);
};

std::vector<int64_t> ReadIntegers(python::Reader reader);
// The order is that of CompiledProgram.describe in bridge.py. Throws Failure(INTERNAL) for what contradicts itself.
ProgramInfo ReadInfo(python::Reader& reader);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_DESCRIPTION_H_
