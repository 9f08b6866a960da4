#include "frames.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

namespace flagos_isolation {
namespace {

constexpr size_t kReadStep = size_t{1} << 20;

bool WaitReadable(int socket, int timeout_ms) {
  pollfd entry{socket, POLLIN, 0};
  int ready = 0;
  do {
    ready = poll(&entry, 1, timeout_ms);
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

// Reads one piece; takes the first descriptor that came with it and closes all others.
ssize_t ReceiveSome(int socket, char* data, size_t size, Descriptor* descriptor) {
  iovec part{data, size};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got = 0;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return got;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      Descriptor received(number);
      if (!descriptor->valid()) *descriptor = std::move(received);
    }
  }
  return got;
}

// kEnd also when it comes in the middle of what was to be read; `*begun` tells.
Receipt ReceiveAll(int socket, char* data, size_t size, Descriptor* descriptor, int timeout_ms, bool* begun) {
  while (size > 0) {
    if (timeout_ms >= 0 && !WaitReadable(socket, timeout_ms)) return Receipt::kTimeout;
    const ssize_t got = ReceiveSome(socket, data, size, descriptor);
    if (got <= 0) return Receipt::kEnd;
    *begun = true;
    data += got;
    size -= static_cast<size_t>(got);
  }
  return Receipt::kFrame;
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    Reset();
    number_ = other.Release();
  }
  return *this;
}

int Descriptor::Release() {
  const int number = number_;
  number_ = -1;
  return number;
}

void Descriptor::Reset() {
  if (number_ >= 0) close(number_);
  number_ = -1;
}

bool SendFrame(int socket, uint64_t sequence, std::string_view message, int descriptor) {
  if (message.size() > std::numeric_limits<uint32_t>::max()) return false;
  FrameHeader frame{kMagic, static_cast<uint32_t>(message.size()), sequence};
  iovec parts[2] = {{&frame, sizeof(frame)}, {const_cast<char*>(message.data()), message.size()}};
  msghdr header{};
  header.msg_iov = parts;
  header.msg_iovlen = 2;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof(int));
  }
  size_t left = sizeof(frame) + message.size();
  while (true) {
    const ssize_t sent = sendmsg(socket, &header, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    left -= static_cast<size_t>(sent);
    if (left == 0) return true;
    header.msg_control = nullptr;
    header.msg_controllen = 0;
    auto gone = static_cast<size_t>(sent);
    for (iovec& part : parts) {
      const size_t taken = std::min(gone, part.iov_len);
      part.iov_base = static_cast<char*>(part.iov_base) + taken;
      part.iov_len -= taken;
      gone -= taken;
    }
  }
}

Receipt ReceiveFrame(int socket, Frame* frame, int timeout_ms) {
  *frame = Frame();
  FrameHeader header{};
  bool begun = false;
  Receipt receipt =
      ReceiveAll(socket, reinterpret_cast<char*>(&header), sizeof(header), &frame->descriptor, timeout_ms, &begun);
  if (receipt == Receipt::kEnd && begun) return Receipt::kMalformed;
  if (receipt != Receipt::kFrame) return receipt;
  if (header.magic != kMagic) return Receipt::kMalformed;
  frame->sequence = header.sequence;
  for (size_t have = 0; have < header.size;) {
    const size_t step = std::min(kReadStep, header.size - have);
    frame->message.resize(have + step);
    receipt = ReceiveAll(socket, &frame->message[have], step, &frame->descriptor, timeout_ms, &begun);
    if (receipt != Receipt::kFrame) return receipt == Receipt::kEnd ? Receipt::kMalformed : receipt;
    have += step;
  }
  return Receipt::kFrame;
}

bool MakeSockets(Descriptor* one, Descriptor* other) {
  int pair[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) return false;
  *one = Descriptor(pair[0]);
  *other = Descriptor(pair[1]);
  return true;
}

}  // namespace flagos_isolation
