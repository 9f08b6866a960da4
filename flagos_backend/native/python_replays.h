// Replays as the Python side has them: capsules, made of its captures and launched from its plans.
#ifndef FLAGOS_NATIVE_PYTHON_REPLAYS_H_
#define FLAGOS_NATIVE_PYTHON_REPLAYS_H_

#include "python.h"
#include "replay.h"

namespace flagos {

// compare_captures(address of the accelerator, graphs, arrays) for the bridge: a capsule that owns the proof. A graph is
// (the driver's handle, memory of its own, conditional nodes), an array as in runtime/accelerator/capture.py.
PyObject* CompareCapturesEntry(PyObject*, PyObject* arguments);
// make_replay(proof, graph) for the bridge: (capsule, nodes, patches). The capsule owns the replay.
PyObject* MakeReplayEntry(PyObject*, PyObject* arguments);
// launch_replay(capsule, addresses) for the bridge, without the GIL.
PyObject* LaunchReplayEntry(PyObject*, PyObject* arguments);
// drop_replay(capsule) for the bridge.
PyObject* DropReplayEntry(PyObject*, PyObject* arguments);
// prepare_conditionals(address of the accelerator), which fails where there are none; open_conditional(accelerator,
// stream, flag, repeats, inside): (node, handle, body); close_conditional(accelerator, inside, handle, flag). All of
// them addresses, as Conditionals takes them, for the bridge.
PyObject* PrepareConditionalsEntry(PyObject*, PyObject* arguments);
PyObject* OpenConditionalEntry(PyObject*, PyObject* arguments);
PyObject* CloseConditionalEntry(PyObject*, PyObject* arguments);
// The replay that a capsule owns. With the GIL; throws Failure.
Replay& ReplayOf(PyObject* capsule);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_PYTHON_REPLAYS_H_
