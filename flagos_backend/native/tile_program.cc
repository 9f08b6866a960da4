#include "tile_program.h"

#include <algorithm>
#include <cstring>

namespace flagos {
namespace {

// Element operations that take about as long as handing a program to the device's thread.
constexpr int64_t kSmallWork = 1 << 15;

class TileProgram final : public Program {
 public:
  TileProgram(std::unique_ptr<Program> python, LibraryCaller* caller, std::unique_ptr<cpu::NativeProgram> native)
      : python_(std::move(python)), caller_(caller), native_(std::move(native)) {
    info_ = python_->info();
    info_.temporary_bytes = static_cast<size_t>(native_->scratch_bytes());
    if (!native_->has_calls()) info_.is_small = native_->work() <= kSmallWork;
  }

  std::unique_ptr<LaunchState> Begin(size_t shares) override { return python_->Begin(shares); }
  std::string Artifact(int32_t kind) override { return python_->Artifact(kind); }
  std::shared_ptr<const ProgramNotes> Notes() noexcept override { return python_->Notes(); }

  std::vector<Ref<Block>> Run(const Place& place, LaunchState* state, std::vector<Argument>& arguments,
                              const std::vector<Memory*>& memories) override {
    constexpr size_t kFew = 16;
    void* few[2 * kFew];
    const size_t num_arguments = arguments.size(), num_results = memories.size();
    std::vector<void*> many(num_arguments + num_results > 2 * kFew ? num_arguments + num_results : 0);
    void** const addresses = many.empty() ? few : many.data();
    for (size_t i = 0; i < num_arguments; ++i) addresses[i] = arguments[i].contents->block().data();
    std::vector<Ref<Block>> results;
    results.reserve(num_results);
    for (size_t i = 0; i < num_results; ++i) {
      const int64_t overwritten = native_->overwritten(i);
      if (native_->is_callee_allocated(i)) {
        results.emplace_back();
        addresses[num_arguments + i] = nullptr;
        continue;
      }
      if (overwritten < 0) {
        results.push_back(Block::Allocate(memories[i], info_.outputs[i].bytes));
      } else {
        void*& address = addresses[overwritten];
        results.push_back(TakeOver(arguments[static_cast<size_t>(overwritten)], memories[i]));
        address = results.back()->data();
      }
      addresses[num_arguments + i] = results.back()->data();
    }
    Ref<Block> scratch;
    if (native_->scratch_bytes() > 0) {
      scratch = Block::Allocate(place.device->default_memory(), static_cast<size_t>(native_->scratch_bytes()));
    }
    Calls calls(caller_, place, state);
    const cpu::CallHandler handler{&Calls::Make, &calls};
    // Arrays without elements have an address too: null stands for what a call brings.
    alignas(64) static char nothing[64];
    void* const memory = scratch ? scratch->data() : nothing;
    if (!RunSteps(*place.device, addresses, addresses + num_arguments, memory, handler)) {
      throw Failure(std::move(calls.status));
    }
    for (size_t i = 0; i < num_results; ++i) {
      if (native_->is_callee_allocated(i)) results[i] = In(memories[i], calls.Take(addresses[num_arguments + i]));
    }
    return results;
  }

 private:
  // Each step is a span where a profiler listens.
  bool RunSteps(const Device& device, void* const* arguments, void** results, void* scratch,
                const cpu::CallHandler& handler) {
    Profiler& profiler = device.context->profiler;
    if (!profiler.active()) return native_->Run(arguments, results, scratch, handler);
    profiler.RecordMemory(device.id, device.default_memory()->in_use());
    const int64_t number = NumberIn(profiler);
    std::vector<int64_t> times;
    times.reserve(native_->num_steps() + 1);
    const bool done = native_->Run(arguments, results, scratch, handler, &times);
    profiler.RecordSteps({device.id, -1, number}, times);
    return done;
  }

  // The argument's block if this launch alone has it, else a copy to write over.
  static Ref<Block> TakeOver(const Argument& argument, Memory* memory) {
    const Ref<Block>& block = argument.contents->shared_block();
    if (argument.donated && argument.contents->SoleOwner() && block->memory() == memory) return block;
    Ref<Block> copy = Block::Allocate(memory, block->bytes());
    std::memcpy(copy->data(), block->data(), block->bytes());
    return copy;
  }

