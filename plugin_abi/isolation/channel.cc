#include "channel.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace flagos_isolation {

// What both sides see of a ring. Positions count bytes from the start and never wrap; a ring's are those modulo its size.
struct RingHead {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  // 1: the reader sleeps, or is about to; who writes makes it 0 and then sends a bell, an empty frame. Who made it 0
  // decides: a reader that finds it 0 when it changes its mind takes the bell that is on its way.
  alignas(64) std::atomic<uint32_t> asleep;
};

namespace {

using Clock = std::chrono::steady_clock;

// What comes before each message in a ring. Messages are padded to whole records, so that none is split by the end.
struct Record {
  uint32_t size;
  uint32_t place;  // kInRing or kInSocket
  uint64_t sequence;
};
constexpr uint32_t kInRing = 0, kInSocket = 1;
static_assert(sizeof(Record) == 16, "docs/isolation.md");
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "they lie in shared memory");

constexpr uint64_t kRingBytes = uint64_t{1} << 16;
constexpr uint64_t kMaxInRing = kRingBytes / 2;
constexpr size_t kPage = 4096;
static_assert(2 * sizeof(RingHead) <= kPage, "the rings begin behind their heads");
constexpr size_t kMemoryBytes = kPage + 2 * kRingBytes;

// How long a side looks for a message before it sleeps, and how often it tries although that did not pay off.
constexpr auto kSpin = std::chrono::microseconds(40);
constexpr int kMaxCredit = 8;
constexpr unsigned kProbe = 32;

uint64_t Padded(uint64_t size) { return (size + sizeof(Record) - 1) / sizeof(Record) * sizeof(Record); }

// A process of one processor keeps the other side from what it waits for.
bool HasProcessors() {
  static const bool has = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof(set), &set) != 0 || CPU_COUNT(&set) > 1;
  }();
  return has;
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void CopyIn(char* ring, uint64_t position, const void* from, size_t size) {
  const uint64_t at = position % kRingBytes;
  const size_t first = std::min<size_t>(size, kRingBytes - at);
  std::memcpy(ring + at, from, first);
  std::memcpy(ring, static_cast<const char*>(from) + first, size - first);
}

void CopyOut(const char* ring, uint64_t position, void* to, size_t size) {
  const uint64_t at = position % kRingBytes;
  const size_t first = std::min<size_t>(size, kRingBytes - at);
  std::memcpy(to, ring + at, first);
  std::memcpy(static_cast<char*>(to) + first, ring, size - first);
}

bool IsHungUp(int socket) {
  pollfd entry{socket, POLLRDHUP, 0};
  return poll(&entry, 1, 0) > 0;
}

}  // namespace

Channel::Channel(Descriptor socket, std::shared_ptr<Segment> memory, bool is_host)
    : socket_(std::move(socket)), memory_(std::move(memory)) {
  auto* heads = reinterpret_cast<RingHead*>(memory_->data());
  char* rings = memory_->data() + kPage;
  const Ring calls{&heads[0], rings, 0};
  const Ring replies{&heads[1], rings + kRingBytes, 0};
  out_ = is_host ? calls : replies;
  in_ = is_host ? replies : calls;
}

std::unique_ptr<Channel> Channel::Open(Descriptor* theirs) {
  Descriptor ours;
  if (!MakeSockets(&ours, theirs)) return nullptr;
  std::shared_ptr<Segment> memory = Segment::Make(0, kMemoryBytes);  // zero, as empty rings are
  if (memory == nullptr || !SendFrame(ours.get(), 0, {}, memory->descriptor())) return nullptr;
  memory->CloseDescriptor();
  return std::unique_ptr<Channel>(new Channel(std::move(ours), std::move(memory), /*is_host=*/true));
}

Receipt Channel::Join(Descriptor socket, std::unique_ptr<Channel>* channel) {
  Frame frame;
  if (const Receipt receipt = ReceiveFrame(socket.get(), &frame); receipt != Receipt::kFrame) return receipt;
  if (!frame.descriptor.valid()) return Receipt::kMalformed;
  std::shared_ptr<Segment> memory = Segment::Map(0, std::move(frame.descriptor));
  if (memory == nullptr || memory->size() != kMemoryBytes) return Receipt::kMalformed;
  memory->CloseDescriptor();
  channel->reset(new Channel(std::move(socket), std::move(memory), /*is_host=*/false));
  return Receipt::kFrame;
}

void Channel::Shutdown() { shutdown(socket_.get(), SHUT_RDWR); }

