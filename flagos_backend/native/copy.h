// Copies between layouts in host memory, spread over threads when they are large.
#ifndef FLAGOS_NATIVE_COPY_H_
#define FLAGOS_NATIVE_COPY_H_

#include "shape.h"
#include "threads.h"

namespace flagos {

// Copies every element of `shape`; strides in bytes, NULL: dense. The two do not overlap. Returns when done; `pool`
// helps.
void CopyElements(const Shape& shape, void* to, const int64_t* to_strides, const void* from,
                  const int64_t* from_strides, ThreadPool* pool);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_COPY_H_
