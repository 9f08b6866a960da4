// Replays as the Python side has them: capsules, made of its captures and launched from its plans.
#ifndef FLAGOS_NATIVE_PYTHON_REPLAYS_H_
#define FLAGOS_NATIVE_PYTHON_REPLAYS_H_

#include "python.h"
#include "replay.h"

namespace flagos {

// make_replay(address of the accelerator, graphs, arrays) for the bridge: (capsule, nodes, patches). A graph is (the
// driver's handle, memory of its own), an array as in runtime/accelerator/capture.py. The capsule owns the replay.
PyObject* MakeReplayEntry(PyObject*, PyObject* arguments);
// launch_replay(capsule, addresses) for the bridge, without the GIL.
PyObject* LaunchReplayEntry(PyObject*, PyObject* arguments);
// The replay that a capsule owns. With the GIL; throws Failure.
Replay& ReplayOf(PyObject* capsule);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_PYTHON_REPLAYS_H_
