#include "python_replays.h"

#include <utility>

#include "accelerator.h"

namespace flagos {
namespace {

using python::Object;
using python::Reader;

template <class T>
constexpr const char* kCapsuleName = nullptr;
template <>
constexpr const char* kCapsuleName<Replay> = "flagos.replay";
template <>
constexpr const char* kCapsuleName<Proof> = "flagos.proof";

uint64_t Address(Reader& reader) { return static_cast<uint64_t>(reader.Integer()); }

std::vector<Captures::Range> Ranges(Reader list) {
  std::vector<Captures::Range> ranges;
  while (!list.done()) {
    Reader pair = list.Tuple();
    const auto begin = static_cast<uint64_t>(pair.Integer());
    ranges.push_back({begin, begin + static_cast<uint64_t>(pair.Integer())});
  }
  return ranges;
}

Captures::Graph ReadGraph(Reader triple) {
  Captures::Graph graph{};
  graph.handle = Address(triple);
  graph.owned = Ranges(triple.Tuple());
  Reader conditionals = triple.Tuple();
  while (!conditionals.done()) {
    Reader conditional = conditionals.Tuple();
    const uint64_t node = Address(conditional), handle = Address(conditional);
    graph.conditionals.push_back({node, handle, Address(conditional)});
  }
  return graph;
}

Captures ReadCaptures(Reader graphs, Reader arrays, Reader stand_ins) {
  Captures captures{};
  for (Captures::Graph* graph : {&captures.first, &captures.second, &captures.third}) {
    *graph = ReadGraph(graphs.Tuple());
  }
  while (!arrays.done()) {
    Reader array = arrays.Tuple();
    const auto first = static_cast<uint64_t>(array.Integer()), second = static_cast<uint64_t>(array.Integer());
    captures.arrays.push_back({first, second, static_cast<uint64_t>(array.Integer())});
  }
  while (!stand_ins.done()) {
    Reader stand_in = stand_ins.Tuple();
    const auto number = static_cast<size_t>(stand_in.Integer());
    const auto first = static_cast<uint64_t>(stand_in.Integer()), second = static_cast<uint64_t>(stand_in.Integer());
    captures.arrays.push_back({first, second, captures.arrays.at(number).bytes, number});
  }
  return captures;
}

Accelerator& AcceleratorOf(Reader& reader) { return *reinterpret_cast<Accelerator*>(reader.Integer()); }

template <class T>
void Destroy(PyObject* capsule) {
  delete static_cast<T*>(python::Known()->PyCapsule_GetPointer(capsule, kCapsuleName<T>));
}

template <class T>
Object CapsuleOf(std::unique_ptr<T> owned) {
  Object capsule =
      python::Check(python::Known()->PyCapsule_New(owned.get(), kCapsuleName<T>, Destroy<T>), "PyCapsule_New");
  static_cast<void>(owned.release());
  return capsule;
}

template <class T>
T& OwnedBy(PyObject* capsule) {
  void* owned = python::Known()->PyCapsule_GetPointer(capsule, kCapsuleName<T>);
  if (owned == nullptr) throw Failure(python::TakeException("reading a capsule"));
  return *static_cast<T*>(owned);
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

PyObject* CompareCapturesEntry(PyObject*, PyObject* arguments) {
  return Enter("comparing captures", [arguments] {
    Reader reader(arguments);
    Accelerator& accelerator = AcceleratorOf(reader);
    Reader graphs = reader.Tuple(), arrays = reader.Tuple(), stand_ins = reader.Tuple();
    return CapsuleOf(accelerator.streams().Compare(ReadCaptures(graphs, arrays, stand_ins)));
  });
}

PyObject* MakeReplayEntry(PyObject*, PyObject* arguments) {
  return Enter("making a replay", [arguments] {
    const python::Functions& py = *python::Known();
    Reader reader(arguments);
    const Proof& proof = OwnedBy<Proof>(reader.Next());
    std::unique_ptr<Replay> replay = proof.MakeReplay(ReadGraph(reader.Tuple()));
    Object made = python::Check(py.PyTuple_New(3), "PyTuple_New");
    py.PyTuple_SetItem(made.get(), 1, python::Integer(static_cast<int64_t>(replay->nodes())).Detach());
    py.PyTuple_SetItem(made.get(), 2, python::Integer(static_cast<int64_t>(replay->patches())).Detach());
    py.PyTuple_SetItem(made.get(), 0, CapsuleOf(std::move(replay)).Detach());
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

PyObject* DropReplayEntry(PyObject*, PyObject* arguments) {
  return Enter("giving up a graph", [arguments] {
    Reader reader(arguments);
    ReplayOf(reader.Next()).Drop();
    return Object::Share(python::Known()->none);
  });
}

PyObject* PrepareConditionalsEntry(PyObject*, PyObject* arguments) {
  return Enter("preparing conditional nodes", [arguments] {
    Reader reader(arguments);
    Streams& streams = AcceleratorOf(reader).streams();
    {
      // The driver loads a kernel, for which it may wait for the device, as long as a collective waits for a lost peer:
      // who watches for that is Python's.
      python::ReleaseGil released;
      streams.conditionals();
    }
    return Object::Share(python::Known()->none);
  });
}

PyObject* OpenConditionalEntry(PyObject*, PyObject* arguments) {
  return Enter("capturing a conditional node", [arguments] {
    const python::Functions& py = *python::Known();
    Reader reader(arguments);
    Conditionals& conditionals = AcceleratorOf(reader).streams().conditionals();
    const uint64_t stream = Address(reader), flag = Address(reader);
    const bool repeats = reader.Integer() != 0;
    const Captures::Conditional made = conditionals.Open(stream, flag, repeats, Address(reader));
    Object triple = python::Check(py.PyTuple_New(3), "PyTuple_New");
    ptrdiff_t place = 0;
    for (const uint64_t value : {made.node, made.handle, made.body}) {
      py.PyTuple_SetItem(triple.get(), place++, python::Integer(static_cast<int64_t>(value)).Detach());
    }
    return triple;
  });
}

PyObject* CloseConditionalEntry(PyObject*, PyObject* arguments) {
  return Enter("capturing the body of a conditional node", [arguments] {
    Reader reader(arguments);
    Conditionals& conditionals = AcceleratorOf(reader).streams().conditionals();
    const uint64_t inside = Address(reader), handle = Address(reader);
    conditionals.Close(inside, handle, Address(reader));
    return Object::Share(python::Known()->none);
  });
}

Replay& ReplayOf(PyObject* capsule) { return OwnedBy<Replay>(capsule); }

}  // namespace flagos
