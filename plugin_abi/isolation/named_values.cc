#include "named_values.h"

namespace flagos_isolation {

std::vector<NamedValue> FromAbi(const FlagosNamedValue* values, size_t count) {
  std::vector<NamedValue> taken;
  for (size_t i = 0; i < count; ++i) {
    const FlagosNamedValue& value = values[i];
    NamedValue& copy = taken.emplace_back();
    copy.name.assign(value.name, value.name_size);
    copy.kind = value.kind;
    if (value.kind == FLAGOS_VALUE_STRING) {
      copy.string_value.assign(value.string_value, value.value_size);
    } else if (value.kind == FLAGOS_VALUE_INT64_LIST) {
      copy.int64_list.assign(value.int64_list, value.int64_list + value.value_size);
    } else if (value.kind == FLAGOS_VALUE_BOOL) {
      copy.int64_value = value.bool_value;
    } else {
      copy.int64_value = value.int64_value;
      copy.double_value = value.double_value;
    }
  }
  return taken;
}

std::vector<FlagosNamedValue> ToAbi(const std::vector<NamedValue>& values) {
  std::vector<FlagosNamedValue> made;
  for (const NamedValue& value : values) {
    FlagosNamedValue& copy = made.emplace_back();
    copy = FlagosNamedValue{};
    copy.struct_size = sizeof(copy);
    copy.name = value.name.c_str();
    copy.name_size = value.name.size();
    copy.kind = value.kind;
    copy.bool_value = value.int64_value != 0 ? 1 : 0;
    copy.string_value = value.string_value.c_str();
    copy.int64_list = value.int64_list.data();
    copy.int64_value = value.int64_value;
    copy.double_value = value.double_value;
    copy.value_size = 1;
    if (value.kind == FLAGOS_VALUE_STRING) copy.value_size = value.string_value.size();
    if (value.kind == FLAGOS_VALUE_INT64_LIST) copy.value_size = value.int64_list.size();
  }
  return made;
}

}  // namespace flagos_isolation
