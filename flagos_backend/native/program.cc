#include "program.h"

#ifdef FLAGOS_TEST_PROGRAMS
#include "testing/test_program.h"
#endif
#include "python_program.h"

namespace flagos {
namespace {

thread_local DeviceQueue* t_queue = nullptr;

}  // namespace

std::unique_ptr<Program> CompileProgram(Context* context, const void* program, size_t size) {
#ifdef FLAGOS_TEST_PROGRAMS
  if (auto test = testing::CompileTestProgram(program, size)) return test;
#endif
  return CompilePythonProgram(context, program, size);
}

std::unique_ptr<Program> LoadProgram(Context* context, const void* serialized, size_t size,
                                     const std::vector<int64_t>& assignment) {
  return LoadPythonProgram(context, serialized, size, assignment);
}

DeviceQueue* CurrentQueue() noexcept { return t_queue; }

QueueScope::QueueScope(DeviceQueue* queue) noexcept : outer_(std::exchange(t_queue, queue)) {}

QueueScope::~QueueScope() { t_queue = outer_; }

}  // namespace flagos
