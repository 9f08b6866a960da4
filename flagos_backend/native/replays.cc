#include "replays.h"

#include "accelerator.h"
#include "description.h"
#include "log.h"

namespace flagos {
namespace {

using python::Object;
using python::Reader;

// Runs before a program is captured: by then its kernels are compiled and chosen, and it is worth it.
constexpr int kRunsBeforeCapture = 2;

// What kernels were chosen for when they were captured: torch's own allocations are aligned so.
constexpr uintptr_t kCapturedAlignment = 256;

std::vector<Captures::Range> Ranges(Reader list) {
  std::vector<Captures::Range> ranges;
  while (!list.done()) {
    Reader pair = list.Tuple();
    const auto begin = static_cast<uint64_t>(pair.Integer());
    ranges.push_back({begin, begin + static_cast<uint64_t>(pair.Integer())});
  }
  return ranges;
}

}  // namespace

Replayed::~Replayed() {
  replay.reset();
  python::Discard(kept, 0);
}

bool Replays::Has(const Device& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return replayed_.find(device.id) != replayed_.end();
}

std::shared_ptr<Replayed> Replays::Find(const Place& place, const std::vector<Argument>& arguments, bool in_place) {
  if (!info_.donors.empty() && !in_place) return nullptr;
  for (const Argument& argument : arguments) {
    const Block& block = argument.contents->block();
    if (block.bytes() > 0 && reinterpret_cast<uintptr_t>(block.data()) % kCapturedAlignment != 0) return nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = replayed_.find(place.device->id);
  return found == replayed_.end() ? nullptr : found->second;
}

std::vector<Ref<Block>> Replays::Run(Replayed& replayed, const Place& place, std::vector<Argument>& arguments,
                                     const std::vector<Memory*>& memories) const {
  std::vector<void*> addresses;
  addresses.reserve(arguments.size() + memories.size());
  for (const Argument& argument : arguments) addresses.push_back(argument.contents->block().data());
  std::vector<Ref<Block>> results;
  results.reserve(memories.size());
  for (size_t i = 0; i < memories.size(); ++i) {
    const int64_t argument = replayed.overwritten[i];
    if (argument >= 0) {
      results.push_back(arguments[static_cast<size_t>(argument)].contents->shared_block());
    } else if (info_.outputs[i].bytes == 0) {
      results.push_back(Block::Allocate(memories[i], 0));
    } else {
      results.push_back(place.device->accelerator->AllocateOutput(memories[i], info_.outputs[i].bytes));
    }
    addresses.push_back(results.back()->data());
  }
  replayed.replay->Launch(addresses.data());
  return results;
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
  try {
    Object capture = python::Attribute(runner_, "capture");
    Object made = python::Call(capture.get(), {local.get()}, "capture");
    Reader reader(made.get());
    if (reader.done()) return;  // the runner knows why, and says so when it explains the program
    auto replayed = std::make_shared<Replayed>();
    replayed->kept = Object::Share(reader.Next()).Detach();
    Captures captures{};
    for (Captures::Graph* graph : {&captures.first, &captures.second, &captures.third}) {
      Reader pair = reader.Tuple();
      graph->handle = static_cast<uint64_t>(pair.Integer());
      graph->owned = Ranges(pair.Tuple());
    }
    Reader arrays = reader.Tuple();
    while (!arrays.done()) {
      Reader array = arrays.Tuple();
      const auto first = static_cast<uint64_t>(array.Integer()), second = static_cast<uint64_t>(array.Integer());
      captures.arrays.push_back({first, second, static_cast<uint64_t>(array.Integer())});
    }
    replayed->overwritten = ReadIntegers(reader.Tuple());
    if (captures.arrays.size() != info_.arguments.size() + info_.outputs.size() ||
        replayed->overwritten.size() != info_.outputs.size()) {
      Fail(FLAGOS_INTERNAL, "the captures of %s have another number of arrays than it", info_.name.c_str());
    }
    replayed->replay = place.device->accelerator->streams().MakeReplay(captures);
    const std::string outcome = Format("replayed as a graph of %zu nodes with %zu addresses", replayed->replay->nodes(),
                                       replayed->replay->patches());
    Log(FLAGOS_LOG_INFO, "%s is %s", info_.name.c_str(), outcome.c_str());
    Object note = python::Text(outcome);
    Object describe = python::Attribute(runner_, "captured");
    python::Call(describe.get(), {local.get(), note.get()}, "captured");
    std::lock_guard<std::mutex> lock(mutex_);
    replayed_[place.device->id] = std::move(replayed);
  } catch (...) {
    // The program goes on step by step: slower, and visibly so.
    const Status status = StatusOfException("capture");
    Log(FLAGOS_LOG_INFO, "%s is not replayed: %s", info_.name.c_str(), status.data()->message.c_str());
    try {
      Object note = python::Text("not replayed: " + status.data()->message);
      Object describe = python::Attribute(runner_, "captured");
      python::Call(describe.get(), {local.get(), note.get()}, "captured");
    } catch (...) {
      Log(FLAGOS_LOG_WARNING, "%s", StatusOfException("captured").data()->message.c_str());
    }
  }
}

}  // namespace flagos
