// Programs made of C++ for the stress tests: under a thread sanitizer CPython's own locks would drown everything else.
// Only in builds with FLAGOS_TEST_PROGRAMS.
#ifndef FLAGOS_NATIVE_TESTING_TEST_PROGRAM_H_
#define FLAGOS_NATIVE_TESTING_TEST_PROGRAM_H_

#include "program.h"

namespace flagos::testing {

// "flagos-test-program devices=1 elements=1024 sleep_us=0 donate=1 small=0": output = argument + 1 on f32[elements], over
// several devices plus the sum of all devices' first elements; a negative first element fails. NULL: another program.
std::unique_ptr<Program> CompileTestProgram(const void* program, size_t size);

}  // namespace flagos::testing

#endif  // FLAGOS_NATIVE_TESTING_TEST_PROGRAM_H_
