// The threads of Python's own that call the backend, and whether the interpreter can end beside them. CPython before 3.14
// unwinds a thread that asks for the GIL once the interpreter is finalized. Frames of CPython survive that; those of a
// framework's C++ code end the process. So the end waits until each of these threads stays where it is for good.
#ifndef FLAGOS_NATIVE_CALLERS_H_
#define FLAGOS_NATIVE_CALLERS_H_

#include <pthread.h>

#include <chrono>
#include <ctime>
#include <map>

#include "python.h"

namespace flagos::python {

// The calling thread is one of them from now on; nothing for threads that Python knows nothing of, and for ours.
void NoteCaller() noexcept;

// A call of the host, from its beginning to its end.
class CallOfHost {
 public:
  CallOfHost() noexcept { NoteCaller(); }
  ~CallOfHost() { StayAtEnd(); }
  CallOfHost(const CallOfHost&) = delete;
  CallOfHost& operator=(const CallOfHost&) = delete;
};

// As long as it lives, the calling thread, if it is a caller, stays where it is: it may be left.
class Staying {
 public:
  Staying() noexcept;
  ~Staying();
  Staying(const Staying&) = delete;
  Staying& operator=(const Staying&) = delete;
};

// Whether the process does nothing for a time: none of its threads runs, or waits for a processor, but now and then. Those
// that stay where they are do not count. Asked again and again.
class Idleness {
 public:
  bool lasts(std::chrono::steady_clock::duration window) noexcept;

 private:
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  int looks_ = 0;
  int busy_ = 0;
};

// For fork: nothing of the list changes meanwhile, and the child has but the calling thread.
void HoldCallers() noexcept;
void ReleaseCallers() noexcept;
void ForgetOtherCallers() noexcept;

// Made by the thread that ends the interpreter, which asks again and again.
class Quiescence {
 public:
  // With the GIL, which is not given up in between: whether every other thread may be left as it is. It may be left if it
  // stays, or if it sleeps, in code of a framework for a second, in other code for a tenth of one. One that runs, or waits
  // for a processor, comes to its next call of the backend, and stays there. All may be left once the process has
  // computed for five seconds.
  bool is_over() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kWindow{100}, kWindowInFramework{1000};
  static constexpr std::clock_t kLongest = 5 * CLOCKS_PER_SEC;
  static constexpr int kLooks = 20;
  struct Sleep {
    Clock::time_point begun;
    int looks = 0;
  };

  bool MayLeaveAll();
  bool Sleeps(pthread_t thread, Clock::duration window);

  const std::clock_t begun_ = std::clock();
  std::map<pthread_t, Sleep> sleeps_;
};

}  // namespace flagos::python

#endif  // FLAGOS_NATIVE_CALLERS_H_
