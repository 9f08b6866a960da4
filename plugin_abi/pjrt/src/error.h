// Errors: every PJRT_Error is the adapter's own value, so it outlives the backend objects that it speaks of.
#ifndef FLAGOS_PJRT_ERROR_H_
#define FLAGOS_PJRT_ERROR_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "flagos/plugin_abi.h"
#include "pjrt_abi.h"

namespace flagos_pjrt {

// Numbers and texts, joined into one message.
class Text {
 public:
  Text(const char* text) : text_(text != nullptr ? text : "(null)") {}
  Text(std::string_view text) : text_(text) {}
  Text(const std::string& text) : text_(text) {}
  template <typename Number, typename = std::enable_if_t<std::is_arithmetic_v<Number>>>
  Text(Number number) : number_(std::to_string(number)), text_(number_) {}
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  std::string_view view() const { return text_; }

 private:
  std::string number_;
  std::string_view text_;
};
std::string Concat(std::initializer_list<Text> parts);
// "{2,3}"
std::string FormatList(const int64_t* values, size_t count);

// Never null and never throws: without memory for the message, a static RESOURCE_EXHAUSTED comes back.
[[nodiscard]] PJRT_Error* MakeError(int32_t code, std::string_view message) noexcept;
[[nodiscard]] PJRT_Error* MakeError(int32_t code, std::initializer_list<Text> parts) noexcept;
[[nodiscard]] PJRT_Error* OutOfMemory() noexcept;

// Turns a backend's error into ours and destroys it; null stays null.
[[nodiscard]] PJRT_Error* TakeError(const FlagosApi& api, FlagosError* error) noexcept;
// The other way round, for calls that hand an error to the backend. error stays the caller's.
[[nodiscard]] FlagosError* ToFlagosError(const FlagosApi& api, int32_t code, std::string_view message) noexcept;

void DestroyError(PJRT_Error* error) noexcept;
int32_t ErrorCode(const PJRT_Error* error) noexcept;
std::string_view ErrorMessage(const PJRT_Error* error) noexcept;

}  // namespace flagos_pjrt

#define FLAGOS_RETURN_IF_ERROR(expression)                            \
  do {                                                                \
    if (PJRT_Error* flagos_error = (expression)) return flagos_error; \
  } while (false)

#endif  // FLAGOS_PJRT_ERROR_H_
