#include "python_program.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <unordered_map>

#include "accelerator.h"
#include "barrier.h"
#include "bridge.h"
#include "cpu/lapack.h"
#include "description.h"
#include "log.h"
#include "replays.h"
#include "tensor.h"
#include "tile_program.h"

namespace flagos {
namespace {

using python::Object;
using python::Reader;

// Seconds that collectives of a launch wait on the native side; 0: its devices meet in Python.
double TimeoutOf(PyObject* launch) {
  const python::Functions& py = *python::Known();
  const double seconds = py.PyFloat_AsDouble(python::Attribute(launch, "native_timeout").get());
  if (py.PyErr_Occurred() != nullptr) throw Failure(python::TakeException("begin"));
  return seconds;
}

// Where the devices of a launch meet. The interpreter's part of it is made when it is first needed: what was recorded
// goes without.
class PythonLaunch final : public LaunchState {
 public:
  // `runner`: of bridge.py; outlives this object. With the GIL, unless `records_rendezvous`.
  PythonLaunch(PyObject* runner, size_t shares, bool records_rendezvous) : runner_(runner), barrier_(shares) {
    if (records_rendezvous) return;
    const double seconds = TimeoutOf(get());
    if (seconds > 0) rendezvous_.emplace(std::chrono::nanoseconds(static_cast<int64_t>(std::min(seconds, 1e9) * 1e9)));
  }
  ~PythonLaunch() override {
    if (launch_ != nullptr) python::Discard(launch_, 0);
  }

  void Abort(const Status& status) noexcept override {
    barrier_.Abort(status);
    if (rendezvous_) rendezvous_->Abort();
    python::Gil gil;
    if (!gil) return;
    try {
      Object abort = python::Attribute(get(), "abort");
      Object code = python::Integer(status.code());
      Object message = python::Text(status.data()->message);
      python::Call(abort.get(), {code.get(), message.get()}, "abort");
    } catch (...) {
      Log(FLAGOS_LOG_ERROR, "%s", StatusOfException("aborting a launch").data()->message.c_str());
    }
  }

  // With the GIL, which is given up in between: of two that are made the first counts.
  PyObject* get() {
    if (launch_ == nullptr) {
      Object begin = python::Attribute(runner_, "begin");
      Object made = python::Call(begin.get(), {}, "begin");
      if (launch_ == nullptr) launch_ = made.Detach();
    }
    return launch_;
  }
  Barrier& barrier() noexcept { return barrier_; }
  // NULL where devices of other processes may take part.
  Rendezvous* rendezvous() noexcept { return rendezvous_ ? &*rendezvous_ : nullptr; }

 private:
  PyObject* const runner_;
  PyObject* launch_ = nullptr;  // guarded by the GIL
  Barrier barrier_;
  std::optional<Rendezvous> rendezvous_;
};

class PythonProgram final : public Program, public LibraryCaller {
 public:
  // `compiled`: (description, runner, whether devices may meet in what is recorded). With the GIL.
  explicit PythonProgram(PyObject* compiled) {
    Reader reader(compiled);
    Reader description = reader.Tuple();
    info_ = ReadInfo(description);
    native_ = NativeForm(description.Tuple(), info_.num_replicas * info_.num_partitions);
    runner_ = Object::Share(reader.Next()).Detach();
    records_rendezvous_ = reader.Integer() != 0;
  }

  const NativeForm& native() const noexcept { return native_; }

  void CallLibrary(const Place& place, LaunchState* state, int64_t number, void* const* sources, void** targets,
                   std::vector<Ref<Block>>& allocated, std::vector<Ref<Block>>& done) override;
  void Drop(std::vector<Ref<Block>>& blocks) noexcept override {
    python::Gil gil;  // without one the process ends, and its memory goes with it
    blocks.clear();
  }

  ~PythonProgram() override {
    for (const auto& bound : bound_) {
      python::Discard(bound.second.execute, 0);
      python::Discard(bound.second.call, 0);
    }
    python::Discard(runner_, info_.generated_code_bytes);
  }

