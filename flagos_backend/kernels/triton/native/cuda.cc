#include "cuda.h"

#include <dlfcn.h>

namespace flagos::triton {
namespace {

Driver g_driver{};  // filled once; guarded by the GIL
bool g_found = false;

}  // namespace

const Driver* TheDriver() {
  if (g_found) return &g_driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    PyErr_Format(PyExc_RuntimeError, "no CUDA driver: %s", dlerror());
    return nullptr;
  }
  const char* missing = nullptr;
#define FLAGOS_TRITON_CUDA_RESOLVE(name, symbol, parameters)                         \
  g_driver.name = reinterpret_cast<decltype(g_driver.name)>(dlsym(library, symbol)); \
  if (g_driver.name == nullptr) missing = symbol;
  FLAGOS_TRITON_CUDA_FUNCTIONS(FLAGOS_TRITON_CUDA_RESOLVE)
#undef FLAGOS_TRITON_CUDA_RESOLVE
  if (missing != nullptr) {
    PyErr_Format(PyExc_RuntimeError, "the CUDA driver has no %s; update it", missing);
    return nullptr;
  }
  g_found = true;
  return &g_driver;
}

bool Check(const Driver& driver, Result result) {
  if (result == 0) return true;
  const char* text = nullptr;
  driver.GetErrorString(result, &text);
  PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", text != nullptr ? text : "an unknown error");
  return false;
}

bool EnsureContext(const Driver& driver) {
  Context context = nullptr;
  if (!Check(driver, driver.ContextGet(&context))) return false;
  if (context != nullptr) return true;
  Device device = 0;
  return Check(driver, driver.DeviceGet(&device, 0)) && Check(driver, driver.PrimaryContextRetain(&context, device)) &&
         Check(driver, driver.ContextSet(context));
}

}  // namespace flagos::triton
