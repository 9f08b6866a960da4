#include "cuda/driver.h"

#include <dlfcn.h>

#include <utility>

#include "error.h"
#include "log.h"

namespace flagos::cuda {
namespace {

constexpr Result kOutOfMemory = 2;

const Driver* Load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    Log(FLAGOS_LOG_INFO, "no CUDA driver: %s", dlerror());
    return nullptr;
  }
  auto* driver = new Driver;
  const char* missing = nullptr;
#define FLAGOS_CUDA_RESOLVE(name, symbol, parameters)                              \
  driver->name = reinterpret_cast<decltype(driver->name)>(dlsym(library, symbol)); \
  if (driver->name == nullptr) missing = symbol;
  FLAGOS_CUDA_CONDITIONAL_FUNCTIONS(FLAGOS_CUDA_RESOLVE)
  driver->missing_for_conditionals = std::exchange(missing, nullptr);
  FLAGOS_CUDA_FUNCTIONS(FLAGOS_CUDA_RESOLVE)
#undef FLAGOS_CUDA_RESOLVE
  if (missing == nullptr && driver->Init(0) == 0) return driver;
  if (missing != nullptr) {
    Log(FLAGOS_LOG_WARNING, "the CUDA driver has no %s, so graphs are not replayed; update it to CUDA 12.4 or later",
        missing);
  }
  delete driver;
  return nullptr;
}

}  // namespace

const Driver* TheDriver() noexcept {
  static const Driver* const driver = Load();
  return driver;
}

void Driver::Check(Result result, const char* what) const {
  if (result == 0) return;
  const char* text = nullptr;
  GetErrorString(result, &text);
  Fail(result == kOutOfMemory ? FLAGOS_RESOURCE_EXHAUSTED : FLAGOS_INTERNAL, "%s: the CUDA driver says: %s (%d)", what,
       text ? text : "an unknown error", result);
}

}  // namespace flagos::cuda
