// Records what runs while somebody listens, as Chrome trace events: a host between profiler_start and profiler_stop, and
// the files of FLAGOS_TRACE from the first moment of a context on.
#ifndef FLAGOS_NATIVE_PROFILER_H_
#define FLAGOS_NATIVE_PROFILER_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace flagos {

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

struct Span {
  std::string category;
  std::string name;
  int64_t begin_ns, end_ns;
  SpanFacts facts;
};

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
  // From now on each event is a line of a new file in `folder`, too. Nothing is kept back, so that whatever ends the
  // process leaves what ran. Throws Failure where no file can be made.
  void Follow(const std::string& folder);

  // Of this thread.
  void Record(std::vector<Span> spans) noexcept;
  void RecordMemory(int64_t device, int64_t bytes_in_use) noexcept;

  // The number under which spans name a program; -1 for one that nobody described.
  int64_t NumberOf(const std::string& fingerprint);
  // `facts`: a JSON object. The first description counts.
  int64_t Describe(const std::string& fingerprint, const std::string& facts);

 private:
  enum Listener : int { kSession = 1, kFile = 2 };

  // With the mutex.
  void Write(const std::vector<std::string>& events);
  void NameThread(int64_t thread, std::vector<std::string>& events);

  std::atomic<int> active_{0};  // Listeners
  std::mutex mutex_;
  std::vector<std::string> events_;        // of the session
  std::vector<std::string> descriptions_;  // of programs, for sessions to come
  std::unordered_map<std::string, int64_t> programs_;
  std::unordered_set<int64_t> named_threads_;  // in the file
  int file_ = -1;
};

// The time from here to the end of the scope, recorded if a profiler listens at its beginning.
class ScopedSpan {
 public:
  ScopedSpan(Profiler& profiler, const char* category, const std::string& name, const SpanFacts& facts);
  ~ScopedSpan();
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

  // Recorded now, and no more at the end of the scope.
  void End() noexcept;
  // What is known at the end alone.
  void Rename(const std::string& name) {
    if (profiler_) name_ = name;
  }

 private:
  Profiler* profiler_ = nullptr;
  const char* category_;
  std::string name_;
  SpanFacts facts_;
  int64_t begin_ns_ = 0;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_PROFILER_H_