  // The block, or its content in another memory.
  static Ref<Block> In(Memory* memory, Ref<Block> block) {
    if (block->memory() == memory) return block;
    Ref<Block> copy = Block::Allocate(memory, block->bytes());
    std::memcpy(copy->data(), block->data(), block->bytes());
    return copy;
  }

  // One run's library calls, the memory that they allocated, and why the last one failed.
  struct Calls {
    LibraryCaller* const caller;
    const Place& place;
    LaunchState* const state;
    std::vector<Ref<Block>> allocated;
    Status status;

    Calls(LibraryCaller* caller, const Place& place, LaunchState* state) : caller(caller), place(place), state(state) {}
    ~Calls() {
      if (!allocated.empty()) caller->Drop(allocated);
    }
    Calls(const Calls&) = delete;
    Calls& operator=(const Calls&) = delete;

    Ref<Block> Take(const void* address) {
      const auto found = std::find_if(allocated.begin(), allocated.end(),
                                      [address](const Ref<Block>& block) { return block->data() == address; });
      if (found == allocated.end()) {
        Fail(FLAGOS_INTERNAL,
             "execute: a library call allocated no result; this is a defect of the backend, please report it");
      }
      std::swap(*found, allocated.back());
      Ref<Block> block = std::move(allocated.back());
      allocated.pop_back();
      return block;
    }

    static bool Make(void* user, int64_t number, void* const* sources, void** targets,
                     const std::vector<void*>& released) {
      Calls& calls = *static_cast<Calls*>(user);
      try {
        std::vector<Ref<Block>> done;
        for (const void* address : released) done.push_back(calls.Take(address));
        calls.caller->CallLibrary(calls.place, calls.state, number, sources, targets, calls.allocated, done);
        return true;
      } catch (...) {
        calls.status = StatusOfException("library call");
        return false;
      }
    }
  };

  const std::unique_ptr<Program> python_;
  LibraryCaller* const caller_;
  const std::unique_ptr<cpu::NativeProgram> native_;
};

// A native program agrees with what the host is told about it.
void CheckSizes(const ProgramInfo& info, const cpu::NativeProgram& native) {
  bool agree = native.num_arguments() == info.arguments.size() && native.num_results() == info.outputs.size();
  for (size_t i = 0; agree && i < info.arguments.size(); ++i) {
    agree = native.argument_bytes(i) == static_cast<int64_t>(info.arguments[i].bytes);
  }
  for (size_t i = 0; agree && i < info.outputs.size(); ++i) {
    agree = native.result_bytes(i) == static_cast<int64_t>(info.outputs[i].bytes);
  }
  if (!agree) {
    Fail(FLAGOS_INTERNAL,
         "compile: the native program of %s has other arrays than it; this is a defect of the backend, "
         "please report it",
         info.name.c_str());
  }
}

}  // namespace

std::unique_ptr<Program> MakeTileProgram(std::unique_ptr<Program> python, LibraryCaller* caller,
                                         const std::string& bytecode, const std::string& constants,
                                         const std::vector<int64_t>& functions) {
  std::vector<int64_t> numbers(bytecode.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), bytecode.data(), numbers.size() * sizeof(int64_t));
  std::vector<cpu::MachineFunction> code;
  for (const int64_t address : functions) code.push_back(reinterpret_cast<cpu::MachineFunction>(address));
  std::string error;
  const auto* data = reinterpret_cast<const uint8_t*>(constants.data());
  auto native = cpu::NativeProgram::Parse(numbers.data(), numbers.size(), data, constants.size(), code, &error);
  if (native == nullptr) {
    Fail(FLAGOS_INTERNAL,
         "compile: the native program of %s is malformed: %s; this is a defect of the backend, please "
         "report it",
         python->info().name.c_str(), error.c_str());
  }
  CheckSizes(python->info(), *native);
  return std::make_unique<TileProgram>(std::move(python), caller, std::move(native));
}

}  // namespace flagos
