// The parser of native programs: reads bytecode and proves that running it stays inside the program's buffers.
#ifndef FLAGOS_NATIVE_CPU_PARSE_H_
#define FLAGOS_NATIVE_CPU_PARSE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/native_program.h"

namespace flagos::cpu {

struct Failure {
  std::string message;
};

inline void Require(bool condition, const char* message) {
  if (!condition) throw Failure{message};
}

// a * b for lengths; a program whose sizes overflow is malformed.
inline int64_t Times(int64_t a, int64_t b) {
  int64_t product = 0;
  Require(a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, &product), "a size is negative or too large");
  return product;
}

// Whether the register is that of an input, a constant, positions or an array; whether of an array.
bool IsSource(const LoopBase& loop, int64_t reg);
bool IsArray(const LoopBase& loop, int64_t reg);
inline Type TypeOf(const LoopBase& loop, int64_t reg) { return loop.registers[static_cast<size_t>(reg)]; }

class Parser {
 public:
  using Constants = std::shared_ptr<const std::vector<uint8_t>>;

  // Throws Failure, as everything below does.
  Parser(const int64_t* bytecode, size_t num_words, Constants constants, const std::vector<MachineFunction>& functions,
         int depth);

  std::unique_ptr<NativeProgram> Parse();

 private:
  int64_t Word() {
    Require(next_ != end_, "the program ends early");
    return *next_++;
  }
  int64_t Count() {
    const int64_t count = Word();
    Require(count >= 0 && count <= end_ - next_, "a count is out of range");
    return count;
  }
  int64_t Register(const LoopBase& loop) {
    const int64_t reg = Word();
    Require(reg >= 0 && reg < static_cast<int64_t>(loop.registers.size()), "register out of range");
    return reg;
  }
  int64_t AddSlot(int64_t bytes) {
    Require(bytes >= 0, "negative buffer size");
    slot_bytes_.push_back(bytes);
    callee_allocated_.push_back(CalleeAllocated::kNot);
    return bytes;
  }
  // What becomes of the memory that a library call brings.
  enum class CalleeAllocated { kNot, kAwaited, kThere, kReleased };

  int64_t AddCalleeAllocated(int64_t bytes) {
    Require(depth_ == 0, "a nested program has memory that calls bring");
    Require(bytes > 0, "a call brings nothing");
    AddSlot(bytes);
    callee_allocated_.back() = CalleeAllocated::kAwaited;
    return -1;
  }
  int64_t AddPlanned(int64_t total, bool may_be_callee_allocated) {
    const int64_t offset = Word();
    const int64_t bytes = Word();
    if (may_be_callee_allocated && offset == -1) return AddCalleeAllocated(bytes);
    Require(offset >= 0 && offset % 16 == 0 && bytes >= 0 && bytes <= total && offset <= total - bytes,
            "a planned buffer lies outside its arena");
    AddSlot(bytes);
    return offset;
  }
  int64_t Slot() {
    const int64_t slot = Word();
    Require(slot >= 0 && slot < static_cast<int64_t>(slot_bytes_.size()), "buffer out of range");
    return slot;
  }
  CalleeAllocated& AllocationOf(int64_t slot) { return callee_allocated_[static_cast<size_t>(slot)]; }
  int64_t ReadableSlot() {
    const int64_t slot = Slot();
    Require(AllocationOf(slot) == CalleeAllocated::kNot || AllocationOf(slot) == CalleeAllocated::kThere,
            "a step reads what no call has allocated");
    return slot;
  }
  int64_t WritableSlot() {
    const int64_t slot = Slot();
    Require(AllocationOf(slot) == CalleeAllocated::kNot, "a step writes what a call allocates");
    const bool is_overwritten = slot < first_result_ && overwritten_[static_cast<size_t>(slot)];
    Require(slot >= first_temporary_ || (slot >= first_result_ && slot < first_constant_) || is_overwritten,
            "a step writes an argument or a constant");
    return slot;
  }
  Type ParseType() {
    const int64_t number = Word();
    Require(number > 0 && number < kNumTypes && TypeBytes(static_cast<Type>(number)) > 0, "unknown element type");
    return static_cast<Type>(number);
  }

