// Calling the flagos C ABI: sized argument structs, and owners for the handles that it gives out.
#ifndef FLAGOS_PJRT_FLAGOS_CALLS_H_
#define FLAGOS_PJRT_FLAGOS_CALLS_H_

#include <memory>

#include "flagos/plugin_abi.h"

namespace flagos_pjrt {

template <typename Args>
Args MakeArgs() {
  Args args = {};
  args.struct_size = sizeof(Args);
  return args;
}

struct Destroyer {
  const FlagosApi* api = nullptr;
  void operator()(FlagosEvent* event) const { api->event_destroy(event); }
  void operator()(FlagosBuffer* buffer) const { api->buffer_destroy(buffer); }
  void operator()(FlagosExecutable* executable) const { api->executable_destroy(executable); }
};

using OwnedEvent = std::unique_ptr<FlagosEvent, Destroyer>;
using OwnedBuffer = std::unique_ptr<FlagosBuffer, Destroyer>;
using OwnedExecutable = std::unique_ptr<FlagosExecutable, Destroyer>;

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_FLAGOS_CALLS_H_
