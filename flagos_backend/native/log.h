// One line to whoever listens: the host's callback, or standard error when only FLAGOS_DEBUG asks for more.
#ifndef FLAGOS_NATIVE_LOG_H_
#define FLAGOS_NATIVE_LOG_H_

#include <cstdint>

#include "flagos/plugin_abi.h"

namespace flagos {

void SetLog(FlagosLogCallback callback, void* user_data, int32_t level) noexcept;
bool LogEnabled(int32_t level) noexcept;
void Log(int32_t level, const char* format, ...) noexcept __attribute__((format(printf, 2, 3)));

}  // namespace flagos

#endif  // FLAGOS_NATIVE_LOG_H_
