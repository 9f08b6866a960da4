#include "python_replays.h"

#include <utility>

#include "accelerator.h"

namespace flagos {
namespace {

using python::Object;
using python::Reader;

constexpr const char* kCapsuleName = "flagos.replay";

std::vector<Captures::Range> Ranges(Reader list) {
  std::vector<Captures::Range> ranges;
  while (!list.done()) {
    Reader pair = list.Tuple();
    const auto begin = static_cast<uint64_t>(pair.Integer());
    ranges.push_back({begin, begin + static_cast<uint64_t>(pair.Integer())});
  }
  return ranges;
}

Captures ReadCaptures(Reader graphs, Reader arrays) {
  Captures captures{};
  for (Captures::Graph* graph : {&captures.first, &captures.second, &captures.third}) {
    Reader pair = graphs.Tuple();
    graph->handle = static_cast<uint64_t>(pair.Integer());
    graph->owned = Ranges(pair.Tuple());
  }
  while (!arrays.done()) {
    Reader array = arrays.Tuple();
    const auto first = static_cast<uint64_t>(array.Integer()), second = static_cast<uint64_t>(array.Integer());
    captures.arrays.push_back({first, second, static_cast<uint64_t>(array.Integer())});
  }
  return captures;
}

void Destroy(PyObject* capsule) {
  delete static_cast<Replay*>(python::Known()->PyCapsule_GetPointer(capsule, kCapsuleName));
}

// What an entry gives the interpreter: its result, or the exception.
template <class Body>
PyObject* Enter(const char* place, const Body& body) {
  try {
    return body().Detach();
  } catch (...) {
    const python::Functions& py = *python::Known();
    py.PyErr_SetString(py.runtime_error, StatusOfException(place).data()->message.c_str());
    return nullptr;
  }
}

}  // namespace

PyObject* MakeReplayEntry(PyObject*, PyObject* arguments) {
  return Enter("making a replay", [arguments] {
    const python::Functions& py = *python::Known();
    Reader reader(arguments);
    auto* accelerator = reinterpret_cast<Accelerator*>(reader.Integer());
    Reader graphs = reader.Tuple(), arrays = reader.Tuple();
    std::unique_ptr<Replay> replay = accelerator->streams().MakeReplay(ReadCaptures(graphs, arrays));
    Object made = python::Check(py.PyTuple_New(3), "PyTuple_New");
    py.PyTuple_SetItem(made.get(), 1, python::Integer(static_cast<int64_t>(replay->nodes())).Detach());
    py.PyTuple_SetItem(made.get(), 2, python::Integer(static_cast<int64_t>(replay->patches())).Detach());
    Object capsule = python::Check(py.PyCapsule_New(replay.get(), kCapsuleName, Destroy), "PyCapsule_New");
    static_cast<void>(replay.release());
    py.PyTuple_SetItem(made.get(), 0, capsule.Detach());
    return made;
  });
}

PyObject* LaunchReplayEntry(PyObject*, PyObject* arguments) {
  return Enter("replaying a graph", [arguments] {
    Reader reader(arguments);
    Replay& replay = ReplayOf(reader.Next());
    Reader list = reader.Tuple();
    std::vector<void*> addresses;
    addresses.reserve(static_cast<size_t>(list.size()));
    while (!list.done()) addresses.push_back(reinterpret_cast<void*>(list.Integer()));
    if (addresses.size() != replay.arrays()) {
      Fail(FLAGOS_INTERNAL, "a replay of %zu arrays is launched for %zu", replay.arrays(), addresses.size());
    }
    {
      python::ReleaseGil released;
      replay.Launch(addresses.data());
    }
    return Object::Share(python::Known()->none);
  });
}

Replay& ReplayOf(PyObject* capsule) {
  void* replay = python::Known()->PyCapsule_GetPointer(capsule, kCapsuleName);
  if (replay == nullptr) throw Failure(python::TakeException("reading a replay"));
  return *static_cast<Replay*>(replay);
}

}  // namespace flagos
