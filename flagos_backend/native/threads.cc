#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <iterator>
#include <thread>

#include "error.h"
#include "log.h"
#include "python.h"

namespace flagos {
namespace {

void RunGuarded(const Task& task) noexcept {
  try {
    task();
  } catch (...) {
    Log(FLAGOS_LOG_ERROR, "%s", StatusOfException("background task").data()->message.c_str());
  }
}

// Threads are detached and counted, so that the one that ends the last use may be one of them.
template <class State>
void StartThread(const std::shared_ptr<State>& state, void (*loop)(const std::shared_ptr<State>&)) {
  std::thread([state, loop] {
    pthread_setname_np(pthread_self(), state->name.substr(0, 15).c_str());
    python::KeepThreadState();
    loop(state);
    python::DropThreadState();
    std::lock_guard<std::mutex> lock(state->mutex);
    --state->threads;
    state->changed.notify_all();
  }).detach();
}

template <class State>
void StopThreads(const std::shared_ptr<State>& state, bool own_thread) {
  python::ReleaseGil released;
  std::unique_lock<std::mutex> lock(state->mutex);
  state->stop = true;
  state->changed.notify_all();
  const int rest = own_thread ? 1 : 0;
  state->changed.wait(lock, [&state, rest] { return state->threads <= rest && state->tasks.empty(); });
}

}  // namespace

struct ThreadPool::State {
  std::string name;
  int max_threads;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  int threads = 0;
  int idle = 0;
  bool stop = false;
};

namespace {
// Which pool or queue the running thread belongs to.
thread_local const void* t_owner = nullptr;
}  // namespace

ThreadPool::ThreadPool(std::string name, int max_threads) : state_(std::make_shared<State>()) {
  state_->name = std::move(name);
  state_->max_threads = max_threads;
}

ThreadPool::~ThreadPool() { StopThreads(state_, t_owner == state_.get()); }

void ThreadPool::Submit(Task task) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (state_->stop) {  // the context is going; what still comes runs here
    lock.unlock();
    RunGuarded(task);
    return;
  }
  state_->tasks.push_back(std::move(task));
  if (state_->idle < static_cast<int>(state_->tasks.size()) && state_->threads < state_->max_threads) {
    StartThread<State>(state_, &ThreadPool::Loop);
    ++state_->threads;
  }
  state_->changed.notify_one();
}

void ThreadPool::Loop(const std::shared_ptr<State>& state) {
  t_owner = state.get();
  std::unique_lock<std::mutex> lock(state->mutex);
  for (;;) {
    ++state->idle;
    state->changed.wait(lock, [&state] { return state->stop || !state->tasks.empty(); });
    --state->idle;
    if (state->tasks.empty()) return;
    Task task = std::move(state->tasks.front());
    state->tasks.pop_front();
    lock.unlock();
    RunGuarded(task);
    task = nullptr;
    lock.lock();
  }
}

void ThreadPool::ParallelFor(int64_t count, const std::function<void(int64_t)>& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t count;
    const std::function<void(int64_t)>* body;
    std::mutex mutex;
    std::condition_variable changed;
    int64_t done = 0;
  };
  auto shared = std::make_shared<Shared>();
  shared->count = count;
  shared->body = &body;
  // A helper that comes late finds no part left and does not touch `body`, which may be gone by then.
  auto work = [shared] {
    int64_t mine = 0;
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < shared->count; ++mine) {
      (*shared->body)(i);
    }
    if (mine == 0) return;
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->done += mine;
    if (shared->done == shared->count) shared->changed.notify_all();
  };
  for (int64_t helper = 1; helper < std::min<int64_t>(count, state_->max_threads); ++helper) Submit(work);
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->changed.wait(lock, [&shared] { return shared->done == shared->count; });
}

struct DeviceQueue::State {
  std::string name;
  std::mutex mutex;
  std::condition_variable changed;
  struct Entry {
    Task task;
    Place place;
  };
  std::deque<Entry> tasks;
  int threads = 0;
  int idle = 0;     // threads that wait for a task
  int running = 0;  // threads that run a task; more than one when some come back from a wait
  bool stop = false;
  std::condition_variable ended;
  Ticket tickets_taken = 0;
  Ticket tickets_ended = 0;  // and so the ticket that is served

  // With the mutex: gives a waiting task a thread if none runs.
  void Wake(const std::shared_ptr<State>& self) {
    if (running > 0) return;
    if (!tasks.empty() && idle == 0) {
      StartThread<State>(self, &DeviceQueue::Loop);
      ++threads;
      ++idle;
    }
    changed.notify_all();
  }
};

DeviceQueue::DeviceQueue(std::string name) : state_(std::make_shared<State>()) { state_->name = std::move(name); }

DeviceQueue::~DeviceQueue() { StopThreads(state_, t_owner == state_.get()); }

void DeviceQueue::Push(Task task, Place place) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (state_->stop) {
    lock.unlock();
    RunGuarded(task);
    return;
  }
  PushLocked(std::move(task), std::move(place));
}

std::unique_lock<std::mutex> DeviceQueue::Lock() { return std::unique_lock<std::mutex>(state_->mutex); }

void DeviceQueue::PushLocked(Task task, Place place) {
  auto at = state_->tasks.end();
  while (at != state_->tasks.begin()) {
    const Place& before = std::prev(at)->place;
    if (before.number <= place.number || (before.gang && before.gang->fixed)) break;
    --at;
  }
  state_->tasks.insert(at, {std::move(task), std::move(place)});
  state_->Wake(state_);
}

bool DeviceQueue::TryEnter() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->running > 0 || !state_->tasks.empty()) return false;
  state_->running = 1;
  return true;
}

void DeviceQueue::Leave() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  --state_->running;
  if (!state_->tasks.empty()) state_->Wake(state_);
}

void DeviceQueue::BeginBlocking() { Leave(); }

void DeviceQueue::EndBlocking() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  ++state_->running;
}

DeviceQueue::Ticket DeviceQueue::TakeTicket() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->tickets_taken++;
}

void DeviceQueue::AwaitTicket(Ticket ticket) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->ended.wait(lock, [this, ticket] { return state_->tickets_ended == ticket; });
}

void DeviceQueue::EndTicket() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  ++state_->tickets_ended;
  state_->ended.notify_all();
}

void DeviceQueue::Loop(const std::shared_ptr<State>& state) {
  t_owner = state.get();
  std::unique_lock<std::mutex> lock(state->mutex);
  for (;;) {  // begins counted as idle
    state->changed.wait(lock, [&state] {
      return (state->stop && state->tasks.empty()) || (state->running == 0 && !state->tasks.empty());
    });
    --state->idle;
    if (state->tasks.empty()) return;
    Task task = std::move(state->tasks.front().task);
    if (Gang* gang = state->tasks.front().place.gang.get()) --gang->waiting;
    state->tasks.pop_front();
    ++state->running;
    lock.unlock();
    RunGuarded(task);
    task = nullptr;  // what it held goes before the next one begins
    lock.lock();
    --state->running;
    ++state->idle;
    if (state->idle > 1) state->changed.notify_all();
  }
}

}  // namespace flagos
