// Running an executable: checks, donation, then at once in the caller's thread or in the queues of the devices.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "accelerator.h"
#include "api.h"
#include "call.h"
#include "device_transfer.h"
#include "executable.h"
#include "log.h"

namespace flagos {
namespace {

// One device's part of a launch.
struct Share {
  Place place;
  const std::vector<Memory*>* memories;
  std::vector<Argument> arguments;
  std::vector<Ref<Contents>> outputs;
  Ref<Event> done;
  Ref<Event> issued;  // of an accelerator: its work is enqueued; otherwise the same event
};

struct Launch {
  Ref<Executable> executable;
  uint64_t number = 0;                     // in the order of dispatch
  std::vector<Memory*> portable_memories;  // of a device that the program was not compiled for
  std::unique_ptr<LaunchState> state;
  std::vector<Share> shares;
  bool nested = QueueScope::InCallback();  // launched by a host callback
};

std::string Name(const Executable& executable, size_t argument) {
  return Format("execute: argument %zu of %s", argument, executable.info().name.c_str());
}

void CheckArgument(const Executable& executable, size_t number, const Buffer* buffer, const Device& device) {
  if (buffer == nullptr) Fail(FLAGOS_INVALID_ARGUMENT, "%s is NULL", Name(executable, number).c_str());
  if (buffer->context() != executable.context.get()) {
    Fail(FLAGOS_INVALID_ARGUMENT, "%s belongs to another context; copy it through the host",
         Name(executable, number).c_str());
  }
  if (buffer->device() != &device) {
    Fail(FLAGOS_INVALID_ARGUMENT, "%s is on %s, but runs on %s; copy it with buffer_copy",
         Name(executable, number).c_str(), buffer->device()->debug_string.c_str(), device.debug_string.c_str());
  }
  const Shape& expected = executable.info().arguments[number];
  // A token carries nothing: hosts that have no tokens of their own pass an empty array for one.
  if (expected.type == FLAGOS_TYPE_TOKEN && buffer->shape.bytes == 0) return;
  if (buffer->shape != expected) {
    Fail(FLAGOS_INVALID_ARGUMENT, "%s is %s, but was compiled as %s; compile again for other shapes",
         Name(executable, number).c_str(), ToString(buffer->shape).c_str(), ToString(expected).c_str());
  }
}

// Which arguments this launch gives up.
std::vector<char> Donations(const Executable& executable, const FlagosExecuteArgs& args) {
  const ProgramInfo& info = executable.info();
  std::vector<char> donated(info.arguments.size(), 0);
  for (const int64_t number : info.donors) donated[static_cast<size_t>(number)] = 1;
  if (args.num_non_donatable > 0 && args.non_donatable == nullptr) {
    Fail(FLAGOS_INVALID_ARGUMENT, "execute: non_donatable is NULL but num_non_donatable is %zu",
         args.num_non_donatable);
  }
  for (size_t i = 0; i < args.num_non_donatable; ++i) {
    const int64_t number = args.non_donatable[i];
    if (number < 0 || static_cast<size_t>(number) >= donated.size()) {
      Fail(FLAGOS_INVALID_ARGUMENT, "execute: non_donatable[%zu] is %" PRId64 ", but %s has %zu arguments", i, number,
           info.name.c_str(), donated.size());
    }
    donated[static_cast<size_t>(number)] = 0;
  }
  return donated;
}

// A buffer that is given up must not be passed a second time.
void CheckDuplicates(const Executable& executable, FlagosBuffer* const* buffers, const std::vector<char>& donated) {
  std::vector<std::pair<const Buffer*, size_t>> sorted;
  sorted.reserve(donated.size());
  for (size_t i = 0; i < donated.size(); ++i) sorted.emplace_back(buffers[i], i);
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 1; i < sorted.size(); ++i) {
    const size_t first = sorted[i - 1].second, second = sorted[i].second;
    if (sorted[i].first == sorted[i - 1].first && (donated[first] || donated[second])) {
      Fail(FLAGOS_INVALID_ARGUMENT,
           "execute: arguments %zu and %zu of %s are the same buffer, and argument %zu is donated; pass a copy, or do "
           "not "
           "donate it",
           first, second, executable.info().name.c_str(), donated[first] ? first : second);
    }
  }
}

// Checks everything, then takes the contents: when it throws, no buffer has been given up.
void TakeArguments(const Executable& executable, FlagosBuffer* const* const* buffers, const std::vector<char>& donated,
                   std::vector<Share>& shares) {
  const size_t count = donated.size();
  const bool donates = std::find(donated.begin(), donated.end(), 1) != donated.end();
  for (size_t d = 0; d < shares.size(); ++d) {
    if (count > 0 && (buffers == nullptr || buffers[d] == nullptr)) {
      Fail(FLAGOS_INVALID_ARGUMENT, "execute: the arguments of device %zu are NULL", d);
    }
    shares[d].arguments.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      CheckArgument(executable, i, buffers[d][i], *shares[d].place.device);
      Ref<Contents> contents = buffers[d][i]->contents();
      if (!contents) contents = buffers[d][i]->Require(Name(executable, i).c_str());
      shares[d].arguments.push_back({std::move(contents), &executable.info().arguments[i], donated[i] != 0});
    }
    if (donates) CheckDuplicates(executable, buffers[d], donated);
  }
  if (!donates) return;
  for (size_t d = 0; d < shares.size(); ++d) {
    for (size_t i = 0; i < count; ++i) {
      if (donated[i]) buffers[d][i]->Take("donated to an execution");
    }
  }
}

