// The order of launches. A launch gets its number when the host dispatches it, and its place in the queues of its devices
// once nothing outside of them keeps it from running: at dispatch, unless it has to wait. Whoever had to wait comes
// before what was dispatched after it and has not begun.
#ifndef FLAGOS_NATIVE_LAUNCH_ORDER_H_
#define FLAGOS_NATIVE_LAUNCH_ORDER_H_

#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "event.h"
#include "threads.h"

namespace flagos {

class LaunchOrder {
 public:
  // Held from Next to Enter by whoever enters at once.
  std::mutex mutex;

  // The number of the launch that is dispatched now. With the mutex.
  uint64_t Next() { return ++last_; }

  // Puts the tasks of one launch into their queues. The tasks of several queues may wait for each other: all queues
  // begin such launches in one order, or two of them could wait for each other. `all`: every queue that there is. With
  // the mutex.
  void Enter(uint64_t number, std::vector<std::pair<DeviceQueue*, Task>> tasks, const std::vector<DeviceQueue*>& all);

 private:
  uint64_t last_ = 0;
  uint64_t latest_entered_ = 0;
  std::list<std::shared_ptr<Gang>> gangs_;  // those with tasks in queues, in the order in which they begin
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_LAUNCH_ORDER_H_
