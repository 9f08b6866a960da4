// Moving bytes between buffers and the host, at once when it is little, on the transfer threads when it is much.
#ifndef FLAGOS_NATIVE_TRANSFER_H_
#define FLAGOS_NATIVE_TRANSFER_H_

#include "buffer.h"

namespace flagos {

// Throws Failure(INVALID_ARGUMENT) unless `memory` is of `context`.
void CheckMemory(const char* function, Context* context, Memory* memory);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_TRANSFER_H_