// Runs the program of one share. On an accelerator that enqueues its work, which is done at `point`.
std::vector<Ref<Block>> RunProgram(Launch& launch, Share& share, Ref<Point>& point) {
  Program& program = *launch.executable->program;
  Accelerator* const accelerator = share.place.device->accelerator.get();
  if (accelerator == nullptr) return program.Run(share.place, launch.state.get(), share.arguments, *share.memories);
  Memory* const memory = share.place.device->default_memory();
  for (Argument& argument : share.arguments) {
    // Programs compute on the device's memory; what lies elsewhere is brought there.
    Memory* const from = argument.contents->block().memory();
    if (from != memory && argument.contents->block().bytes() > 0) {
      auto copy = Make<Contents>(memory->context, Make<Event>(), Make<Event>(), nullptr);
      CopyContents(from, *argument.contents, memory, *copy);
      argument.contents = std::move(copy);
    }
    argument.contents->JoinCompute(*accelerator);
  }
  const std::vector<Memory*> memories(share.memories->size(), memory);
  std::vector<Ref<Block>> blocks = program.Run(share.place, launch.state.get(), share.arguments, memories);
  point = accelerator->streams().Record(Stream::kCompute);
  for (size_t i = 0; i < blocks.size(); ++i) {
    if ((*share.memories)[i] == memory || blocks[i]->bytes() == 0) continue;
    Contents result(memory->context, Event::Ready(), blocks[i]), copy(memory->context, Make<Event>());
    result.SetPoint(point);
    CopyContents(memory, result, (*share.memories)[i], copy);
    blocks[i] = copy.shared_block();
  }
  return blocks;
}

// The time in which a share runs; on an accelerator, in which it is enqueued. What there is to say of the program is
// asked for before it begins.
ScopedSpan SpanOf(const Launch& launch, const Share& share) {
  Profiler& profiler = share.place.device->context->profiler;
  SpanFacts facts{share.place.device->id};
  if (profiler.active()) facts.program = launch.executable->program->NumberIn(profiler);
  return ScopedSpan(profiler, SpanCategory::kExecute, nullptr, facts);
}

// Of what a launch left. Launches make and give up most of it.
void RecordMemory(const Device& device) noexcept {
  Profiler& profiler = device.context->profiler;
  if (profiler.active()) profiler.RecordMemory(device.id, device.default_memory()->in_use());
}

