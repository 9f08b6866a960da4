// What a profiler keeps of each event, and the file that holds such records: cli/trace_file.py reads it.
#ifndef FLAGOS_NATIVE_TRACE_RECORD_H_
#define FLAGOS_NATIVE_TRACE_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace flagos {

// What a span is about. kSpanCategories has the names, in this order.
enum class SpanCategory : uint32_t { kExecute, kStep, kTransfer, kWait, kCompile, kCompileStage };
inline constexpr const char* kSpanCategories[] = {"execute", "step", "transfer", "wait", "compile", "compile stage"};

// kSteps: all steps of a run, from `step` on, as many as `bytes` says; their ends follow in records of StepEnds.
enum class RecordKind : uint32_t { kNothing, kSpan, kMemoryInUse, kSteps, kStepEnds };

// In the file as it lies in memory: the traces of a machine are read on that machine.
struct TraceRecord {
  RecordKind kind = RecordKind::kNothing;  // a place that was reserved and never written has kNothing
  uint32_t process = 0, thread = 0;
  SpanCategory category = SpanCategory::kExecute;
  uint32_t name = 0;                             // the number of a text; 0: the name of the step, or of the program
  int32_t device = -1, program = -1, step = -1;  // -1: none
  int64_t begin_ns = 0, end_ns = 0;              // of the monotonic clock; memory in use has begin_ns alone
  int64_t bytes = -1;                            // that a transfer moves, or that are in use; -1: none
  int64_t unused = 0;
};
static_assert(sizeof(TraceRecord) == 64);

// Steps of a run follow each other: each begins where the one before ends.
struct StepEnds {
  static constexpr size_t kMost = 7;
  RecordKind kind = RecordKind::kStepEnds;
  uint32_t count = 0;
  int64_t end_ns[kMost] = {};
};
static_assert(sizeof(StepEnds) == sizeof(TraceRecord));

// Records in a file that is memory, too: one is kept once it is copied there, whatever ends the process. Who calls
// holds a lock. A forked process goes on in the same file, behind what its parent has written.
class RecordFile {
 public:
  RecordFile() = default;
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  // Makes a new file. Otherwise errno says why there is none.
  bool Open(const std::string& path);
  bool is_open() const noexcept { return header_ != nullptr; }
  // False: errno says why the file cannot grow.
  bool Append(const TraceRecord* records, size_t count) noexcept;
  // Numbers that no process of this file has for another: from 1 on, and from 0 on.
  uint32_t NewTextNumber() noexcept;
  uint32_t NewProgramNumber() noexcept;

 private:
  struct Header;

  // The mapped block with record `index`, or NULL.
  TraceRecord* At(uint64_t index) noexcept;

  int file_ = -1;
  Header* header_ = nullptr;
  TraceRecord* block_ = nullptr;
  uint64_t first_ = 0;  // record of the block
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_TRACE_RECORD_H_
