// How far a host may run ahead of one device: it waits before a launch where too many launches, or launches that hold too
// many bytes, are not done.
#ifndef FLAGOS_NATIVE_RUN_AHEAD_H_
#define FLAGOS_NATIVE_RUN_AHEAD_H_

#include <cstddef>
#include <deque>
#include <mutex>

#include "event.h"

namespace flagos {

// What a launch that is in flight may wait for, beside earlier launches.
enum class WaitsFor {
  kNothing,
  kHost,       // a host callback, a promise, a transfer, another device: perhaps for what the caller does next
  kProcesses,  // other processes, which perhaps wait for what the caller does next
};

class RunAhead {
 public:
  struct Limits {
    size_t launches;
    size_t bytes;  // in arguments and results; kFree launches may hold more
  };
  // As many launches are in flight whatever they hold: one runs, and the next ones are there when it ends.
  static constexpr size_t kFree = 4;

  explicit RunAhead(Limits limits) : limits_(limits) {}

  // Whether a launch that holds `bytes` may be dispatched without a wait.
  bool Fits(size_t bytes);
  // Waits until the launch fits. `worst`: what any launch of the context waits for. Where that is the host or another
  // process, the wait ends when nothing comes of it for a while, and the launches that it was for no longer count: the
  // caller is slowed down and never stopped.
  void Admit(size_t bytes, WaitsFor worst);

  void Add(Ref<Event> done, size_t bytes, WaitsFor waits_for);
  // The worst that a launch in flight waits for.
  WaitsFor Worst();

 private:
  struct Launch {
    Ref<Event> done;
    size_t bytes;
    WaitsFor waits_for;
  };

  // Without the mutex: forgets what is done.
  void Prune();
  // With the mutex.
  bool Within(size_t bytes, size_t launches) const noexcept;
  const Launch& Awaited() const;

  const Limits limits_;
  std::mutex mutex_;
  std::deque<Launch> launches_;
  size_t bytes_ = 0;
  size_t allowance_ = 1;  // by which the limits are multiplied, after waits in vain
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_RUN_AHEAD_H_
