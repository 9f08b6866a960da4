#include "replays.h"

#include <algorithm>

#include "accelerator.h"
#include "description.h"
#include "log.h"
#include "python_replays.h"

namespace flagos {
namespace {

using python::Object;
using python::Reader;

// Runs before a program is captured: by then its kernels are compiled and chosen, and it is worth it.
constexpr int kRunsBeforeCapture = 2;

// What kernels were chosen for when they were captured: torch's own allocations are aligned so.
constexpr uintptr_t kCapturedAlignment = 256;

// Arguments that lie elsewhere, as rows of a tensor do, are copied before a replay, up to so many bytes together: that
// takes a device some 30 us, as the interpreter takes for a step or two.
constexpr size_t kMostCopied = size_t{64} << 20;

bool IsAligned(const Argument& argument) {
  const Block& block = argument.contents->block();
  return block.bytes() == 0 || reinterpret_cast<uintptr_t>(block.data()) % kCapturedAlignment == 0;
}

// Whether all arguments can be where a replay wants them: a copy of what it writes over would be lost.
bool CanAlign(const Replayed& replayed, const Place& place, const std::vector<Argument>& arguments) {
  size_t copied = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (IsAligned(arguments[i])) continue;
    const auto written = std::find(replayed.overwritten.begin(), replayed.overwritten.end(), static_cast<int64_t>(i));
    const bool is_local = arguments[i].contents->block().memory() == place.device->default_memory();
    copied += arguments[i].shape->bytes;
    if (written != replayed.overwritten.end() || !is_local || copied > kMostCopied) return false;
  }
  return true;
}

// An argument in memory that is aligned, behind what the compute stream does; `copies` has that memory.
void* Align(const Place& place, const Argument& argument, std::vector<Ref<Block>>& copies) {
  void* const data = argument.contents->block().data();
  if (IsAligned(argument)) return data;
  Accelerator* const accelerator = place.device->accelerator.get();
  const size_t bytes = argument.shape->bytes;
  copies.push_back(accelerator->AllocateOutput(place.device->default_memory(), bytes));
  accelerator->streams().Copy(Stream::kCompute, {copies.back()->data(), accelerator}, {data, accelerator}, bytes);
  return copies.back()->data();
}

}  // namespace

Replayed::~Replayed() { python::Discard(kept, 0); }

bool Replays::Has(const Device& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return replayed_.find(device.id) != replayed_.end();
}

std::shared_ptr<Replayed> Replays::Find(const Place& place, const std::vector<Argument>& arguments, bool in_place) {
  if (!info_.donors.empty() && !in_place) return nullptr;
  std::shared_ptr<Replayed> replayed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = replayed_.find(place.device->id);
    if (found != replayed_.end() && !found->second->replay->dropped()) replayed = found->second;
  }
  return replayed != nullptr && CanAlign(*replayed, place, arguments) ? replayed : nullptr;
}

Replays::Arrays Replays::Prepare(const Replayed& replayed, const Place& place, std::vector<Argument>& arguments,
                                 const std::vector<Memory*>& memories) const {
  Arrays made;
  made.addresses.reserve(arguments.size() + memories.size());
  for (const Argument& argument : arguments) made.addresses.push_back(Align(place, argument, made.copies));
  made.results.reserve(memories.size());
  for (size_t i = 0; i < memories.size(); ++i) {
    const int64_t argument = replayed.overwritten[i];
    if (argument >= 0) {
      made.results.push_back(arguments[static_cast<size_t>(argument)].contents->shared_block());
    } else if (info_.outputs[i].bytes == 0) {
      made.results.push_back(Block::Allocate(memories[i], 0));
    } else {
      made.results.push_back(place.device->accelerator->AllocateOutput(memories[i], info_.outputs[i].bytes));
    }
    made.addresses.push_back(made.results.back()->data());
  }
  return made;
}

bool Replays::Launch(Replayed* replayed, const Arrays& arrays) const {
  if (replayed == nullptr) return false;
  replayed->replay->Launch(arrays.addresses.data());
  return true;
}

bool Replays::LaunchTogether(Replayed* replayed, const Place& place, const Arrays& arrays, Barrier& barrier) const {
  // A device that waits for another may hold up an allocation there: all have theirs by now, and none goes on to others
  // before all have begun.
  if (!barrier.All(replayed != nullptr)) return false;
  Launch(replayed, arrays);
  Watch(*replayed, place);
  barrier.All(true);
  return true;
}

void Replays::Watch(Replayed& replayed, const Place& place) const {
  // What is enqueued before this moment is watched over if the moment is.
  const auto now = std::chrono::steady_clock::now();
  if (now < replayed.watched_until) return;
  python::Gil gil;
  if (!gil) return;
  Object launched = python::Attribute(runner_, "launched"), local = python::Integer(place.device->local_hardware_id);
  Object seconds = python::Call(launched.get(), {local.get()}, "launched");
  const double covered = python::Known()->PyFloat_AsDouble(seconds.get());
  if (python::Known()->PyErr_Occurred() != nullptr) throw Failure(python::TakeException("launched"));
  replayed.watched_until = now + std::chrono::nanoseconds(static_cast<int64_t>(covered * 1e9));
}

void Replays::Ran(const Place& place) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (++runs_[place.device->id] != kRunsBeforeCapture) return;
  }
  Capture(place);
}

void Replays::Capture(const Place& place) {
  python::Gil gil;
  if (!gil) return;
  Object local = python::Integer(place.device->local_hardware_id);
  std::string outcome;
  try {
    Object capture = python::Attribute(runner_, "capture");
    Object accelerator = python::Integer(reinterpret_cast<int64_t>(place.device->accelerator.get()));
    Object made = python::Call(capture.get(), {local.get(), accelerator.get()}, "capture");
    Reader reader(made.get());
    outcome = reader.Text();
    if (!reader.done()) Keep(place, reader);
  } catch (...) {
    // The program goes on step by step: slower, and visibly so.
    outcome = "not replayed: " + StatusOfException("capture").data()->message;
    try {
      Object note = python::Text(outcome);
      Object describe = python::Attribute(runner_, "captured");
      python::Call(describe.get(), {local.get(), note.get()}, "captured");
    } catch (...) {
      Log(FLAGOS_LOG_WARNING, "%s", StatusOfException("captured").data()->message.c_str());
    }
  }
  Log(FLAGOS_LOG_INFO, "%s is %s", info_.name.c_str(), outcome.c_str());
}

void Replays::Keep(const Place& place, Reader& reader) {
  auto replayed = std::make_shared<Replayed>();
  replayed->kept = Object::Share(reader.Next()).Detach();
  replayed->replay = &ReplayOf(reader.Next());
  replayed->overwritten = ReadIntegers(reader.Tuple());
  if (replayed->replay->arrays() != info_.arguments.size() + info_.outputs.size() ||
      replayed->overwritten.size() != info_.outputs.size()) {
    Fail(FLAGOS_INTERNAL, "the captures of %s have another number of arrays than it", info_.name.c_str());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  replayed_[place.device->id] = std::move(replayed);
}

}  // namespace flagos