// Says that the share's work is enqueued, and when it is done: at `point`, or now.
void Finish(const Share& share, Status status, Ref<Point> point) {
  // The device is asked before anybody who waits for the launch goes on.
  if (status.ok() && point) {
    share.done->CompleteAt(std::move(point));
  } else {
    share.done->Complete(status);
  }
  share.issued->Complete(std::move(status));
}

// Runs one share in this thread and completes its outputs.
void RunShare(Launch& launch, Share& share) noexcept {
  Status status;
  Ref<Point> point;
  try {
    for (const Argument& argument : share.arguments) {
      if (const Status& made = argument.contents->issued->status(); !made.ok()) throw Failure(made);
    }
    const ScopedSpan span = SpanOf(launch, share);
    std::vector<Ref<Block>> blocks = RunProgram(launch, share, point);
    for (size_t i = 0; i < blocks.size(); ++i) {
      share.outputs[i]->SetBlock(std::move(blocks[i]));
      share.outputs[i]->SetPoint(point);
    }
  } catch (...) {
    status = StatusOfException("execute");
    if (launch.state) launch.state->Abort(status);
  }
  // What was given up is free, and the outputs have one owner less, before anybody hears that it is done.
  share.arguments.clear();
  share.outputs.clear();
  RecordMemory(*share.place.device);
  Finish(share, std::move(status), std::move(point));
}

void FailAll(Launch& launch, const Status& status) {
  // Those of other processes are waiting already, or will be.
  if (launch.executable->spans() && launch.state) launch.state->Abort(status);
  for (Share& share : launch.shares) {
    share.arguments.clear();
    share.outputs.clear();
    Finish(share, status, nullptr);
  }
}

// Puts every share into its device's queue, behind what was dispatched before. With the order's mutex.
void Enqueue(const std::shared_ptr<Launch>& launch) {
  Context& context = *launch->executable->context;
  std::vector<std::pair<DeviceQueue*, Task>> tasks;
  tasks.reserve(launch->shares.size());
  for (Share& share : launch->shares) {
    DeviceQueue* queue = share.place.device->queue.get();
    // A host callback waits for whatever its function does.
    if (!launch->executable->info().calls_host) share.issued->queue = queue;
    tasks.emplace_back(queue, [launch, &share, queue] {
      QueueScope scope(queue, launch->nested);
      RunShare(*launch, share);
    });
  }
  context.launch_order.Enter(launch->number, std::move(tasks), context.queues);
}

// Outputs of a share that runs later: empty contents that share one event.
void Promise(Share& share, size_t outputs) {
  share.done = Make<Event>();
  share.issued = share.place.device->accelerator ? Make<Event>() : share.done;
  share.outputs.reserve(outputs);
  for (size_t i = 0; i < outputs; ++i) {
    share.outputs.push_back(Make<Contents>(share.place.device->context, share.done, share.issued, nullptr));
  }
  share.place.device->Track(share.issued);
}

// Launches over several processes reach the queues in the order in which the host makes them, alike in every process,
// or they would wait for each other: this one comes after the one before it, among `inputs`, and before the next. With
// the order's mutex.
Ref<Event> TakeTurn(Context& context, std::vector<Ref<Event>>& inputs) {
  auto queued = Make<Event>();
  if (context.last_spanning && !context.last_spanning->is_complete()) inputs.push_back(context.last_spanning);
  context.last_spanning = queued;
  return queued;
}

// Asks the devices whether the arguments are there, which takes no lock.
void Poll(const Launch& launch) {
  for (const Share& share : launch.shares) {
    for (const Argument& argument : share.arguments) argument.contents->issued->ready();
  }
}

// What the launch waits for before it may enter the queues. What stands in the queue of a share's own device will be
// there when the share's place is reached. With the order's mutex.
std::vector<Ref<Event>> Outside(const Launch& launch) {
  std::vector<Ref<Event>> events;
  for (const Share& share : launch.shares) {
    for (const Argument& argument : share.arguments) {
      const Ref<Event>& issued = argument.contents->issued;
      const bool there = issued->is_complete() && issued->status().ok();
      if (!there && issued->queue != share.place.device->queue.get()) events.push_back(issued);
    }
  }
  return events;
}

