// A program that runs on the host CPU without Python: loop nests over tiles and matrix products, between buffers whose
// places were planned at compile time. flagos_backend/codegen/cpu/emitter.py writes the words that Parse reads.
#ifndef FLAGOS_NATIVE_CPU_NATIVE_PROGRAM_H_
#define FLAGOS_NATIVE_CPU_NATIVE_PROGRAM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "cpu/fourier.h"
#include "cpu/iteration.h"
#include "cpu/kernels.h"
#include "cpu/linear_algebra.h"
#include "cpu/sort.h"

namespace flagos::cpu {

inline constexpr int64_t kMaxRank = 16;  // of a loop or an array

// How a loop nest ends: every point is stored, or the dimensions just before the last are reduced (columns).
enum class LoopMode : int64_t { kMap = 0, kColumns = 1 };

// What loops over points and loops over rows have in common.
struct LoopBase {
  struct Input {
    int64_t slot, reg, offset;  // offset and strides in elements
    std::vector<int64_t> strides;
    bool invariant;                 // one element for the whole loop
    bool computed = true;           // with; else only stored
    bool is_number = false;         // where tiles are rows: the same in all of a row, of which only one element is read
    bool fixed = false;             // the same wherever it is reduced
    bool reduced_in_place = false;  // columns that nothing but reductions reads, where they stand
    int64_t interleaved = 1;        // where tiles are boxes: as for outputs
  };
  struct Constant {
    int64_t reg, bits;
  };
  struct Iota {  // offset + sum of coefficients times indices
    int64_t reg, offset;
    std::vector<int64_t> coefficients;
    TileFunction function;
    bool fixed = false;  // the same in all of a row that is reduced
  };
  // An array whose elements steps read at indices that the loop computes. Its register stands for its memory, and only
  // such steps name it.
  struct Array {
    int64_t slot, reg;
  };
  struct Step {
    TileFunction function, point;  // of a tile, and of one element
    int64_t result, a, b, c;
    int numbers = 0;  // the bits of operands of which at most the first element is read: 1 for a, 2 for b, 4 for c
  };
  struct Reduction {
    Combine combine;
    Type type;
    int64_t reg, result, initial;  // registers of what is reduced, of the reduction, and of what it begins with
    ReduceFunction reduce;
    ReduceEachFunction reduce_each;
    ReduceRowsFunction reduce_rows;
    int64_t input = -1;  // whose columns are reduced in place
    ReduceProductsFunction reduce_products =
        nullptr;  // of a and b, where parts of rows are reduced instead of their products
    int64_t a = -1, b = -1;
    bool compensated = false;  // a sum in its own type, of which rows keep what rounding between tiles loses
    TileFunction widen, combine_wide, narrow;  // to, in and from AccumulatorType; widen and narrow null when it is type
  };
  struct Output {
    int64_t slot, reg, offset;
    std::vector<int64_t> strides;
    // The step that computes the register writes here directly; or else the tile is written here around the caches.
    bool in_place = false, streamed = false;
    int64_t moved = -1;  // where tiles are boxes: the number of the input that is stored unchanged
    // Where tiles are boxes: with how many, this one and those behind it, whose elements are interleaved in memory, it
    // is moved at once; 0: one of those behind.
    int64_t interleaved = 1;
  };

