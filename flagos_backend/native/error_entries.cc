// The table's functions of errors.
#include "api.h"
#include "call.h"
#include "error.h"

namespace flagos::api {

FlagosError* error_create(FlagosErrorCreateArgs* host) {
  return Enter("error_create", host, [](FlagosErrorCreateArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, error);
    if (args.code < FLAGOS_CANCELLED || args.code > FLAGOS_UNAUTHENTICATED) {
      Fail(FLAGOS_INVALID_ARGUMENT,
           "error_create: code %d is not an error code; use FLAGOS_CANCELLED (1) to "
           "FLAGOS_UNAUTHENTICATED (16)",
           args.code);
    }
    if (args.message == nullptr && args.message_size != 0) {
      Fail(FLAGOS_INVALID_ARGUMENT, "error_create: message is NULL but message_size is %zu", args.message_size);
    }
    std::string message(args.message ? args.message : "", args.message ? args.message_size : 0);
    args.error = NewError(Status(args.code, std::move(message)));
  });
}

void error_destroy(FlagosError* error) { DeleteError(error); }

void error_describe(FlagosErrorDescribeArgs* host) {
  // Nothing to report a failure with: without an error to describe, the fields stay untouched.
  FlagosError* refused = Enter("error_describe", host, [](FlagosErrorDescribeArgs& args) {
    FLAGOS_REQUIRE(args, error);
    const ErrorData& data = *args.error->status.data();
    args.message = data.message.data();
    args.message_size = data.message.size();
    args.code = data.code;
    args.payloads = args.error->payloads.data();
    args.num_payloads = args.error->payloads.size();
  });
  DeleteError(refused);
}

}  // namespace flagos::api
