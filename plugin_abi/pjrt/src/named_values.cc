#include "named_values.h"

#include "flagos_calls.h"

namespace flagos_pjrt {
namespace {

PJRT_NamedValue MakeValue(std::string_view name, PJRT_NamedValue_Type type, size_t value_size) {
  PJRT_NamedValue value = {};
  value.struct_size = PJRT_NamedValue_STRUCT_SIZE;
  value.name = name.data();
  value.name_size = name.size();
  value.type = type;
  value.value_size = value_size;
  return value;
}

}  // namespace

PJRT_Error* ToFlagosValue(const PJRT_NamedValue& value, FlagosNamedValue* converted) {
  *converted = MakeArgs<FlagosNamedValue>();
  converted->name = value.name;
  converted->name_size = value.name_size;
  converted->value_size = 1;
  switch (value.type) {
    case PJRT_NamedValue_kString:
      converted->kind = FLAGOS_VALUE_STRING;
      converted->string_value = value.string_value;
      converted->value_size = value.value_size;
      return nullptr;
    case PJRT_NamedValue_kInt64:
      converted->kind = FLAGOS_VALUE_INT64;
      converted->int64_value = value.int64_value;
      return nullptr;
    case PJRT_NamedValue_kInt64List:
      converted->kind = FLAGOS_VALUE_INT64_LIST;
      converted->int64_list = value.int64_array_value;
      converted->value_size = value.value_size;
      return nullptr;
    case PJRT_NamedValue_kFloat:
      converted->kind = FLAGOS_VALUE_DOUBLE;
      converted->double_value = value.float_value;
      return nullptr;
    case PJRT_NamedValue_kBool:
      converted->kind = FLAGOS_VALUE_BOOL;
      converted->bool_value = value.bool_value ? 1 : 0;
      return nullptr;
  }
  return MakeError(FLAGOS_INVALID_ARGUMENT, {"Option \"", std::string_view(value.name, value.name_size),
                                             "\" has the unknown value type ", static_cast<int>(value.type), "."});
}

std::vector<PJRT_NamedValue> ToPjrtValues(const FlagosNamedValue* values, size_t count) {
  std::vector<PJRT_NamedValue> converted;
  converted.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const FlagosNamedValue& value = values[i];
    const std::string_view name(value.name, value.name_size);
    switch (value.kind) {
      case FLAGOS_VALUE_STRING:
        converted.push_back(MakeValue(name, PJRT_NamedValue_kString, value.value_size));
        converted.back().string_value = value.string_value;
        break;
      case FLAGOS_VALUE_INT64:
        converted.push_back(Int64Value(name, value.int64_value));
        break;
      case FLAGOS_VALUE_INT64_LIST:
        converted.push_back(Int64ListValue(name, value.int64_list, value.value_size));
        break;
      case FLAGOS_VALUE_DOUBLE:
        converted.push_back(MakeValue(name, PJRT_NamedValue_kFloat, 1));
        converted.back().float_value = static_cast<float>(value.double_value);
        break;
      case FLAGOS_VALUE_BOOL:
        converted.push_back(MakeValue(name, PJRT_NamedValue_kBool, 1));
        converted.back().bool_value = value.bool_value != 0;
        break;
      default:  // a kind that a younger backend appended: PJRT has no form for it
        break;
    }
  }
  return converted;
}

PJRT_NamedValue Int64Value(std::string_view name, int64_t value) {
  PJRT_NamedValue converted = MakeValue(name, PJRT_NamedValue_kInt64, 1);
  converted.int64_value = value;
  return converted;
}

PJRT_NamedValue Int64ListValue(std::string_view name, const int64_t* values, size_t count) {
  PJRT_NamedValue converted = MakeValue(name, PJRT_NamedValue_kInt64List, count);
  converted.int64_array_value = values;
  return converted;
}

}  // namespace flagos_pjrt