  std::vector<int64_t> dims;
  int64_t num_reduced = 0;  // dimensions that reductions reduce
  std::vector<Type> registers;
  std::vector<bool> uniform;  // of each register: whether all elements of a tile are the same
  std::vector<Input> inputs;
  std::vector<Constant> constants;
  std::vector<Iota> iotas;
  std::vector<Array> arrays;
  int64_t tile = 0;       // elements
  int64_t work = 0;       // points times steps, to decide on threads
  size_t lane_bytes = 0;  // what one thread needs for its tiles
  bool streams = false;   // some output
};

struct Loop : LoopBase {
  LoopMode mode;
  std::vector<Step> steps;
  std::vector<Reduction> reductions;  // they begin with constants or invariant inputs
  std::vector<Output> outputs;        // a stride for each dimension that is not reduced
  std::vector<int64_t> box;           // how far a tile reaches along each dimension; empty: along the last one alone
  // Of columns: a tile is a block of `rows` rows, steps of the last reduced dimension, of `columns` columns each. The
  // blocks that are reduced into one tile are cut into segments, so that threads have enough to share: by shape alone.
  int64_t columns = 0, rows = 0, segments = 1;
  std::vector<Step> fixed_steps;  // of columns: what is the same in all rows, before the others
};

// A loop nest whose trailing dimensions are reduced. Phases pass over one row after the other while it is in the cache:
// a phase may use what the phases before it reduced from the row, and what they kept of it.
struct RowLoop : LoopBase {
  // What a register holds: a tile, a whole row, a scalar that may fill a tile, a scalar alone.
  enum class Extent : int64_t { kTile = 0, kRow = 1, kScalar = 2, kSingle = 3 };
  struct Phase {
    std::vector<Step> scalar_steps;  // on one element each, before the pass
    std::vector<Output> scalar_outputs;
    std::vector<int64_t> broadcasts;     // scalars that fill their tiles now
    std::vector<int64_t> inputs, iotas;  // numbers of those that vary within the row and are needed
    std::vector<Step> steps;
    std::vector<Step> unfolded_steps;  // those without what fold_products compute
    std::vector<Output> outputs;
    std::vector<Reduction> reductions;
  };
  std::vector<Extent> extents;                 // of the registers
  std::vector<int64_t> row_registers;          // those that hold rows
  std::vector<int64_t> row_inputs, row_iotas;  // numbers of those that are the same within a row
  std::vector<Phase> phases;
  int64_t row = 0;         // elements
  bool in_blocks = false;  // rows are so short that a tile holds a block of them, and registers what they say for each
  std::vector<int64_t> box;  // of blocks: how far one reaches along each dimension
  int64_t rows = 0;          // of a whole block
  size_t max_reductions = 0;
};

// A loop over a single point. A cell of 8 bytes stands for each register.
struct ScalarLoop {
  struct Move {
    int64_t slot, byte_offset, cell, bytes;
  };
  std::vector<int64_t> cells;  // what they hold in the beginning: constants
  std::vector<Move> loads, stores;
  std::vector<Loop::Step> steps;
};

// A library call that the host of the program makes: buffers in, buffers out, some of which the call brings.
struct Call {
  int64_t number;
  bool shares_out;                        // PyTorch may use all its threads in it
  std::vector<int64_t> sources, targets;  // slots
  std::vector<int64_t> released;          // slots of what earlier calls allocated and nobody reads any more
};

// A block at run-time starts, which are clamped so that it lies inside: sliced out of an array (sources: array, starts),
// or written into it (sources: block, array, starts; the array is copied first unless source and target are one slot).
struct BlockCopy {
  struct Start {
    int64_t slot, limit, stride;  // the greatest start, and the bytes that a step of it is worth
    Type type;
  };
  struct Outer {
    int64_t size, stride;  // stride in bytes, of the array
  };
  bool is_update;
  std::vector<Start> starts;
  // The block is runs of contiguous bytes, a run for each position of the outer dimensions.
  int64_t run, rows;
  std::vector<Outer> outer;
  int64_t array, block, target, array_bytes;  // slots; block and target are one where a block is sliced out
};

// Windows of an array at run-time starts, one for each position of a batch, and where each stands in another array: a
// gather's result or a scatter's updates. Strides in elements.
struct IndexedWindows {
  struct Batch {
    int64_t size, index_stride, array_stride, other_stride;
  };
  struct Start {
    int64_t slot, offset;               // where its first number is, in elements
    int64_t limit, array_stride, wrap;  // as for Starts of kernels.h
  };
  struct Window {
    int64_t size, array_stride, other_stride;
  };
  int64_t element_bytes;
  std::vector<Batch> batch;
  int64_t index_bytes;
  std::vector<Start> starts;
  StartFunction start;
  std::vector<Window> outer;  // dimensions of a window, outermost first, but for
  int64_t run;                // elements that stand side by side in both arrays
  int64_t num_windows, window_elements;
};

// Starts are clamped so that each window lies inside the array.
struct GatherWindows : IndexedWindows {
  int64_t array, target;                     // slots
  ShortStartFunction short_start = nullptr;  // where runs are single elements whose starts 32 bits tell apart
  TakeFunction take = nullptr;
};

// Windows that do not lie inside the array are left out; one that is met again is updated again, in order.
struct ScatterWindows : IndexedWindows {
  // What threads may share, because no two of its positions meet one element of the array.
  ScatterFunction combine;  // nullptr: what is there is overwritten
  Split split;
  size_t split_dimension;
  bool windows_first;  // each window is updated whole before the next
  int64_t array_bytes;
  int64_t array, updates, target;  // slots; array and target may be one
};

// The k greatest (or least) elements of each row in total order, ties by lower index, and their s32 indices.
inline constexpr int64_t kMaxTopK = 128;  // more are sorted better
using TopKFunction = void (*)(void* job, int64_t begin, int64_t end);
struct TopK {
  int64_t rows, columns, k;
  bool largest;
  int64_t source, values, indices;  // slots
  TopKFunction function;
};

// The positions of the greatest (or least) elements of rows, and these elements. A NaN comes before all numbers; of equal
// elements it is the first. The elements of a row are `inner` apart.
struct ArgMinMax {
  Type type, index_type;
  int64_t outer, size, inner;
  int64_t source, values, indices;  // slots
  ArgMinMaxInRowFunction in_row;
  ArgMinMaxInColumnsFunction in_columns;
};

// Products or quotients of complex numbers of two doubles, element by element; an operand may be one number for all.
inline constexpr int64_t kComplexWork = 8;  // operations for each element
struct ComplexArithmetic {
  static constexpr int64_t kElementBytes = 16;
  int64_t elements;
  bool lhs_repeats, rhs_repeats;
  int64_t lhs, rhs, target;  // slots
  TileFunction function;
};

// Several small steps as one function that LLVM made of them: codegen/cpu/llvm. It reads and writes memory of the slots
// that Parse checked, within their sizes as its writer knows them.
using MachineFunction = void (*)(char* const* slots);
struct MachineCode {
  MachineFunction function;
};

class NativeProgram;

// How a loop carries a value: in two buffers that take turns, unchanged, or overwritten in place.
enum class Carry : int64_t { kBuffered = 0, kInvariant = 1, kOverwritten = 2 };

struct While {
  int64_t trip_count;  // -1: as long as the condition holds
  std::vector<Carry> carries;
  std::vector<int64_t> bytes;    // of each carried value
  std::vector<int64_t> sources;  // one for each carried value
  std::vector<int64_t> targets;  // one for each that is not invariant
  std::vector<int64_t> seconds;  // one for each that is buffered
  int64_t scratch;
  std::unique_ptr<NativeProgram> condition, body;
};

// What a branch writes over an operand stands in the slot of both.
struct Conditional {
  bool is_pred;  // true: branch 0 when the predicate holds; else a number, out of range: the last branch
  std::vector<int64_t> sources, targets;
  std::vector<int64_t> first_source;  // of each branch, in sources; sources[0] is the index
  int64_t scratch;
  std::vector<std::unique_ptr<NativeProgram>> branches;
};

struct MatrixProduct {
  struct Operand {
    int64_t slot, offset;
    std::vector<int64_t> batch_strides;
    int64_t leading;
    bool transposed;
  };
  // Of the result and the operands: all F32, all F64, S32 of integers, or F32 of 16-bit floats.
  Type type, a_type, b_type;
  std::vector<int64_t> batch;  // sizes
  int64_t num_matrices, m, n, k;
  Operand a, b, c;
};

// Makes the library calls of a program. A target that is null gets the address of memory that the call brings, which
// the handler keeps until it is among the `released`, or for as long as the run's results. Returns false when the call
// failed; the program then stops.
struct CallHandler {
  bool (*call)(void* user, int64_t number, void* const* sources, void** targets, const std::vector<void*>& released);
  void* user;
};

class NativeProgram {
 public:
  // Checks everything, also that no step reaches outside its buffers, so that Run needs no checks; what `functions` do
  // inside is not seen. On failure returns nullptr and says why. The functions outlive the program.
  static std::unique_ptr<NativeProgram> Parse(const int64_t* bytecode, size_t num_words, const uint8_t* constants,
                                              size_t constants_size, const std::vector<MachineFunction>& functions,
                                              std::string* error);

