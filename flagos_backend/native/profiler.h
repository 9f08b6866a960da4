// Records what runs while somebody listens, as Chrome trace events.
#ifndef FLAGOS_NATIVE_PROFILER_H_
#define FLAGOS_NATIVE_PROFILER_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace flagos {

class Profiler {
 public:
  bool active() const noexcept { return active_.load(std::memory_order_relaxed); }
  // False: already started, or not started.
  bool Start();
  bool Stop(std::string& json);
  void Record(const char* category, std::string name, int64_t begin_ns, int64_t end_ns, int64_t device) noexcept;

 private:
  struct Span {
    const char* category;
    std::string name;
    int64_t begin_ns, end_ns, device;
    int64_t thread;
  };
  std::atomic<bool> active_{false};
  std::mutex mutex_;
  std::vector<Span> spans_;
};

// The time from here to the end of the scope, recorded if a profiler listens at its beginning.
class ScopedSpan {
 public:
  ScopedSpan(Profiler& profiler, const char* category, const std::string& name, int64_t device);
  ~ScopedSpan();
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

 private:
  Profiler* profiler_ = nullptr;
  const char* category_;
  std::string name_;
  int64_t device_;
  int64_t begin_ns_ = 0;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_PROFILER_H_
