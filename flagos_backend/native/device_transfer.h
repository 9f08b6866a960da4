// Copies that begin or end in the memory of an accelerator. Used by transfer.cc.
#ifndef FLAGOS_NATIVE_DEVICE_TRANSFER_H_
#define FLAGOS_NATIVE_DEVICE_TRANSFER_H_

#include "transfer.h"

namespace flagos {

// New contents of `memory` with the elements at `data`. `now`: the host takes its memory back when this returns; otherwise
// when `done` completes.
Ref<Contents> UploadBuffer(Memory* memory, const Shape& shape, const void* data, const Strides& strides, bool now,
                           Ref<Event>& done);

// Copies `shape` that begins at `offset` of the contents to the host; the event completes when it is there.
Ref<Event> DownloadBuffer(Memory* memory, const Ref<Contents>& contents, size_t offset, const Shape& shape, void* data,
                          const Strides& strides);

// Writes over part of the contents; the event completes when that is done.
Ref<Event> WriteBuffer(Memory* memory, const Ref<Contents>& contents, size_t offset, const void* data, size_t bytes);

// The same bytes in another memory of the context.
Ref<Contents> CopyBuffer(Memory* from, const Ref<Contents>& contents, Memory* to, size_t bytes);

// As CopyBuffer, in this thread, for contents that are issued; waits for the device where the copy goes to the host.
void CopyContents(Memory* from, Contents& contents, Memory* to, Contents& copy);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_DEVICE_TRANSFER_H_
