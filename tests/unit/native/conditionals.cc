// Says what becomes of conditional nodes with the driver that is found, which is tests/cpu/replay/driver.c.
#include "cuda/conditionals.h"

#include <dlfcn.h>

#include <cstdio>

#include "cuda/driver.h"
#include "error.h"

namespace {

template <class Action>
void Try(const char* what, const Action& action) {
  try {
    action();
    std::printf("%s: done\n", what);
  } catch (const flagos::Failure& failure) {
    std::printf("%s: %s\n", what, failure.what());
  }
}

}  // namespace

int main() {
  const flagos::cuda::Driver* driver = flagos::cuda::TheDriver();
  if (driver == nullptr) return 1;
  flagos::cuda::ContextHandle context = nullptr;
  driver->PrimaryContextRetain(&context, 0);
  Try("preparing", [&] {
    flagos::cuda::CudaConditionals conditionals(*driver, context);
    unsigned char flag = 1;
    const auto address = reinterpret_cast<uint64_t>(&flag);
    Try("outside a capture", [&] { conditionals.Open(1, address, true, 2); });
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    reinterpret_cast<void (*)(uintptr_t)>(dlsym(library, "driver_begin"))(1);
    flagos::Captures::Conditional node{};
    Try("opening", [&] { node = conditionals.Open(1, address, true, 2); });
    Try("a body on a stream that has one", [&] { conditionals.Open(1, address, true, 2); });
    Try("closing", [&] { conditionals.Close(2, node.handle, address); });
    Try("closing again", [&] { conditionals.Close(2, node.handle, address); });
    Try("giving up", [&] {
      conditionals.Open(1, address, false, 2);
      conditionals.Close(2, 0, 0);
    });
  });
  return 0;
}
