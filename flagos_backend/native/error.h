// Errors as values: Status inside the library, FlagosError at the boundary, Failure to leave a function early.
#ifndef FLAGOS_NATIVE_ERROR_H_
#define FLAGOS_NATIVE_ERROR_H_

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "flagos/plugin_abi.h"

namespace flagos {

struct Payload {
  std::string name;
  std::string value;
};

struct ErrorData {
  int32_t code = FLAGOS_UNKNOWN;
  std::string message;
  std::vector<Payload> payloads;
};

// Success, or a shared immutable error.
class Status {
 public:
  Status() = default;
  Status(int32_t code, std::string message, std::vector<Payload> payloads = {});

  bool ok() const noexcept { return data_ == nullptr; }
  int32_t code() const noexcept { return data_ ? data_->code : int32_t{FLAGOS_OK}; }
  const ErrorData* data() const noexcept { return data_.get(); }

 private:
  std::shared_ptr<const ErrorData> data_;
};

// Thrown by argument checks; every entry of the table turns it into a FlagosError.
class Failure : public std::exception {
 public:
  explicit Failure(Status status) : status_(std::move(status)) {}
  const Status& status() const noexcept { return status_; }
  const char* what() const noexcept override { return status_.ok() ? "" : status_.data()->message.c_str(); }

 private:
  Status status_;
};

std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void Fail(int32_t code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The exception in flight as a Status; for use inside a catch block.
Status StatusOfException(const char* place) noexcept;

// NULL when `status` is ok.
FlagosError* NewError(const Status& status) noexcept;
void DeleteError(FlagosError* error) noexcept;  // NULL is success
// Destroys `error`; NULL is success.
Status TakeError(FlagosError* error);

}  // namespace flagos

// A host's handle on an error.
struct FlagosError {
  flagos::Status status;
  std::vector<FlagosNamedValue> payloads;
};

#endif  // FLAGOS_NATIVE_ERROR_H_