  std::unique_ptr<LaunchState> Begin(size_t shares) override {
    if (records_rendezvous_) return std::make_unique<PythonLaunch>(runner_, shares, true);
    python::Gil gil;
    CheckOpen(gil);
    return std::make_unique<PythonLaunch>(runner_, shares, false);
  }

  std::vector<Ref<Block>> Run(const Place& place, LaunchState* state, std::vector<Argument>& arguments,
                              const std::vector<Memory*>& memories) override;
  std::vector<Ref<Block>> RunSteps(const Place& place, LaunchState* state, std::vector<Argument>& arguments,
                                   const std::vector<Memory*>& memories, bool in_place);

  std::shared_ptr<const ProgramNotes> Notes() noexcept override;
  bool Immediate(const Device& device) override { return replays_.Has(device); }

  std::string Artifact(int32_t kind) override {
    python::Gil gil;
    CheckOpen(gil);
    Object artifact = python::Attribute(runner_, "artifact");
    Object number = python::Integer(kind);
    Object bytes = python::Call(artifact.get(), {number.get()}, "artifact");
    char* data = nullptr;
    ptrdiff_t size = 0;
    if (python::Known()->PyBytes_AsStringAndSize(bytes.get(), &data, &size) != 0) {
      throw Failure(python::TakeException("artifact"));
    }
    return std::string(data, static_cast<size_t>(size));
  }

 private:
  static void CheckOpen(const python::Gil& gil) {
    if (!gil) python::FailTooLate();
  }

  // The program on one device, as the bridge's `bind` has it.
  struct Bound {
    PyObject* execute;
    PyObject* call;
  };
  const Bound& BoundTo(const Place& place);
  // A library call that is a collective among devices of this process; as CallLibrary.
  void Meet(const Place& place, PythonLaunch& launch, int64_t number, const NativeForm::Call& call,
            void* const* sources, void** targets, std::vector<Ref<Block>>& allocated);
  // Whether the arguments that the program uses up are this launch's alone.
  bool InPlace(const std::vector<Argument>& arguments) const noexcept;

  // A list of tensors over memory that outlives the call they are made for; None where there is no memory.
  static Object Tensors(void* const* addresses, const std::vector<Shape>& shapes) {
    const python::Functions& py = *python::Known();
    Object list = python::Check(py.PyList_New(static_cast<ptrdiff_t>(shapes.size())), "PyList_New");
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (addresses[i] == nullptr) {
        py.PyList_SetItem(list.get(), static_cast<ptrdiff_t>(i), Object::Share(py.none).Detach());
        continue;
      }
      Object capsule = ToCapsule(addresses[i], shapes[i]);
      Object tensor = python::Call(TheBridge().from_dlpack, {capsule.get()}, "from_dlpack");
      py.PyList_SetItem(list.get(), static_cast<ptrdiff_t>(i), tensor.Detach());
    }
    return list;
  }

