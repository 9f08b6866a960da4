#include "error.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>

#include "call.h"

namespace flagos {
namespace {

std::string FormatList(const char* format, va_list list) {
  va_list again;
  va_copy(again, list);
  const int size = std::vsnprintf(nullptr, 0, format, list);
  std::string text(size > 0 ? static_cast<size_t>(size) : 0, '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  return text;
}

// Handed out when there is no memory to make an error with; error_destroy leaves it alone.
FlagosError* OutOfMemory() noexcept {
  static FlagosError* const error = new FlagosError{
      Status(FLAGOS_RESOURCE_EXHAUSTED, "the host has no memory left for an error message; free memory and try again"),
      {}};
  return error;
}

}  // namespace

Status::Status(int32_t code, std::string message, std::vector<Payload> payloads)
    : data_(code == FLAGOS_OK
                ? nullptr
                : std::make_shared<const ErrorData>(ErrorData{code, std::move(message), std::move(payloads)})) {}

std::string Format(const char* format, ...) {
  va_list list;
  va_start(list, format);
  std::string text = FormatList(format, list);
  va_end(list);
  return text;
}

void Fail(int32_t code, const char* format, ...) {
  va_list list;
  va_start(list, format);
  std::string text = FormatList(format, list);
  va_end(list);
  throw Failure(Status(code, std::move(text)));
}

Status StatusOfException(const char* place) noexcept {
  try {
    try {
      throw;
    } catch (const Failure& failure) {
      return failure.status();
    } catch (const std::bad_alloc&) {
      return Status(FLAGOS_RESOURCE_EXHAUSTED,
                    Format("%s: the host has no memory left; free memory and try again", place));
    } catch (const std::exception& exception) {
      return Status(FLAGOS_INTERNAL,
                    Format("%s: %s; this is a defect of the backend, please report it", place, exception.what()));
    } catch (...) {
      return Status(FLAGOS_INTERNAL,
                    Format("%s: an unknown exception; this is a defect of the backend, please report it", place));
    }
  } catch (...) {
    return OutOfMemory()->status;
  }
}

Status StatusOfBadField(const char* function, const BadField& bad) noexcept {
  try {
    return Status(FLAGOS_INVALID_ARGUMENT, Format("%s: %s %s", function, bad.field, bad.problem));
  } catch (...) {
    return OutOfMemory()->status;
  }
}

FlagosError* NewError(const Status& status) noexcept {
  if (status.ok()) return nullptr;
  try {
    auto error = std::make_unique<FlagosError>();
    error->status = status;
    for (const Payload& payload : status.data()->payloads) {
      FlagosNamedValue value{};
      value.struct_size = sizeof(value);
      value.name = payload.name.data();
      value.name_size = payload.name.size();
      value.kind = FLAGOS_VALUE_STRING;
      value.string_value = payload.value.data();
      value.value_size = payload.value.size();
      error->payloads.push_back(value);
    }
    return error.release();
  } catch (...) {
    return OutOfMemory();
  }
}

void DeleteError(FlagosError* error) noexcept {
  if (error != nullptr && error != OutOfMemory()) delete error;
}

Status TakeError(FlagosError* error) {
  if (error == nullptr) return Status();
  Status status = error->status;
  DeleteError(error);
  return status;
}

}  // namespace flagos
