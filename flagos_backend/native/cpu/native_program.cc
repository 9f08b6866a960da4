// Runs the steps of a native program one after another.
#include "cpu/native_program.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/run_loop.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

void RunBlockCopy(const BlockCopy& copy, char* const* slots) {
  const size_t rank = copy.dims.size();
  const size_t arrays = copy.is_update ? 2 : 1;
  char* const target = slots[copy.target];
  char* array = slots[copy.sources[arrays - 1]];
  if (copy.is_update && array != target) {
    CopyArray(target, array, copy.element_bytes * Product(copy.dims, 0, rank));
  }
  if (copy.is_update) array = target;
  char* block = copy.is_update ? slots[copy.sources[0]] : target;
  // Trailing dimensions that the block spans whole are contiguous with the one before them.
  size_t inner = rank;
  int64_t run = copy.element_bytes;
  while (inner > 0) {
    --inner;
    run *= copy.block[inner];
    if (copy.block[inner] != copy.dims[inner]) break;
  }
  int64_t offset = 0, stride = copy.element_bytes, rows = 1;
  std::vector<int64_t> strides(rank);
  for (size_t d = rank; d-- > 0;) {
    const int64_t start = ReadIndex(slots[copy.sources[arrays + d]], copy.start_types[d]);
    offset += std::clamp<int64_t>(start, 0, copy.dims[d] - copy.block[d]) * stride;
    strides[d] = stride;
    stride *= copy.dims[d];
    if (d < inner) rows *= copy.block[d];
  }
  if (run == 0) return;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t at = offset, rest = row;
    for (size_t d = inner; d-- > 0;) {
      at += rest % copy.block[d] * strides[d];
      rest /= copy.block[d];
    }
    char* const in_array = array + at;
    char* const in_block = block + row * run;
    std::memcpy(copy.is_update ? in_array : in_block, copy.is_update ? in_block : in_array, static_cast<size_t>(run));
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
  bool operator()(const TopK& top_k) const {
    RunTopK(top_k, slots_);
    return true;
  }
  bool operator()(const ArgExtreme& step) const {
    RunArgExtreme(step, slots_);
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
    for (int64_t trip = 0; trip != loop.trip_count; ++trip) {
      if (loop.trip_count < 0) {
        uint8_t again = 0;
        void* result = &again;
        if (!loop.condition->Run(now.data(), &result, scratch, handler_)) return false;
        if (again == 0) break;
      }
      if (!loop.body->Run(now.data(), next.data(), scratch, handler_)) return false;
      now.swap(next);
    }
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

bool NativeProgram::Run(void* const* arguments, void** results, void* scratch, const CallHandler& handler) const {
  constexpr size_t kFew = 64;
  const size_t num_slots =
      argument_bytes_.size() + result_bytes_.size() + constant_offsets_.size() + temporary_offsets_.size();
  char* few[kFew];
  std::vector<char*> many(num_slots > kFew ? num_slots : 0);
  char** const slots = num_slots > kFew ? many.data() : few;
  char** slot = slots;
  for (size_t i = 0; i < argument_bytes_.size(); ++i) *slot++ = static_cast<char*>(arguments[i]);
  for (size_t i = 0; i < result_bytes_.size(); ++i) *slot++ = static_cast<char*>(results[i]);
  // Constants are never written: Parse refuses a step that does.
  char* const constants = reinterpret_cast<char*>(const_cast<uint8_t*>(constants_->data()));
  for (int64_t offset : constant_offsets_) *slot++ = constants + offset;
  for (int64_t offset : temporary_offsets_) *slot++ = offset < 0 ? nullptr : static_cast<char*>(scratch) + offset;
  const OpenMpScope open_mp(has_calls_);
  const Runner runner(slots, handler);
  if (!std::all_of(steps_.begin(), steps_.end(), [&](const Step& step) { return std::visit(runner, step); }))
    return false;
  for (size_t i = 0; i < result_bytes_.size(); ++i) {
    if (brought_[i]) results[i] = slots[argument_bytes_.size() + i];
  }
  return true;
}

}  // namespace flagos::cpu
