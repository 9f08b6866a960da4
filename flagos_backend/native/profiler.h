// Records what runs while somebody listens: for a host between profiler_start and profiler_stop, which gets Chrome trace
// events, and in the files of FLAGOS_TRACE from the first moment of a context on. An event costs a record of fixed size;
// text is made of it when it is read.
#ifndef FLAGOS_NATIVE_PROFILER_H_
#define FLAGOS_NATIVE_PROFILER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "trace_record.h"

namespace flagos {

struct ProgramNotes;

// Nanoseconds of the monotonic clock, which all processes of a machine share.
int64_t MonotonicNs() noexcept;

// `text` as a JSON string.
std::string Quoted(const std::string& text);

// What a span is about beside its name; -1: it has none.
struct SpanFacts {
  int64_t device = -1;
  int64_t bytes = -1;    // that a transfer moves
  int64_t program = -1;  // as Profiler::Describe numbers it
  int64_t step = -1;     // of the program
};

// `name`: of Profiler::Text; 0: that of the step, or of the program.
TraceRecord SpanRecord(SpanCategory category, uint32_t name, int64_t begin_ns, int64_t end_ns, const SpanFacts& facts);

class Profiler {
 public:
  Profiler() = default;
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  bool active() const noexcept { return active_.load(std::memory_order_relaxed) != 0; }
  // False: already started, or not started.
  bool Start();
  bool Stop(std::string& json);
  // From now on each event is a record of a new file in `folder`, too, with one of texts beside it. Nothing is kept
  // back, so that whatever ends the process leaves what ran. Throws Failure where no file can be made.
  void Follow(const std::string& folder);

  // The number of a text, which spans may have as their name. 0 where there is no memory for it.
  uint32_t Text(std::string_view text) noexcept;
  // Of this thread, as all that is recorded.
  void Record(TraceRecord record) noexcept;
  // The steps of a run, from the first: when it began, and when each ended. Nothing for a run without steps.
  void RecordSteps(const SpanFacts& run, const std::vector<int64_t>& times) noexcept;
  void RecordMemory(int64_t device, int64_t bytes_in_use) noexcept;

  // The number under which spans name a program; -1 for one that nobody described.
  int64_t NumberOf(const std::string& fingerprint);
  // `notes`: NULL where nothing is known but the name. The first description counts.
  int64_t Describe(const std::string& fingerprint, const std::string& name, std::shared_ptr<const ProgramNotes> notes);

 private:
  enum Listener : int { kSession = 1, kFile = 2 };
  struct Described {
    uint32_t process;  // which described it
    std::string name;
    std::shared_ptr<const ProgramNotes> notes;  // may be NULL
  };

  void Keep(const TraceRecord* records, size_t count) noexcept;
  // With the mutex.
  void Write(const std::string& event);
  void GiveFileUp(const char* what) noexcept;
  void NameThread(uint32_t thread);
  std::string DescriptionEvent(uint32_t number, const Described& program) const;
  std::string Event(const TraceRecord& record) const;
  std::string NameOf(const TraceRecord& record) const;

  std::atomic<int> active_{0};  // Listeners
  std::mutex mutex_;
  std::vector<TraceRecord> records_;                 // of the session
  std::unordered_map<std::string, uint32_t> texts_;  // with their numbers
  std::unordered_map<uint32_t, const std::string*> by_number_;
  std::unordered_map<std::string, uint32_t> programs_;    // by fingerprint
  std::unordered_map<uint32_t, Described> descriptions_;  // of them, for sessions to come
  std::unordered_set<uint32_t> named_threads_;            // in the file
  uint32_t last_named_ = 0;
  RecordFile file_;
  int texts_file_ = -1;
};

// The time from here to the end of the scope, recorded if a profiler listens at its beginning.
class ScopedSpan {
 public:
  // `name`: NULL for the name of the program.
  ScopedSpan(Profiler& profiler, SpanCategory category, const char* name, const SpanFacts& facts) noexcept;
  ~ScopedSpan() { End(); }
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

  // Recorded now, and no more at the end of the scope.
  void End() noexcept;
  // What is known at the end alone.
  void Rename(const std::string& name) noexcept {
    if (profiler_ != nullptr) name_ = profiler_->Text(name);
  }

 private:
  Profiler* profiler_ = nullptr;
  SpanCategory category_;
  uint32_t name_ = 0;
  SpanFacts facts_;
  int64_t begin_ns_ = 0;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_PROFILER_H_