// ---- Sending --------------------------------------------------------------------------------------------------------

// A ring is full only behind a reader that is far behind: who writes looks again now and then.
Receipt Channel::AwaitSpace(uint64_t size) {
  while (true) {
    const uint64_t used = out_.position - out_.head->read.load(std::memory_order_acquire);
    if (used > kRingBytes) return Receipt::kMalformed;
    if (kRingBytes - used >= size) return Receipt::kFrame;
    if (IsHungUp(socket_.get())) return Receipt::kEnd;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Receipt Channel::Send(uint64_t sequence, std::string_view message, int descriptor) {
  const bool in_socket = descriptor >= 0 || message.size() > kMaxInRing;
  const Record record{static_cast<uint32_t>(message.size()), in_socket ? kInSocket : kInRing, sequence};
  const uint64_t size = sizeof(record) + (in_socket ? 0 : Padded(message.size()));
  if (const Receipt receipt = AwaitSpace(size); receipt != Receipt::kFrame) return receipt;
  CopyIn(out_.data, out_.position, &record, sizeof(record));
  if (!in_socket) CopyIn(out_.data, out_.position + sizeof(record), message.data(), message.size());
  out_.position += size;
  // In one order with the reader's store to `asleep` and its look at `written`: one of the two sees the other's.
  out_.head->written.store(out_.position, std::memory_order_seq_cst);
  if (out_.head->asleep.load(std::memory_order_seq_cst) != 0 && out_.head->asleep.exchange(0) != 0 &&
      !SendFrame(socket_.get(), 0, {})) {
    return Receipt::kEnd;
  }
  return !in_socket || SendFrame(socket_.get(), sequence, message, descriptor) ? Receipt::kFrame : Receipt::kEnd;
}

// ---- Receiving ------------------------------------------------------------------------------------------------------

uint64_t Channel::Available() const { return in_.head->written.load(std::memory_order_seq_cst) - in_.position; }

bool Channel::Spin(uint64_t* available) {
  if (!HasProcessors() || (credit_ <= 0 && ++waits_ % kProbe != 0)) return false;
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      *available = Available();
      if (*available != 0) {
        credit_ = std::min(credit_ + 1, kMaxCredit);
        return true;
      }
      Pause();
    }
  } while (Clock::now() < end);
  credit_ = std::max(credit_ - 2, 0);
  return false;
}

Receipt Channel::Sleep(uint64_t* available) {
  in_.head->asleep.store(1, std::memory_order_seq_cst);
  *available = Available();
  if (*available != 0 && in_.head->asleep.exchange(0) == 1) return Receipt::kFrame;
  Frame bell;
  const Receipt receipt = ReceiveFrame(socket_.get(), &bell);
  if (receipt != Receipt::kFrame) return receipt;
  *available = Available();
  // It rings after it has written.
  const bool is_bell = bell.sequence == 0 && bell.message.empty() && !bell.descriptor.valid();
  return is_bell && *available != 0 ? Receipt::kFrame : Receipt::kMalformed;
}

Receipt Channel::AwaitRecord(uint64_t* available) {
  *available = Available();
  if (*available == 0 && !Spin(available)) {
    if (const Receipt receipt = Sleep(available); receipt != Receipt::kFrame) return receipt;
  }
  return *available >= sizeof(Record) && *available <= kRingBytes ? Receipt::kFrame : Receipt::kMalformed;
}

Receipt Channel::Receive(Frame* frame) {
  *frame = Frame();
  uint64_t available = 0;
  if (const Receipt receipt = AwaitRecord(&available); receipt != Receipt::kFrame) return receipt;
  Record record{};
  CopyOut(in_.data, in_.position, &record, sizeof(record));  // the copy is what is checked and used
  uint64_t size = sizeof(record);
  if (record.place == kInSocket) {
    const Receipt receipt = ReceiveFrame(socket_.get(), frame);
    if (receipt != Receipt::kFrame) return receipt;
    if (frame->sequence != record.sequence || frame->message.size() != record.size) return Receipt::kMalformed;
  } else {
    if (record.place != kInRing || record.size > kMaxInRing) return Receipt::kMalformed;
    size += Padded(record.size);
    if (size > available) return Receipt::kMalformed;
    frame->sequence = record.sequence;
    frame->message.resize(record.size);
    CopyOut(in_.data, in_.position + sizeof(record), frame->message.data(), record.size);
  }
  in_.position += size;
  in_.head->read.store(in_.position, std::memory_order_release);
  return Receipt::kFrame;
}

}  // namespace flagos_isolation