  NativeForm native_;
  PyObject* runner_;
  bool records_rendezvous_ = false;
  std::unordered_map<int64_t, Bound> bound_;  // by device id; guarded by the GIL
  Replays replays_{info_, runner_};
  std::shared_ptr<const ProgramNotes> notes_;  // once asked for; accessed atomically
};

std::shared_ptr<const ProgramNotes> PythonProgram::Notes() noexcept {
  if (auto known = std::atomic_load(&notes_)) return known;
  // Whoever waits for the interpreter holds nothing: two threads may ask at once, and get the same.
  python::Gil gil;
  if (!gil) return nullptr;
  std::shared_ptr<const ProgramNotes> made;
  try {
    auto notes = std::make_shared<ProgramNotes>();
    Object ask = python::Attribute(runner_, "trace_notes");
    Object answer = python::Call(ask.get(), {}, "trace_notes");
    Reader reader(answer.get());
    notes->facts = reader.Text();
    Reader names = reader.Tuple();
    while (!names.done()) notes->steps.push_back(names.Text());
    made = std::move(notes);
  } catch (...) {
    Log(FLAGOS_LOG_ERROR, "a trace has only the name of %s: %s", info_.name.c_str(),
        StatusOfException("trace_notes").data()->message.c_str());
    return nullptr;
  }
  std::atomic_store(&notes_, made);
  return made;
}

const PythonProgram::Bound& PythonProgram::BoundTo(const Place& place) {
  const auto found = bound_.find(place.device->id);
  if (found != bound_.end()) return found->second;
  Object bind = python::Attribute(runner_, "bind");
  Object device = python::Integer(place.device->id);
  Object local = python::Integer(place.device->local_hardware_id);
  Object replica = python::Integer(place.replica);
  Object partition = python::Integer(place.partition);
  Object pair = python::Call(bind.get(), {device.get(), local.get(), replica.get(), partition.get()}, "bind");
  Reader reader(pair.get());
  Object execute = Object::Share(reader.Next()), call = Object::Share(reader.Next());
  // Another thread may have bound it meanwhile, as Python runs in between.
  const auto [place_of, is_new] = bound_.emplace(place.device->id, Bound{execute.get(), call.get()});
  if (is_new) {
    execute.Detach();
    call.Detach();
  }
  return place_of->second;
}

// Where the devices of the launch meet; None for a launch of one.
PyObject* RendezvousObject(LaunchState* state) {
  return state ? static_cast<PythonLaunch*>(state)->get() : python::Known()->none;
}

DlDevice DeviceOf(const Memory* memory) {
  return memory->accelerator ? memory->accelerator->facts().dlpack : kHostDevice;
}

Object ToTensor(const Bridge& bridge, const Argument& argument) {
  const python::Functions& py = *python::Known();
  if (argument.shape->type == FLAGOS_TYPE_TOKEN) return python::Check(py.PyTuple_New(0), "PyTuple_New");
  const Ref<Block>& block = argument.contents->shared_block();
  if (PyObject* tensor = block->tensor(*argument.shape)) return Object::Share(tensor);
  Object capsule = ToCapsule(block, *argument.shape, DeviceOf(block->memory()));
  return python::Call(bridge.from_dlpack, {capsule.get()}, "from_dlpack");
}

// The result's block: the donated argument's if the program wrote there, else the tensor's own memory, without a copy.
Ref<Block> ToBlock(const Bridge& bridge, PyObject* tensor, const Shape& shape, Memory* memory,
                   std::vector<Ref<Block>>& reusable) {
  if (shape.type == FLAGOS_TYPE_TOKEN) return Block::Allocate(memory, 0);
  Object capsule = python::Call(bridge.to_dlpack, {tensor}, "to_dlpack");
  const TensorView view = FromCapsule(capsule.get(), shape, "execute", DeviceOf(memory));
  for (Ref<Block>& block : reusable) {
    if (block && block->data() == view.data && block->bytes() == view.bytes && view.bytes > 0 &&
        block->memory() == memory) {
      return std::move(block);
    }
  }
  const bool aligned = reinterpret_cast<uintptr_t>(view.data) % kHostAlignment == 0;
  if (aligned || view.bytes == 0 || memory->accelerator) return Block::Hold(memory, view.data, shape, tensor);
  Ref<Block> copy = Block::Allocate(memory, view.bytes);
  std::memcpy(copy->data(), view.data, view.bytes);
  return copy;
}

void PythonProgram::CallLibrary(const Place& place, LaunchState* state, int64_t number, void* const* sources,
                                void** targets, std::vector<Ref<Block>>& allocated, std::vector<Ref<Block>>& done) {
  const NativeForm::Call& call = native_.calls.at(static_cast<size_t>(number));
  if (call.collective && state != nullptr) {
    auto& launch = static_cast<PythonLaunch&>(*state);
    if (launch.rendezvous() != nullptr) return Meet(place, launch, number, call, sources, targets, allocated);
  }
  python::Gil gil;
  CheckOpen(gil);
  done.clear();
  const python::Functions& py = *python::Known();
  Object index = python::Integer(number);
  Object operands = Tensors(sources, call.operands), results = Tensors(targets, call.results);
  Object tensors = python::Call(BoundTo(place).call,
                                {index.get(), operands.get(), results.get(), RendezvousObject(state)}, "execute");
  std::vector<Ref<Block>> none;
  ptrdiff_t next = 0;
  for (size_t i = 0; i < call.results.size(); ++i) {
    if (targets[i] != nullptr) continue;
    PyObject* tensor = py.PyList_GetItem(tensors.get(), next++);
    if (tensor == nullptr) throw Failure(python::TakeException("execute"));
    allocated.push_back(ToBlock(TheBridge(), tensor, call.results[i], place.device->default_memory(), none));
    targets[i] = allocated.back()->data();
  }
}

void PythonProgram::Meet(const Place& place, PythonLaunch& launch, int64_t number, const NativeForm::Call& call,
                         void* const* sources, void** targets, std::vector<Ref<Block>>& allocated) {
  for (size_t i = 0; i < call.results.size(); ++i) {
    if (targets[i] != nullptr) continue;
    allocated.push_back(Block::Allocate(place.device->default_memory(), call.results[i].bytes));
    targets[i] = allocated.back()->data();
  }
  const int64_t device = place.replica * info_.num_partitions + place.partition;
  std::vector<int64_t> missing;
  const Rendezvous::Outcome outcome =
      launch.rendezvous()->Perform(number, *call.collective, device, sources, targets, missing);
  if (outcome == Rendezvous::Outcome::kDone) return;
  // The interpreter says what happened, as it does where devices meet there.
  python::Gil gil;
  CheckOpen(gil);
  const python::Functions& py = *python::Known();
  if (outcome == Rendezvous::Outcome::kAborted) missing.clear();
  Object late = python::Check(py.PyTuple_New(static_cast<ptrdiff_t>(missing.size())), "PyTuple_New");
  for (size_t i = 0; i < missing.size(); ++i) {
    py.PyTuple_SetItem(late.get(), static_cast<ptrdiff_t>(i), python::Integer(missing[i]).Detach());
  }
  Object give_up = python::Attribute(runner_, "give_up"), index = python::Integer(number);
  Object participant = python::Integer(device);
  python::Call(give_up.get(), {index.get(), participant.get(), late.get(), launch.get()}, "execute");
  Fail(FLAGOS_INTERNAL,
       "execute: a collective that failed says no reason; this is a defect of the backend, please report it");
}

bool PythonProgram::InPlace(const std::vector<Argument>& arguments) const noexcept {
  return !info_.donors.empty() && std::all_of(info_.donors.begin(), info_.donors.end(), [&arguments](int64_t donor) {
    const Argument& argument = arguments[static_cast<size_t>(donor)];
    return argument.donated && argument.contents->SoleOwner();
  });
}

std::vector<Ref<Block>> PythonProgram::Run(const Place& place, LaunchState* state, std::vector<Argument>& arguments,
                                           const std::vector<Memory*>& memories) {
  // Decided before the GIL: the blocks that only this launch sees may be written over.
  const bool in_place = InPlace(arguments);
  const bool accelerated = place.device->accelerator != nullptr;
  std::vector<Ref<Block>> blocks;
  try {
    if (accelerated) {
      std::shared_ptr<Replayed> replayed = replays_.Find(place, arguments, in_place);
      Replays::Arrays arrays;
      if (replayed != nullptr) arrays = replays_.Prepare(*replayed, place, arguments, memories);
      Barrier* const barrier =
          records_rendezvous_ && state != nullptr ? &static_cast<PythonLaunch*>(state)->barrier() : nullptr;
      const bool launched = barrier != nullptr ? replays_.LaunchTogether(replayed.get(), place, arrays, *barrier)
                                               : replays_.Launch(replayed.get(), arrays);
      if (launched) return std::move(arrays.results);
    }
    blocks = RunSteps(place, state, arguments, memories, in_place);
  } catch (const Failure& failure) {
    // The next launch finds what we keep for later.
    if (accelerated && failure.status().code() == FLAGOS_RESOURCE_EXHAUSTED) place.device->accelerator->DropCache();
    throw;
  }
  if (accelerated) replays_.Ran(place);
  return blocks;
}

std::vector<Ref<Block>> PythonProgram::RunSteps(const Place& place, LaunchState* state,
                                                std::vector<Argument>& arguments, const std::vector<Memory*>& memories,
                                                bool in_place) {
  python::Gil gil;
  CheckOpen(gil);
  const python::Functions& py = *python::Known();
  const Bridge& bridge = TheBridge();
  Object list = python::Check(py.PyList_New(static_cast<ptrdiff_t>(arguments.size())), "PyList_New");
  std::vector<Ref<Block>> reusable;
  for (size_t i = 0; i < arguments.size(); ++i) {
    py.PyList_SetItem(list.get(), static_cast<ptrdiff_t>(i), ToTensor(bridge, arguments[i]).Detach());
    if (in_place && arguments[i].donated) reusable.push_back(arguments[i].contents->shared_block());
  }
  Object flag = python::Integer(in_place);
  Object results = python::Call(BoundTo(place).execute, {list.get(), flag.get(), RendezvousObject(state)}, "execute");
  const size_t count = info_.outputs.size();
  if (py.PyList_Size(results.get()) != static_cast<ptrdiff_t>(count)) {
    py.PyErr_Clear();
    Fail(FLAGOS_INTERNAL,
         "execute: %s did not return a list of its %zu outputs; this is a defect of the backend, please "
         "report it",
         info_.name.c_str(), count);
  }
  std::vector<Ref<Block>> blocks;
  blocks.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* tensor = py.PyList_GetItem(results.get(), static_cast<ptrdiff_t>(i));
    blocks.push_back(ToBlock(bridge, tensor, info_.outputs[i], memories[i], reusable));
  }
  return blocks;
}