// Returns what the launch waits for, or may hold up others by.
WaitsFor Dispatch(const std::shared_ptr<Launch>& launch) {
  const Executable& executable = *launch->executable;
  LaunchOrder& order = executable.context->launch_order;
  std::vector<Ref<Event>> outside;
  Ref<Event> queued;
  bool waits = false;
  Poll(*launch);
  {
    std::lock_guard<std::mutex> lock(order.mutex);
    launch->number = order.Next();
    outside = Outside(*launch);
    if (executable.spans()) queued = TakeTurn(*executable.context, outside);
    waits = !outside.empty();
    if (!waits) Enqueue(launch);
  }
  if (waits) {
    WhenAll(outside)->OnReady([launch, queued](const Status& status) {
      if (status.ok()) {
        std::lock_guard<std::mutex> lock(launch->executable->context->launch_order.mutex);
        Enqueue(launch);
      } else {
        FailAll(*launch, status);
      }
      if (queued) queued->Complete(Status());
    });
  } else if (queued) {
    queued->Complete(Status());
  }
  if (executable.spans()) return WaitsFor::kProcesses;
  return waits || executable.info().calls_host ? WaitsFor::kHost : WaitsFor::kNothing;
}

// Slows the caller down where it is too far ahead of a device. What a host callback launches is waited for by a launch
// that is in flight.
void LimitRunAhead(const Launch& launch) {
  if (launch.nested) return;
  const size_t bytes = launch.executable->launch_bytes();
  for (const Share& share : launch.shares) {
    RunAhead& run_ahead = *share.place.device->run_ahead;
    if (run_ahead.Fits(bytes)) continue;
    WaitsFor worst = WaitsFor::kNothing;
    for (Device* device : launch.executable->context->addressable_devices) {
      worst = std::max(worst, device->run_ahead->Worst());
    }
    ScopedSpan span(share.place.device->context->profiler, SpanCategory::kWait, "run ahead", {share.place.device->id});
    run_ahead.Admit(bytes, worst);
    python::RequireOpen();  // Python may have ended meanwhile
  }
}

// Whether it lies in memory that the host may write on when nobody needs it any more.
bool IsForeign(const Argument& argument) {
  const Contents& contents = *argument.contents;
  if (!contents.ready->ready() || !contents.ready->status().ok() || contents.block().writable()) return false;
  if (contents.block().bytes() == 0) return false;
  const Memory* memory = contents.block().memory();
  return memory != nullptr && memory->accelerator == nullptr;
}

// A copy of what is the host's own memory, as an array of NumPy that jnp.array was given, is one once the call returns:
// the caller may write there then. Where the device is busy the copy is made of what is kept here.
bool CopiesForeign(const Launch& launch) {
  if (!launch.executable->info().only_copies) return false;
  for (const Share& share : launch.shares) {
    if (std::any_of(share.arguments.begin(), share.arguments.end(), IsForeign)) return true;
  }
  return false;
}

void KeepForeign(Launch& launch) {
  for (Share& share : launch.shares) {
    for (Argument& argument : share.arguments) {
      if (!IsForeign(argument)) continue;
      const Block& theirs = argument.contents->block();
      Ref<Block> ours = Block::Allocate(theirs.memory(), theirs.bytes());
      std::memcpy(ours->data(), theirs.data(), theirs.bytes());
      argument.contents = Make<Contents>(share.place.device->context, Event::Ready(), std::move(ours));
    }
  }
}

