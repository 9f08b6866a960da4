// Programs that the Python side compiled and runs: flagos_backend.bridge.
#ifndef FLAGOS_NATIVE_PYTHON_PROGRAM_H_
#define FLAGOS_NATIVE_PYTHON_PROGRAM_H_

#include "program.h"

namespace flagos {

std::unique_ptr<Program> CompilePythonProgram(Context* context, const void* program, size_t size);
std::unique_ptr<Program> LoadPythonProgram(Context* context, const void* serialized, size_t size,
                                           const std::vector<int64_t>& assignment);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_PYTHON_PROGRAM_H_
