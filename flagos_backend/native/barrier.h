// Where the shares of one launch wait for one another, without the interpreter.
#ifndef FLAGOS_NATIVE_BARRIER_H_
#define FLAGOS_NATIVE_BARRIER_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>

#include "error.h"

namespace flagos {

class Barrier {
 public:
  // `shares`: that this process runs.
  explicit Barrier(size_t shares) noexcept : shares_(shares) {}

  // Returns to every share once all have come, however many times they do: whether all said yes. Throws Failure when one
  // of them failed before it came. Most come at about the same time: a share looks for the others for a moment, where
  // there is a processor for each, before it sleeps.
  bool All(bool yes);
  void Abort(const Status& status) noexcept;

 private:
  const size_t shares_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<size_t> generation_{0};  // written under the mutex
  size_t came_ = 0;
  bool agreed_ = true, answer_ = true;
  Status failed_;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_BARRIER_H_
