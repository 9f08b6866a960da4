// Frames: how a message goes through a stream socket, perhaps with one file descriptor.
#ifndef FLAGOS_ISOLATION_FRAMES_H_
#define FLAGOS_ISOLATION_FRAMES_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace flagos_isolation {

// A descriptor that is closed at the end.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(other.Release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { Reset(); }
  int get() const { return number_; }
  bool valid() const { return number_ >= 0; }
  int Release();
  void Reset();

 private:
  int number_ = -1;
};

// What comes before each message, in the byte order of the machine: both ends are one machine.
struct FrameHeader {
  uint32_t magic;     // kMagic
  uint32_t size;      // of the message
  uint64_t sequence;  // of a call; a reply has its call's; 0 for anything else
};
constexpr uint32_t kMagic = 0x31474c46;  // "FLG1"
static_assert(sizeof(FrameHeader) == 16, "docs/isolation.md");

struct Frame {
  uint64_t sequence = 0;
  std::string message;
  Descriptor descriptor;
};

enum class Receipt { kFrame, kEnd, kMalformed, kTimeout };

// False when the other end is gone or the message is larger than a frame can be. Never raises SIGPIPE.
bool SendFrame(int socket, uint64_t sequence, std::string_view message, int descriptor = -1);
// `timeout_ms` below zero: for ever; it bounds the wait for each part. Memory grows with what arrives, not with what a
// header says.
Receipt ReceiveFrame(int socket, Frame* frame, int timeout_ms = -1);
// Two connected stream sockets, closed on exec. False where the system has no more.
bool MakeSockets(Descriptor* one, Descriptor* other);

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_FRAMES_H_
