// The Python side as the native one sees it: flagos_backend.bridge.
#ifndef FLAGOS_NATIVE_BRIDGE_H_
#define FLAGOS_NATIVE_BRIDGE_H_

#include "context.h"
#include "python.h"

namespace flagos {

// Callables of the Python side, found once and kept for ever: they outlive every context.
struct Bridge {
  PyObject* compile;
  PyObject* load;
  PyObject* open_peers;
  PyObject* from_dlpack;
  PyObject* to_dlpack;
};

// With the GIL.
Bridge& TheBridge();
// What the bridge is told of a context with each program. With the GIL.
python::Object Facts(Context* context);
// Nothing reaches the other processes through this context any more.
void ClosePeers(Context* context) noexcept;

}  // namespace flagos

#endif  // FLAGOS_NATIVE_BRIDGE_H_