// Short work whose inputs are there, on an idle device, costs less here than handing it to another thread; a host that
// waits for each launch has all its work done here.
bool RunInline(Launch& launch, bool copies_foreign) {
  if (launch.shares.size() != 1) return false;
  // What may wait for other processes keeps their order.
  if (launch.executable->spans() && !launch.executable->info().is_small) return false;
  Share& share = launch.shares[0];
  const bool wanted = copies_foreign || launch.executable->info().is_small ||
                      launch.executable->context->inline_launches ||
                      launch.executable->program->Immediate(*share.place.device) || python::EndsInterpreter();
  if (!wanted) return false;
  for (const Argument& argument : share.arguments) {
    if (!argument.contents->issued->ready() || !argument.contents->issued->status().ok()) return false;
  }
  DeviceQueue* queue = share.place.device->queue.get();
  if (!queue->TryEnter()) return false;
  struct Leave {
    DeviceQueue* queue;
    ~Leave() { queue->Leave(); }
  } leave{queue};
  QueueScope scope(queue, launch.nested);
  Status status;
  Ref<Point> point;
  std::vector<Ref<Block>> blocks;
  try {
    const ScopedSpan span = SpanOf(launch, share);
    blocks = RunProgram(launch, share, point);
  } catch (...) {
    status = StatusOfException("execute");
  }
  share.arguments.clear();
  RecordMemory(*share.place.device);
  share.issued = status.ok() ? Event::Ready() : Event::Failed(std::move(status));
  share.done = share.issued;
  if (point) {
    share.done = Make<Event>();
    share.done->CompleteAt(point);
  }
  const size_t outputs = launch.executable->info().outputs.size();
  blocks.resize(outputs);
  share.outputs.reserve(outputs);
  for (Ref<Block>& block : blocks) {
    share.outputs.push_back(Make<Contents>(share.place.device->context, share.done, share.issued, std::move(block)));
    share.outputs.back()->SetPoint(point);
  }
  return true;
}

std::vector<Share> MakeShares(Launch& launch, const FlagosExecuteArgs& args) {
  const Executable& executable = *launch.executable;
  std::vector<Share> shares;
  if (args.device == nullptr) {
    if (args.num_devices != executable.places.size()) {
      Fail(FLAGOS_INVALID_ARGUMENT, "execute: arguments for %zu devices are given, but %s is compiled for %zu here",
           args.num_devices, executable.info().name.c_str(), executable.places.size());
    }
    for (size_t i = 0; i < executable.places.size(); ++i) {
      shares.push_back({executable.places[i], &executable.output_memories[i], {}, {}, nullptr, nullptr});
    }
    return shares;
  }
  if (args.num_devices != 1 || executable.info().device_assignment.size() != 1) {
    Fail(FLAGOS_INVALID_ARGUMENT,
         "execute: a device is named, but %s is compiled for %zu devices and called for %zu; only "
         "a program of one device can be moved",
         executable.info().name.c_str(), executable.info().device_assignment.size(), args.num_devices);
  }
  if (args.device->context != executable.context.get() || !args.device->addressable()) {
    Fail(FLAGOS_INVALID_ARGUMENT, "execute: %s belongs to another context or process",
         args.device->debug_string.c_str());
  }
  launch.portable_memories = executable.OutputMemories(*args.device);
  shares.push_back({{args.device, 0, 0}, &launch.portable_memories, {}, {}, nullptr, nullptr});
  return shares;
}

void CheckOutputs(const Executable& executable, const FlagosExecuteArgs& args) {
  if (args.num_arguments != executable.info().arguments.size()) {
    Fail(FLAGOS_INVALID_ARGUMENT, "execute: %zu arguments are given, but %s takes %zu", args.num_arguments,
         executable.info().name.c_str(), executable.info().arguments.size());
  }
  if (executable.info().outputs.empty()) return;
  FLAGOS_REQUIRE(args, outputs);
  for (size_t d = 0; d < args.num_devices; ++d) {
    if (args.outputs[d] == nullptr) Fail(FLAGOS_INVALID_ARGUMENT, "execute: outputs[%zu] is NULL", d);
  }
}

