// Runs the steps of a native program one after another.
#include "cpu/native_program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>

#include "cpu/run_loop.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

int64_t NowNs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// A single number is what loops over the elements of an array copy.
void CopyRun(char* to, const char* from, int64_t bytes) {
  if (bytes == 4) {
    std::memcpy(to, from, 4);
  } else {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

void RunBlockCopy(const BlockCopy& copy, char* const* slots) {
  char* const target = slots[copy.target];
  if (copy.is_update && slots[copy.array] != target) {
    CopyArray(target, slots[copy.array], copy.array_bytes);
  }
  char* array = copy.is_update ? target : slots[copy.array];
  char* block = slots[copy.block];
  for (const BlockCopy::Start& start : copy.starts) {
    array += std::clamp<int64_t>(ReadIndex(slots[start.slot], start.type), 0, start.limit) * start.stride;
  }
  for (int64_t row = 0; row < copy.rows; ++row, block += copy.run) {
    char* at = array;
    int64_t rest = row;
    for (size_t d = copy.outer.size(); d-- > 0;) {
      at += rest % copy.outer[d].size * copy.outer[d].stride;
      rest /= copy.outer[d].size;
    }
    CopyRun(copy.is_update ? at : block, copy.is_update ? block : at, copy.run);
  }
}

}  // namespace

int64_t ReadIndex(const char* from, Type type) {
  const auto read = [&](auto value) {
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  switch (type) {
    case Type::kS8:
      return read(int8_t{});
    case Type::kS16:
      return read(int16_t{});
    case Type::kS32:
      return read(int32_t{});
    case Type::kU8:
      return read(uint8_t{});
    case Type::kU16:
      return read(uint16_t{});
    case Type::kU32:
      return read(uint32_t{});
    case Type::kU64:
      return static_cast<int64_t>(std::min<uint64_t>(read(uint64_t{}), std::numeric_limits<int64_t>::max()));
    default:
      return read(int64_t{});
  }
}

// A program to be run again and again over the same memory.
class RepeatedProgram {
 public:
  RepeatedProgram(const NativeProgram& program, void* const* arguments, void* const* results, void* scratch,
                  const CallHandler& handler);
  RepeatedProgram(const RepeatedProgram&) = delete;
  RepeatedProgram& operator=(const RepeatedProgram&) = delete;

  // False: a library call failed.
  bool Run() {
    iteration_->Run();
    return !failed_;
  }

 private:
  static void RunStep(void* program, const void*, const void*, const void*, int64_t step);

  const NativeProgram& program_;
  const CallHandler& handler_;
  std::vector<char*> slots_;
  std::vector<char> cells_;
  std::optional<Iteration> iteration_;
  bool failed_ = false;
};

// One run: the addresses of all buffers, and a function for each kind of step.
class Runner {
 public:
  Runner(char** slots, const CallHandler& handler) : slots_(slots), handler_(handler) {}

  bool operator()(const Loop& loop) const {
    RunLoop(loop, slots_);
    return true;
  }
  bool operator()(const RowLoop& loop) const {
    RunRowLoop(loop, slots_);
    return true;
  }
  bool operator()(const ScalarLoop& loop) const {
    RunScalarLoop(loop, slots_);
    return true;
  }
  bool operator()(const MatrixProduct& product) const {
    RunMatrixProduct(product, slots_);
    return true;
  }
  bool operator()(const LinearAlgebra& step) const {
    RunLinearAlgebra(step, slots_);
    return true;
  }
  bool operator()(const Fourier& step) const {
    RunFourier(step, slots_);
    return true;
  }
  bool operator()(const TopK& top_k) const {
    RunTopK(top_k, slots_);
    return true;
  }
  bool operator()(const ArgMinMax& step) const {
    RunArgMinMax(step, slots_);
    return true;
  }
  bool operator()(const Sort& step) const {
    RunSort(step, slots_);
    return true;
  }
  bool operator()(const ComplexArithmetic& step) const {
    RunComplexArithmetic(step, slots_);
    return true;
  }
  bool operator()(const GatherWindows& gather) const {
    RunGather(gather, slots_);
    return true;
  }
  bool operator()(const ScatterWindows& scatter) const {
    RunScatter(scatter, slots_);
    return true;
  }
  bool operator()(const BlockCopy& copy) const {
    RunBlockCopy(copy, slots_);
    return true;
  }

  bool operator()(const MachineCode& code) const {
    code.function(slots_);
    return true;
  }

  bool operator()(const Call& call) const {
    std::vector<void*> sources, targets, released;
    for (int64_t slot : call.sources) sources.push_back(slots_[slot]);
    for (int64_t slot : call.targets) targets.push_back(slots_[slot]);
    for (int64_t slot : call.released) released.push_back(slots_[slot]);
    if (!handler_.call(handler_.user, call.number, sources.data(), targets.data(), released)) return false;
    for (size_t i = 0; i < targets.size(); ++i) slots_[call.targets[i]] = static_cast<char*>(targets[i]);
    return true;
  }

  bool operator()(const While& loop) const {
    const size_t n = loop.carries.size();
    std::vector<void*> now(n), next(n), target(n, nullptr);
    size_t num_targets = 0, num_seconds = 0;
    for (size_t i = 0; i < n; ++i) {
      now[i] = slots_[loop.sources[i]];
      next[i] = now[i];
      if (loop.carries[i] == Carry::kInvariant) continue;
      target[i] = slots_[loop.targets[num_targets++]];
      if (target[i] != now[i]) std::memcpy(target[i], now[i], static_cast<size_t>(loop.bytes[i]));
      now[i] = next[i] = target[i];
      if (loop.carries[i] == Carry::kBuffered) next[i] = slots_[loop.seconds[num_seconds++]];
    }
    char* const scratch = slots_[loop.scratch];
    uint8_t again = 1;
    void* const result = &again;
    // Buffers take turns, so that every other iteration finds them in the same places.
    std::optional<RepeatedProgram> body[2], condition[2];
    for (const size_t parity : {0U, 1U}) {
      body[parity].emplace(*loop.body, now.data(), next.data(), scratch, handler_);
      if (loop.trip_count < 0) condition[parity].emplace(*loop.condition, now.data(), &result, scratch, handler_);
      now.swap(next);
    }
    size_t parity = 0;
    for (int64_t iteration = 0; iteration != loop.trip_count; ++iteration, parity ^= 1) {
      if (loop.trip_count < 0) {
        if (!condition[parity]->Run()) return false;
        if (again == 0) break;
      }
      if (!body[parity]->Run()) return false;
    }
    if (parity == 1) now.swap(next);
    for (size_t i = 0; i < n; ++i) {
      if (target[i] != nullptr && now[i] != target[i])
        std::memcpy(target[i], now[i], static_cast<size_t>(loop.bytes[i]));
    }
    return true;
  }

  bool operator()(const Conditional& conditional) const {
    const char* const index = slots_[conditional.sources[0]];
    const int64_t last = static_cast<int64_t>(conditional.branches.size()) - 1;
    int64_t branch = conditional.is_pred ? (*index != 0 ? 0 : 1) : ReadIndex(index, Type::kS32);
    if (branch < 0 || branch > last) branch = last;
    std::vector<void*> arguments, results;
    const size_t first = static_cast<size_t>(conditional.first_source[static_cast<size_t>(branch)]);
    const NativeProgram& program = *conditional.branches[static_cast<size_t>(branch)];
    for (size_t i = 0; i < program.num_arguments(); ++i) arguments.push_back(slots_[conditional.sources[first + i]]);
    for (int64_t slot : conditional.targets) results.push_back(slots_[slot]);
    return program.Run(arguments.data(), results.data(), slots_[conditional.scratch], handler_);
  }

 private:
  char** const slots_;
  const CallHandler& handler_;
};

RepeatedProgram::RepeatedProgram(const NativeProgram& program, void* const* arguments, void* const* results,
                                 void* scratch, const CallHandler& handler)
    : program_(program), handler_(handler), slots_(program.num_slots()), cells_(program.iteration_.cells) {
  program.FindSlots(slots_.data(), arguments, results, scratch);
  iteration_.emplace(program.iteration_, slots_.data(), cells_.data(), Iteration::OtherSteps{&RunStep, this});
}

void RepeatedProgram::RunStep(void* program, const void*, const void*, const void*, int64_t step) {
  RepeatedProgram& self = *static_cast<RepeatedProgram*>(program);
  if (self.failed_) return;
  const Runner runner(self.slots_.data(), self.handler_);
  self.failed_ = !std::visit(runner, self.program_.steps_[static_cast<size_t>(step)]);
}

size_t NativeProgram::num_slots() const {
  return argument_bytes_.size() + result_bytes_.size() + constant_offsets_.size() + temporary_offsets_.size();
}

void NativeProgram::FindSlots(char** slot, void* const* arguments, void* const* results, void* scratch) const {
  for (size_t i = 0; i < argument_bytes_.size(); ++i) *slot++ = static_cast<char*>(arguments[i]);
  for (size_t i = 0; i < result_bytes_.size(); ++i) *slot++ = static_cast<char*>(results[i]);
  // Constants are never written: Parse refuses a step that does.
  char* const constants = reinterpret_cast<char*>(const_cast<uint8_t*>(constants_->data()));
  for (int64_t offset : constant_offsets_) *slot++ = constants + offset;
  for (int64_t offset : temporary_offsets_) *slot++ = offset < 0 ? nullptr : static_cast<char*>(scratch) + offset;
}

bool NativeProgram::Run(void* const* arguments, void** results, void* scratch, const CallHandler& handler,
                        std::vector<int64_t>* times) const {
  constexpr size_t kFew = 64;
  char* few[kFew];
  std::vector<char*> many(num_slots() > kFew ? num_slots() : 0);
  char** const slots = num_slots() > kFew ? many.data() : few;
  FindSlots(slots, arguments, results, scratch);
  const OpenMpScope open_mp(shares_out_);
  const Runner runner(slots, handler);
  const auto run = [&](const Step& step) { return std::visit(runner, step); };
  const auto run_timed = [&](const Step& step) {
    const bool done = run(step);
    times->push_back(NowNs());
    return done;
  };
  if (times != nullptr) times->push_back(NowNs());
  const bool done = times == nullptr ? std::all_of(steps_.begin(), steps_.end(), run)
                                     : std::all_of(steps_.begin(), steps_.end(), run_timed);
  if (!done) return false;
  for (size_t i = 0; i < result_bytes_.size(); ++i) {
    if (callee_allocated_[i]) results[i] = slots[argument_bytes_.size() + i];
  }
  return true;
}

}  // namespace flagos::cpu
