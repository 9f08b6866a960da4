// What every call from outside passes through: argument checks, and no exception out.
#ifndef FLAGOS_PJRT_ENTRY_H_
#define FLAGOS_PJRT_ENTRY_H_

#include <cstring>
#include <exception>
#include <new>

#include "error.h"

namespace flagos_pjrt {

[[nodiscard]] inline PJRT_Error* CheckArgs(const void* args, size_t minimum, size_t handle, const char* name) {
  if (args == nullptr) return MakeError(FLAGOS_INVALID_ARGUMENT, {name, ": the arguments are NULL."});
  size_t struct_size;
  std::memcpy(&struct_size, args, sizeof(struct_size));
  if (struct_size < minimum) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {name, ": struct_size is ", struct_size, ", but this adapter serves callers from ", minimum,
                      " bytes on. Use a jaxlib that speaks PJRT 0.104 or newer."});
  }
  if (handle != 0) {
    const void* value;
    std::memcpy(&value, static_cast<const char*>(args) + handle, sizeof(value));
    if (value == nullptr) {
      return MakeError(FLAGOS_INVALID_ARGUMENT, {name, ": the object that it is called on is NULL."});
    }
  }
  return nullptr;
}

template <typename Args>
PJRT_Error* Enter(PJRT_Error* (*function)(Args*), Args* args, size_t minimum, size_t handle,
                  const char* name) noexcept {
  if (PJRT_Error* error = CheckArgs(args, minimum, handle, name)) return error;
  try {
    return function(args);
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  } catch (const std::exception& exception) {
    return MakeError(FLAGOS_INTERNAL, {name, ": ", exception.what()});
  }
}

template <typename Args>
void Enter(void (*function)(Args*), Args* args, size_t minimum, size_t handle, const char* name) noexcept {
  if (PJRT_Error* error = CheckArgs(args, minimum, handle, name)) {
    DestroyError(error);  // nothing carries it out
    return;
  }
  function(args);
}

}  // namespace flagos_pjrt

// Defines function_Entry, which a table holds in place of function.
#define FLAGOS_DEFINE_ENTRY(result, function, arguments, handle)                \
  static result function##_Entry(arguments* args) noexcept {                    \
    return Enter(&function, args, arguments##_MINIMUM_SIZE, handle, #function); \
  }
#define FLAGOS_LIST_ENTRY(result, function, arguments, handle) &function##_Entry,

#endif  // FLAGOS_PJRT_ENTRY_H_
