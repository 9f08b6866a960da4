// How every entry of the table begins and ends: the host's struct is read and written only as far as it says it
// reaches, and no exception leaves.
#ifndef FLAGOS_NATIVE_CALL_H_
#define FLAGOS_NATIVE_CALL_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "callers.h"
#include "error.h"

// Refuses a host whose struct has no room for an "out" field that the call cannot do without.
#define FLAGOS_REQUIRE_FIELD(args, field)                                                                   \
  do {                                                                                                      \
    if ((args).struct_size < offsetof(std::decay_t<decltype(args)>, field) + sizeof((args).field)) {        \
      throw ::flagos::BadField{#field, "lies beyond struct_size; set struct_size to sizeof of the struct"}; \
    }                                                                                                       \
  } while (false)

// A handle or pointer that must not be NULL.
#define FLAGOS_REQUIRE(args, field)                                                           \
  do {                                                                                        \
    if ((args).field == nullptr) throw ::flagos::BadField{#field, "is NULL; it is required"}; \
  } while (false)

namespace flagos {

// What is wrong with one field; Enter adds which function was called.
struct BadField {
  const char* field;
  const char* problem;
};

Status StatusOfBadField(const char* function, const BadField& bad) noexcept;

// The part of a struct of `full` bytes that both sides know. Rounded down to whole words, so that a pointer is never
// cut.
inline size_t KnownSize(size_t struct_size, size_t full) noexcept {
  return std::min(struct_size, full) & ~(sizeof(void*) - 1);
}

// Copies a host's struct of which only struct_size bytes exist; what is absent reads as zero.
template <class Struct>
Struct ReadStruct(const Struct* host) noexcept {
  Struct value{};
  std::memcpy(static_cast<void*>(&value), host, KnownSize(host->struct_size, sizeof(Struct)));
  return value;
}

// Runs body(args) on a complete copy of *host; on success what body wrote goes back to the host. Threads of Python's own
// are noted, and do not return once the interpreter is finalized.
template <class Args, class Body>
FlagosError* Enter(const char* function, Args* host, Body&& body) noexcept {
  const python::CallOfHost call;
  try {
    if (host == nullptr) Fail(FLAGOS_INVALID_ARGUMENT, "%s: the argument struct is NULL", function);
    if (host->struct_size < sizeof(size_t)) {
      Fail(FLAGOS_INVALID_ARGUMENT, "%s: struct_size is %zu; set it to sizeof of the struct", function,
           host->struct_size);
    }
    Args args = ReadStruct(host);
    body(args);
    std::memcpy(static_cast<void*>(host), &args, KnownSize(args.struct_size, sizeof(Args)));
    return nullptr;
  } catch (const BadField& bad) {
    return NewError(StatusOfBadField(function, bad));
  } catch (...) {
    return NewError(StatusOfException(function));
  }
}

}  // namespace flagos

#endif  // FLAGOS_NATIVE_CALL_H_
