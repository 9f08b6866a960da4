// Named values of the ABI as values of their own, and back.
#ifndef FLAGOS_ISOLATION_NAMED_VALUES_H_
#define FLAGOS_ISOLATION_NAMED_VALUES_H_

#include <vector>

#include "flagos/plugin_abi.h"
#include "wire.h"

namespace flagos_isolation {

std::vector<NamedValue> FromAbi(const FlagosNamedValue* values, size_t count);
// They point into `values`.
std::vector<FlagosNamedValue> ToAbi(const std::vector<NamedValue>& values);

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_NAMED_VALUES_H_