  int64_t SlotBytes(int64_t slot) const { return slot_bytes_[static_cast<size_t>(slot)]; }
  std::vector<int64_t> ReadableSlots() {
    std::vector<int64_t> slots(static_cast<size_t>(Count()));
    for (int64_t& slot : slots) slot = ReadableSlot();
    return slots;
  }
  std::vector<int64_t> WritableSlots() {
    std::vector<int64_t> slots(static_cast<size_t>(Count()));
    for (int64_t& slot : slots) slot = WritableSlot();
    return slots;
  }

  // Every element that strides reach from offset lies inside the slot.
  void CheckAccess(int64_t slot, Type type, int64_t offset, const std::vector<int64_t>& dims,
                   const std::vector<int64_t>& strides) const {
    CheckAccess(slot, TypeBytes(type), offset, dims, strides);
  }
  void CheckAccess(int64_t slot, int64_t element_bytes, int64_t offset, const std::vector<int64_t>& dims,
                   const std::vector<int64_t>& strides) const {
    int64_t low = offset, high = offset;
    for (size_t d = 0; d < dims.size(); ++d) {
      if (dims[d] == 0) return;
      int64_t reach;
      Require(!__builtin_mul_overflow(dims[d] - 1, strides[d], &reach), "a stride is too large");
      Require(!__builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high),
              "a stride is too large");
    }
    Require(low >= 0 && high < SlotBytes(slot) / element_bytes, "a loop reaches outside its buffer");
  }

  std::vector<int64_t> ParseStrides(size_t rank) {
    std::vector<int64_t> strides(rank);
    for (int64_t& stride : strides) stride = Word();
    return strides;
  }

  // parse.cc
  void ParseStep(NativeProgram& program);
  Call ParseCall();
  BlockCopy ParseBlockCopy(bool is_update);
  std::unique_ptr<NativeProgram> ParseNested(NativeProgram& parent);
  void CheckBuffers(const std::vector<int64_t>& slots, const std::vector<int64_t>& bytes) const;
  While ParseWhile(NativeProgram& parent);
  Conditional ParseConditional(NativeProgram& parent);
  void CheckScratch(int64_t slot, const NativeProgram& nested) const;
  TopK ParseTopK();
  ArgMinMax ParseArgMinMax();
  ComplexArithmetic ParseComplexArithmetic();
  LinearAlgebra ParseLinearAlgebra();
  Fourier ParseFourier();
  MatrixProduct ParseProduct();
  MatrixProduct::Operand ParseOperand(Type type, const std::vector<int64_t>& batch, int64_t rows, int64_t columns,
                                      bool is_result);

  // parse_sort.cc
  Sort ParseSort();

  // parse_windows.cc
  struct WindowReach;
  WindowReach ParseWindows(IndexedWindows& windows, Type* index_type, bool drops);
  void CheckWindows(const WindowReach& reach, IndexedWindows& windows, int64_t array,
                    const std::vector<int64_t>& indices, int64_t other) const;
  void ReadNumbersOfRows(Loop& loop, const int64_t* steps);
  static void ChooseTake(GatherWindows& gather, Type index_type);
  GatherWindows ParseGather();
  ScatterWindows ParseScatter();

  // parse_loop.cc
  Loop ParseLoop();
  MachineCode ParseMachineCode(NativeProgram& program);
  RowLoop ParseRowLoop();
  RowLoop::Phase ParsePhase(RowLoop& loop);
  int64_t ParseDims(LoopBase& loop);
  void ParseSources(LoopBase& loop);
  std::vector<Loop::Step> ParseSteps(const LoopBase& loop);
  std::vector<Loop::Reduction> ParseReductions(const LoopBase& loop);
  std::vector<Loop::Output> ParseOutputs(const LoopBase& loop, const std::vector<int64_t>& dims);
  std::vector<int64_t> ParseNumbers(size_t limit);

  const int64_t* next_;
  const int64_t* const end_;
  const Constants constants_;
  const std::vector<MachineFunction>& functions_;
  const int depth_;
  std::vector<int64_t> slot_bytes_;
  std::vector<CalleeAllocated> callee_allocated_;  // by slot
  std::vector<bool> overwritten_;
  int64_t first_result_ = 0, first_constant_ = 0, first_temporary_ = 0;
};

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_PARSE_H_