// The program of the bridge's answer, natively where it has a native form. With the GIL.
std::unique_ptr<Program> MakeProgram(PyObject* compiled) {
  auto python = std::make_unique<PythonProgram>(compiled);
  if (python->native().bytecode.empty()) return python;
  const NativeForm& native = python->native();
  LibraryCaller* const caller = python.get();
  if (!native.lapack.empty()) cpu::SetLapack(native.lapack);
  return MakeTileProgram(std::move(python), caller, native.bytecode, native.constants, native.functions);
}

}  // namespace

std::unique_ptr<Program> CompilePythonProgram(Context* context, const void* program, size_t size) {
  python::Require(context->python);
  python::Gil gil;
  if (!gil) python::FailTooLate();
  Object bytes = python::Bytes(program, size);
  Object facts = Facts(context);
  Object compiled = python::Call(TheBridge().compile, {bytes.get(), facts.get()}, "compile");
  return MakeProgram(compiled.get());
}

std::unique_ptr<Program> LoadPythonProgram(Context* context, const void* serialized, size_t size,
                                           const std::vector<int64_t>& assignment) {
  python::Require(context->python);
  python::Gil gil;
  if (!gil) python::FailTooLate();
  const python::Functions& py = *python::Known();
  Object bytes = python::Bytes(serialized, size);
  Object ids = python::Check(py.PyTuple_New(static_cast<ptrdiff_t>(assignment.size())), "PyTuple_New");
  for (size_t i = 0; i < assignment.size(); ++i) {
    py.PyTuple_SetItem(ids.get(), static_cast<ptrdiff_t>(i), python::Integer(assignment[i]).Detach());
  }
  Object facts = Facts(context);
  Object compiled = python::Call(TheBridge().load, {bytes.get(), ids.get(), facts.get()}, "executable_load");
  return MakeProgram(compiled.get());
}

}  // namespace flagos
