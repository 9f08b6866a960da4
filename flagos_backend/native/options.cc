#include "options.h"

#include <cerrno>
#include <cstdlib>

#include "call.h"

namespace flagos {
namespace {

int64_t ParseInteger(const std::string& text, const char* name, int64_t low, int64_t high) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < low || value > high) {
    Fail(FLAGOS_INVALID_ARGUMENT, "context_create: %s is '%s'; set it to a whole number from %lld to %lld", name,
         text.c_str(), static_cast<long long>(low), static_cast<long long>(high));
  }
  return value;
}

}  // namespace

Options::Options(const FlagosNamedValue* values, size_t count) {
  if (count > 0 && values == nullptr) {
    Fail(FLAGOS_INVALID_ARGUMENT, "context_create: options is NULL but num_options is %zu", count);
  }
  const char* next = reinterpret_cast<const char*>(values);
  for (size_t i = 0; i < count; ++i) {
    const auto* host = reinterpret_cast<const FlagosNamedValue*>(next);
    if (host->struct_size < offsetof(FlagosNamedValue, int64_value)) {
      Fail(FLAGOS_INVALID_ARGUMENT, "context_create: options[%zu].struct_size is %zu; set it to sizeof of the struct",
           i, host->struct_size);
    }
    const FlagosNamedValue value = ReadStruct(host);
    next += host->struct_size;  // the host's own size, which may be another than ours
    if (value.name == nullptr) Fail(FLAGOS_INVALID_ARGUMENT, "context_create: options[%zu].name is NULL", i);
    std::string name(value.name, value.name_size);
    switch (value.kind) {
      case FLAGOS_VALUE_STRING:
        if (value.string_value == nullptr && value.value_size != 0) {
          Fail(FLAGOS_INVALID_ARGUMENT, "context_create: option '%s' is a string of %zu characters at NULL",
               name.c_str(), value.value_size);
        }
        values_[name] =
            std::string(value.string_value ? value.string_value : "", value.string_value ? value.value_size : 0);
        break;
      case FLAGOS_VALUE_INT64:
        values_[name] = value.int64_value;
        break;
      case FLAGOS_VALUE_BOOL:
        values_[name] = int64_t{value.bool_value != 0};
        break;
      case FLAGOS_VALUE_INT64_LIST:
      case FLAGOS_VALUE_DOUBLE:
        values_[name] = std::string("(a value of another kind)");  // no option of ours: refused only if one is read
        break;
      default:
        Fail(FLAGOS_INVALID_ARGUMENT, "context_create: option '%s' has kind %d; see FLAGOS_VALUE_*", name.c_str(),
             value.kind);
    }
  }
}

int64_t Options::Integer(const char* name, const char* variable, int64_t otherwise, int64_t low, int64_t high) const {
  auto found = values_.find(name);
  if (found != values_.end()) {
    const std::string label = Format("the option '%s'", name);
    const auto* text = std::get_if<std::string>(&found->second);
    return ParseInteger(text ? *text : std::to_string(std::get<int64_t>(found->second)), label.c_str(), low, high);
  }
  const char* text = variable ? std::getenv(variable) : nullptr;
  if (text == nullptr || *text == '\0') return otherwise;
  const std::string label = Format("the environment variable %s", variable);
  return ParseInteger(text, label.c_str(), low, high);
}

std::string Options::Text(const char* name) const {
  auto found = values_.find(name);
  if (found == values_.end()) return "";
  const auto* text = std::get_if<std::string>(&found->second);
  if (text == nullptr) Fail(FLAGOS_INVALID_ARGUMENT, "context_create: the option '%s' must be a string", name);
  return *text;
}

}  // namespace flagos