// A host callback may raise, which its program's caller hears at once: whoever hands on the tokens of such a program, as
// JAX does, would otherwise hand on a failed one. Not within a callback, whose device is busy with it.
bool WaitsForCallbacks(const Launch& launch) {
  const Context& context = *launch.executable->context;
  return launch.executable->info().calls_host && !launch.nested && !context.inline_launches &&
         std::none_of(launch.shares.begin(), launch.shares.end(),
                      [](const Share& share) { return share.place.device->accelerator != nullptr; });
}

// What the host may wait for. The streams of an accelerator keep the order of its launches by themselves.
Ref<Event> Done(const Share& share) {
  return share.place.device->accelerator ? share.done : share.place.device->InOrder(share.done);
}

}  // namespace

namespace api {

FlagosError* execute(FlagosExecuteArgs* host) {
  return Enter("execute", host, [](FlagosExecuteArgs& args) {
    FLAGOS_REQUIRE(args, executable);
    python::RequireOpen();
    auto launch = std::make_shared<Launch>();
    launch->executable = Ref<Executable>::Share(args.executable);
    const Executable& executable = *args.executable;
    launch->shares = MakeShares(*launch, args);
    CheckOutputs(executable, args);
    const size_t outputs = executable.info().outputs.size();
    const std::vector<char> donated = Donations(executable, args);
    // Everything that may fail for lack of memory comes before a buffer is given up, as far as that is foreseeable.
    std::vector<std::vector<std::unique_ptr<Buffer>>> made(launch->shares.size());
    if (executable.info().device_assignment.size() > 1)
      launch->state = executable.program->Begin(launch->shares.size());
    TakeArguments(executable, args.arguments, donated, launch->shares);
    LimitRunAhead(*launch);
    const bool copies_foreign = CopiesForeign(*launch);
    if (!RunInline(*launch, copies_foreign)) {
      if (copies_foreign) KeepForeign(*launch);
      for (Share& share : launch->shares) Promise(share, outputs);
      // The outputs' handles first: Dispatch may run in other threads and clear the shares.
      for (size_t d = 0; d < launch->shares.size(); ++d) {
        for (size_t i = 0; i < outputs; ++i) {
          const Share& share = launch->shares[d];
          made[d].push_back(
              std::make_unique<Buffer>((*share.memories)[i], executable.info().outputs[i], share.outputs[i]));
        }
      }
      std::vector<Ref<Event>> done;
      for (const Share& share : launch->shares) done.push_back(Done(share));
      const bool waits = WaitsForCallbacks(*launch);
      std::vector<std::pair<RunAhead*, Ref<Event>>> in_flight;
      for (const Share& share : launch->shares) in_flight.emplace_back(share.place.device->run_ahead.get(), share.done);
      const WaitsFor waits_for = Dispatch(launch);
      for (auto& [run_ahead, event] : in_flight) {
        run_ahead->Add(std::move(event), executable.launch_bytes(), waits_for);
      }
      if (waits) {
        for (const Ref<Event>& event : done) {
          if (const Status& status = event->Wait(); !status.ok()) throw Failure(status);
        }
      }
      for (size_t d = 0; d < done.size(); ++d) {
        for (size_t i = 0; i < outputs; ++i) args.outputs[d][i] = made[d][i].release();
        if (args.done != nullptr) args.done[d] = done[d].Detach();
      }
      return;
    }
    Share& share = launch->shares[0];
    if (!share.done->is_complete()) {
      share.place.device->run_ahead->Add(share.done, executable.launch_bytes(), WaitsFor::kNothing);
    }
    for (size_t i = 0; i < outputs; ++i) {
      made[0].push_back(
          std::make_unique<Buffer>((*share.memories)[i], executable.info().outputs[i], std::move(share.outputs[i])));
    }
    for (size_t i = 0; i < outputs; ++i) args.outputs[0][i] = made[0][i].release();
    if (args.done != nullptr) args.done[0] = Done(share).Detach();
  });
}

}  // namespace api
}  // namespace flagos
