// Errors as values, on both sides of the wire, and the FlagosError that a host sees.
#ifndef FLAGOS_ISOLATION_STATUS_H_
#define FLAGOS_ISOLATION_STATUS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flagos/plugin_abi.h"

namespace flagos_isolation {

struct ErrorData {
  int32_t code = FLAGOS_UNKNOWN;
  std::string message;
  std::vector<std::pair<std::string, std::string>> payloads;
};

// NULL is success.
using Status = std::shared_ptr<const ErrorData>;

inline Status MakeStatus(int32_t code, std::string message) {
  return std::make_shared<ErrorData>(ErrorData{code, std::move(message), {}});
}

// What a backend in a process of its own cannot do; `what` names it.
inline Status NotIsolated(const std::string& what) {
  return MakeStatus(FLAGOS_UNIMPLEMENTED,
                    what +
                        " is not available while the backend runs in a process of its own. Set FLAGOS_ISOLATION=none "
                        "to run it in this one.");
}

FlagosError* NewError(const Status& status);  // NULL is success
Status TakeError(FlagosError* error);         // of this library's own table; destroys it

}  // namespace flagos_isolation

// A host's handle on an error.
struct FlagosError {
  flagos_isolation::Status status;
  std::vector<FlagosNamedValue> payloads;
};

#endif  // FLAGOS_ISOLATION_STATUS_H_
