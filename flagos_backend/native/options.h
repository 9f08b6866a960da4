// Options of a context: named values from the manifest and the host, checked as they are read.
#ifndef FLAGOS_NATIVE_OPTIONS_H_
#define FLAGOS_NATIVE_OPTIONS_H_

#include <cstdint>
#include <map>
#include <string>
#include <variant>

#include "flagos/plugin_abi.h"

namespace flagos {

class Options {
 public:
  // Later values win. Throws Failure(INVALID_ARGUMENT) for a value that is malformed.
  Options(const FlagosNamedValue* values, size_t count);

  // The option, else the environment variable (if any), else the default. Throws Failure(INVALID_ARGUMENT) that names
  // what was wrong when it is not a whole number from low to high.
  int64_t Integer(const char* name, const char* variable, int64_t otherwise, int64_t low, int64_t high) const;
  std::string Text(const char* name) const;

 private:
  std::map<std::string, std::variant<std::string, int64_t>, std::less<>> values_;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_OPTIONS_H_
