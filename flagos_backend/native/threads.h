// The threads of the library: a pool for transfers, and one queue in order for each device.
#ifndef FLAGOS_NATIVE_THREADS_H_
#define FLAGOS_NATIVE_THREADS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace flagos {

using Task = std::function<void()>;

// Tasks in any order on a few threads, which start when first needed. Tasks do not throw and do not wait for each
// other.
class ThreadPool {
 public:
  ThreadPool(std::string name, int max_threads);
  // Runs what was submitted, then ends the threads.
  ~ThreadPool();

  void Submit(Task task);
  // body(0) ... body(count - 1), each once, in any order; the caller works too, and needs no free thread to finish.
  void ParallelFor(int64_t count, const std::function<void(int64_t)>& body);

 private:
  struct State;
  static void Loop(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;
};

// Tasks in several queues that may wait for each other, as the shares of a launch over several devices do.
struct Gang {
  Gang(uint64_t number_, size_t tasks_) : number(number_), tasks(tasks_), waiting(tasks_) {}

  // Whether one of the tasks has begun. Reliable while all queues are locked.
  bool begun() const noexcept { return waiting < tasks; }

  const uint64_t number;
  const size_t tasks;
  std::atomic<size_t> waiting;  // tasks that have not begun
  bool fixed = false;           // begun, or before one that is; with all queues locked
};

// Tasks begin in order, each when the one before has ended or blocks. Whoever finds the queue idle may also run one right
// in its own thread.
class DeviceQueue {
 public:
  explicit DeviceQueue(std::string name);
  // Runs what was pushed, then ends the thread.
  ~DeviceQueue();

  // Where a task comes: after all of lower numbers and after fixed gangs, before the others.
  struct Place {
    uint64_t number = UINT64_MAX;
    std::shared_ptr<Gang> gang = nullptr;
  };
  void Push(Task task, Place place);
  void Push(Task task) { Push(std::move(task), Place()); }

  // For who has to see several queues at rest: nothing begins while the lock is held.
  std::unique_lock<std::mutex> Lock();
  void PushLocked(Task task, Place place);

  // True: nothing runs or waits, and the caller is now the one that runs; ends with Leave.
  bool TryEnter();
  void Leave();

  // Around a wait inside a task for something that may itself need this device (a host callback that runs a program):
  // meanwhile another thread serves the queue. End does not wait for what began in between: that may itself wait, in a
  // collective, for a device on which this task has to end first.
  void BeginBlocking();
  void EndBlocking();

  // Tickets keep the host callbacks of a device in the order of its tasks, though others begin while one waits. A task
  // takes its ticket at its first callback, before BeginBlocking, and keeps it until it ends. Whoever took one awaits
  // it, then ends it.
  using Ticket = uint64_t;
  Ticket TakeTicket();
  void AwaitTicket(Ticket ticket);
  void EndTicket();

 private:
  struct State;
  static void Loop(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_THREADS_H_
