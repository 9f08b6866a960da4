#include "error.h"

#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "api.h"
#include "flagos_calls.h"

namespace flagos_pjrt {
namespace {

// vtable (the first word) stays null: a caller then goes through PJRT_Error_* of this table.
struct Error : PJRT_Error {
  int32_t code = FLAGOS_UNKNOWN;
  std::string message;
  std::vector<std::pair<std::string, std::string>> payloads;
};

constexpr std::string_view kOutOfMemoryMessage = "The process ran out of host memory inside the PJRT adapter.";
constexpr PJRT_Error kOutOfMemory = {nullptr};

const Error* AsError(const PJRT_Error* error) {
  return error == &kOutOfMemory ? nullptr : static_cast<const Error*>(error);
}

}  // namespace

std::string Concat(std::initializer_list<Text> parts) {
  std::string joined;
  for (const Text& part : parts) joined.append(part.view());
  return joined;
}

std::string FormatList(const int64_t* values, size_t count) {
  std::string text = "{";
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) text += ',';
    text += std::to_string(values[i]);
  }
  return text + "}";
}

PJRT_Error* OutOfMemory() noexcept { return const_cast<PJRT_Error*>(&kOutOfMemory); }

PJRT_Error* MakeError(int32_t code, std::string_view message) noexcept {
  try {
    auto error = std::make_unique<Error>();
    error->vtable = nullptr;
    error->code = code;
    error->message = message;
    return error.release();
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

PJRT_Error* MakeError(int32_t code, std::initializer_list<Text> parts) noexcept {
  try {
    return MakeError(code, Concat(parts));
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

PJRT_Error* TakeError(const FlagosApi& api, FlagosError* error) noexcept {
  if (error == nullptr) return nullptr;
  auto described = MakeArgs<FlagosErrorDescribeArgs>();
  described.error = error;
  api.error_describe(&described);
  PJRT_Error* taken = MakeError(described.code, std::string_view(described.message, described.message_size));
  if (taken != &kOutOfMemory) {
    try {
      for (size_t i = 0; i < described.num_payloads; ++i) {
        const FlagosNamedValue& payload = described.payloads[i];
        static_cast<Error*>(taken)->payloads.emplace_back(std::string(payload.name, payload.name_size),
                                                          std::string(payload.string_value, payload.value_size));
      }
    } catch (const std::bad_alloc&) {
      // The code and the message say enough.
    }
  }
  api.error_destroy(error);
  return taken;
}

FlagosError* ToFlagosError(const FlagosApi& api, int32_t code, std::string_view message) noexcept {
  auto args = MakeArgs<FlagosErrorCreateArgs>();
  args.code = code;
  args.message = message.data();
  args.message_size = message.size();
  FlagosError* failure = api.error_create(&args);
  return failure != nullptr ? failure : args.error;
}

void DestroyError(PJRT_Error* error) noexcept {
  if (error != &kOutOfMemory) delete static_cast<Error*>(error);
}

int32_t ErrorCode(const PJRT_Error* error) noexcept {
  const Error* own = AsError(error);
  return own != nullptr ? own->code : FLAGOS_RESOURCE_EXHAUSTED;
}

std::string_view ErrorMessage(const PJRT_Error* error) noexcept {
  const Error* own = AsError(error);
  return own != nullptr ? std::string_view(own->message) : kOutOfMemoryMessage;
}

void PJRT_Error_Destroy(PJRT_Error_Destroy_Args* args) { DestroyError(args->error); }

void PJRT_Error_Message(PJRT_Error_Message_Args* args) {
  const std::string_view message = ErrorMessage(args->error);
  args->message = message.data();
  args->message_size = message.size();
}

PJRT_Error* PJRT_Error_GetCode(PJRT_Error_GetCode_Args* args) {
  args->code = static_cast<PJRT_Error_Code>(ErrorCode(args->error));
  return nullptr;
}

PJRT_Error* PJRT_Error_ForEachPayload(PJRT_Error_ForEachPayload_Args* args) {
  const Error* error = AsError(args->error);
  if (error == nullptr || args->visitor == nullptr) return nullptr;
  for (const auto& [key, value] : error->payloads) {
    args->visitor(key.data(), key.size(), value.data(), value.size(), args->user_arg);
  }
  return nullptr;
}

}  // namespace flagos_pjrt
