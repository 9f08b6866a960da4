// Named values: the same idea on both sides, in two layouts.
#ifndef FLAGOS_PJRT_NAMED_VALUES_H_
#define FLAGOS_PJRT_NAMED_VALUES_H_

#include <string>
#include <vector>

#include "error.h"

namespace flagos_pjrt {

// Borrows the value's memory.
[[nodiscard]] PJRT_Error* ToFlagosValue(const PJRT_NamedValue& value, FlagosNamedValue* converted);
// Borrows the values' memory.
std::vector<PJRT_NamedValue> ToPjrtValues(const FlagosNamedValue* values, size_t count);

PJRT_NamedValue Int64Value(std::string_view name, int64_t value);
PJRT_NamedValue Int64ListValue(std::string_view name, const int64_t* values, size_t count);

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_NAMED_VALUES_H_
