// A channel: calls one way and replies the other, through two rings in shared memory and a pair of sockets.
//
// Messages go through the rings, without a system call while both sides are busy. The sockets wake a side that sleeps,
// carry what is too large for a ring and what comes with a descriptor, and end when the other process does. One thread at
// a time uses an end. Everything that the other side writes is read once, and checked before it is used.
#ifndef FLAGOS_ISOLATION_CHANNEL_H_
#define FLAGOS_ISOLATION_CHANNEL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "frames.h"
#include "segment.h"

namespace flagos_isolation {

struct RingHead;

class Channel {
 public:
  // The host's end; `theirs` is the child's socket. NULL where the system has no more sockets or memory (errno).
  static std::unique_ptr<Channel> Open(Descriptor* theirs);
  // The child's end, which waits for what Open() sends.
  static Receipt Join(Descriptor socket, std::unique_ptr<Channel>* channel);

  // kFrame: it has gone. A message must be smaller than 4 GiB. Neither function returns kTimeout.
  Receipt Send(uint64_t sequence, std::string_view message, int descriptor = -1);
  // Waits for the next message.
  Receipt Receive(Frame* frame);
  // Wakes and fails who uses the channel, at both ends; from any thread.
  void Shutdown();

  // The host's: of the last call, and the watchdog's tick at which the one under way began, 0 without one.
  uint64_t sequence = 0;
  std::atomic<int64_t> call_began{0};

 private:
  // A ring, and how far this side has come in it: what the other side writes cannot change that.
  struct Ring {
    RingHead* head = nullptr;
    char* data = nullptr;
    uint64_t position = 0;
  };

  Channel(Descriptor socket, std::shared_ptr<Segment> memory, bool is_host);
  Receipt AwaitSpace(uint64_t size);
  Receipt AwaitRecord(uint64_t* available);
  Receipt Sleep(uint64_t* available);
  bool Spin(uint64_t* available);
  uint64_t Available() const;

  Descriptor socket_;
  std::shared_ptr<Segment> memory_;
  Ring out_;
  Ring in_;
  // Spinning pays off while it finds something: each success adds one, each failure takes two.
  int credit_ = 4;
  unsigned waits_ = 0;
};

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_CHANNEL_H_