  size_t num_arguments() const { return argument_bytes_.size(); }
  size_t num_results() const { return result_bytes_.size(); }
  int64_t argument_bytes(size_t i) const { return argument_bytes_[i]; }
  int64_t result_bytes(size_t i) const { return result_bytes_[i]; }
  // The argument over which the program writes result i, or -1.
  int64_t overwritten(size_t i) const { return overwritten_[i]; }
  // Whether a library call brings the memory of result i.
  bool is_callee_allocated(size_t i) const { return callee_allocated_[i]; }
  int64_t scratch_bytes() const { return arena_bytes_; }
  int64_t work() const { return work_; }  // element operations, to tell short programs from long ones
  bool has_calls() const { return has_calls_; }

  // Buffers aligned to 16 bytes; results overlap neither each other nor arguments, but a result that overwrites an
  // argument is written there and its own address is not used, and that of one that a call allocates is set. scratch:
  // scratch_bytes() bytes aligned to 64. Several runs may go on at once with different scratch. False: a library call
  // failed. `times`, unless it is NULL, gets when the first step began and when each that ran ended, which is when the
  // next began, in nanoseconds of the monotonic clock.
  bool Run(void* const* arguments, void** results, void* scratch, const CallHandler& handler,
           std::vector<int64_t>* times = nullptr) const;
  size_t num_steps() const { return steps_.size(); }

 private:
  friend class Parser;
  friend class RepeatedProgram;
  friend class Runner;
  using Step =
      std::variant<Loop, RowLoop, ScalarLoop, MatrixProduct, LinearAlgebra, Fourier, TopK, ArgMinMax, Sort,
                   ComplexArithmetic, GatherWindows, ScatterWindows, Call, BlockCopy, While, Conditional, MachineCode>;

  // Of a run: the addresses of all buffers.
  size_t num_slots() const;
  void FindSlots(char** slot, void* const* arguments, void* const* results, void* scratch) const;
  // Once parsed, for loops, which run a program again and again over the same memory.
  void PlanTrip();

  std::vector<int64_t> argument_bytes_, result_bytes_;
  std::vector<int64_t> overwritten_;    // for each result, the argument whose buffer it shares, or -1
  std::vector<bool> callee_allocated_;  // for each result
  std::shared_ptr<const std::vector<uint8_t>> constants_;
  std::vector<int64_t> constant_offsets_, temporary_offsets_;  // -1: what a call brings
  std::vector<Step> steps_;
  IterationPlan iteration_;  // of a program that a loop runs
  int64_t arena_bytes_ = 0;
  int64_t work_ = 0;
  bool has_calls_ = false;
  bool shares_out_ = false;  // a call does so in every run, not in a branch alone
};

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_NATIVE_PROGRAM_H_
