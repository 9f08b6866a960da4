// The host's end of one child: its start, its channels, its events, and what becomes of them when it ends.
//
// Over a channel one thread at a time makes a call and waits for its reply; there are as many as threads have called at
// once. A pair of sockets, the event socket, carries what the child says unasked, read by a thread of the link, and hands
// new channels to the child.
#ifndef FLAGOS_ISOLATION_LINK_H_
#define FLAGOS_ISOLATION_LINK_H_

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "answerer.h"
#include "channel.h"
#include "denials.h"
#include "frames.h"
#include "process.h"
#include "segment.h"
#include "status.h"
#include "wire.h"

namespace flagos_isolation {

// Something that will have happened, and who wants to know.
class EventState {
 public:
  using Listener = std::function<void(const Status&)>;
  void Complete(const Status& status);
  bool Query(Status* status);
  bool Await(int64_t timeout_ns, Status* status);  // below zero: for ever; false when the time ran out
  void OnReady(Listener listener);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ready_ = false;
  Status status_;
  std::vector<Listener> listeners_;
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  // Starts a child and greets it. NULL with `*why` set.
  static std::shared_ptr<Link> Start(const Settings& settings, const Hello& own, Hello* hello, std::string* why);
  ~Link();

  // The first of `count` ids that nothing has had.
  uint64_t NewIds(size_t count = 1) { return next_id_.fetch_add(count, std::memory_order_relaxed); }
  SegmentPool& segments() { return segments_; }

  // Makes a call; an error is the child's, or UNAVAILABLE where there is no child any more. `segment` is one that the call
  // names.
  Status Request(const Call& call, Reply* reply, Segment* segment = nullptr);
  // Sends a call that has no reply. An error where it is not sent.
  Status Post(const Call& call);
  // Lets go of a buffer of `size` bytes: with the next call, within two ticks where none comes, and at once where much
  // memory waits for it.
  void Release(uint64_t buffer, int64_t size);

  // What happens when the event `id` completes, before anybody learns of it: it may look at the event's data and changes
  // what the event says by changing the status. Called exactly once, also when the child ends.
  struct Delivery {
    std::string_view data;
    uint64_t address = 0;  // in the child
  };
  using Arrival = std::function<void(Status*, const Delivery& delivery)>;
  // `is_owed`: the child completes it by itself, sooner or later; else when the host does something.
  std::shared_ptr<EventState> Expect(uint64_t id, Arrival arrival = nullptr, bool is_owed = true);
  void Complete(uint64_t id, Status status, const Delivery& delivery);
  // Waits until so many events of the child's have completed here. An error where there cannot be so many.
  Status AwaitEvents(int64_t count);
  // The host has made (1), or completed (-1), a promise or an event, for which what the child does may wait.
  void Owe(int change) { num_owed_by_host_ += change; }

  // Whether the system lets the host read and write the child's memory.
  bool reaches_memory() const { return reaches_memory_; }
  // Copy from and to the child's memory. Where nothing is, or the child has ended, that is an error, never a signal.
  Status ReadMemory(void* to, uint64_t address, size_t size);
  Status WriteMemory(uint64_t address, const void* from, size_t size);

  // Answers what the child asks.
  Answerer& answerer() { return answerer_; }
  // Ends a child that cannot be served any more; `fault` says what became of it.
  Status GiveUp(const std::string& fault) { return Bury(fault); }

  // System calls that the child tried and was denied, each once; those that only Landlock denied are not among them.
  std::vector<std::string> Denied() const {
    return denials_ != nullptr ? denials_->Names() : std::vector<std::string>();
  }

  pid_t process() const { return process_; }
  bool alive() const { return phase_ == kAlive; }
  // Whether this process, and not one that it was forked from, has a child there that is to be used.
  bool IsUsable() const;
  Status death() const;  // why there is no child any more
  // Ends the child as being of no use.
  void Close();
  // The child said what no child may say.
  Status Malformed(const std::string& what);

 private:
  struct Expected {
    std::shared_ptr<EventState> state;
    Arrival arrival;
    bool is_owed = false;
  };
  enum Phase { kAlive, kEnding, kDead };

  Link(const Settings& settings, Descriptor events, std::shared_ptr<ChildLog> log, pid_t process);
  static std::shared_ptr<Link> Begin(const Settings& settings, const Hello& own, Hello* hello, std::string* why);
  // Waits for what the child says first; takes its filter's listener, where it sends one. What is wrong with it, or "".
  std::string AwaitHello(int start_ms, Receipt* receipt, Hello* hello);
  Channel* TakeChannel(Status* why);
  // Adds the buffers that were let go of to a call that is about to be sent.
  void AddReleased(std::string* message);
  void PostReleased();
  void GiveChannel(Channel* channel);
  Status CopyMemory(char* ours, uint64_t theirs, size_t size, bool is_read);
  void ReadEvents();
  // Ends the child if it has not ended, finds out how, and fails everything that waits for it. Returns death().
  Status Bury(const std::string& fault);
  // Ends the child once it gives no sign of life, or no answer, for as long as the settings allow.
  void Watch();
  std::string WhatIsWrong();

  const int silence_ms_, hang_ms_;
  const std::shared_ptr<ChildLog> log_;
  std::shared_ptr<Denials> denials_;  // NULL: the child reports nothing. Set before anybody else has the link
  Descriptor events_;
  const pid_t process_;
  const pid_t owner_;
  std::atomic<uint64_t> next_id_{1};
  SegmentPool segments_;
  bool reaches_memory_ = false;
  // Copies from and to the child's memory that are under way: its number names no other process until they are done.
  std::mutex memory_mutex_;
  std::condition_variable copies_changed_;
  size_t num_copies_ = 0;

  std::mutex channels_mutex_;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::vector<Channel*> free_channels_;
  std::mutex opening_mutex_;  // the event socket's sending side

  std::mutex released_mutex_;
  std::vector<int64_t> released_;
  int64_t released_bytes_ = 0;
  std::atomic<size_t> num_released_{0};

  std::mutex expected_mutex_;
  std::unordered_map<uint64_t, Expected> expected_;
  size_t num_owed_ = 0;        // by the child
  uint64_t num_expected_ = 0;  // ever
  uint64_t num_heard_ = 0;     // events that the child has told of
  std::condition_variable heard_changed_;
  std::thread::id reader_;       // the thread of ReadEvents()
  int64_t last_completion_ = 1;  // the tick at which it last completed one, or began to owe one

  // Time as the watch counts it: what passes while the whole machine, or host and child alike, are stopped is not the
  // child's.
  std::atomic<int64_t> tick_{1};
  std::atomic<int64_t> heard_{1};         // the tick of the last sign of life
  std::atomic<bool> is_listening_{true};  // false while the thread that reads signs of life does something else
  std::atomic<int64_t> num_owed_by_host_{0};
  Answerer answerer_;

  mutable std::mutex phase_mutex_;
  mutable std::condition_variable buried_;
  std::atomic<int> phase_{kAlive};
  Status death_;
};

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_LINK_H_
