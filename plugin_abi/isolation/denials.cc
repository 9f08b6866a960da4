#include "denials.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <thread>
#include <utility>

namespace flagos_isolation {
namespace {

// The kernel's structs, as of Linux 5.0; headers of then lack them. They grow at their ends, and a process that knows less
// of them is served by the size within the number of the request.
struct Notification {
  uint64_t id;
  uint32_t process;
  uint32_t flags;
  int32_t number;
  uint32_t architecture;
  uint64_t place;
  uint64_t arguments[6];
};
struct Refusal {
  uint64_t id;
  int64_t value;
  int32_t error;
  uint32_t flags;
};
constexpr unsigned long kReceive = _IOWR('!', 0, Notification);
constexpr unsigned long kSend = _IOWR('!', 1, Refusal);

}  // namespace

Denials::Denials(Descriptor listener, const std::vector<std::string>& calls) : listener_(std::move(listener)) {
  MakeSockets(&closing_, &wakes_);
  for (const std::string& call : calls) {
    int number = -1;
    const char* end = call.data() + call.size();
    const auto [at, error] = std::from_chars(call.data(), end, number);
    if (error == std::errc() && at != end && *at == ' ') known_[number] = std::string(at + 1, end);
  }
}

void Denials::Start(Report report) {
  std::thread([own = shared_from_this(), report = std::move(report)] { own->Refuse(report); }).detach();
}

void Denials::Close() { closing_.Reset(); }

std::vector<std::string> Denials::Names() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return names_;
}

void Denials::Refuse(const Report& report) {
  pollfd waits[2] = {{listener_.get(), POLLIN, 0}, {wakes_.get(), 0, 0}};
  while (true) {
    if (poll(waits, 2, -1) < 0 && errno != EINTR) return;
    if (waits[1].revents != 0 || (waits[0].revents & (POLLHUP | POLLERR | POLLNVAL)) != 0) return;
    if ((waits[0].revents & POLLIN) == 0) continue;
    Notification notification{};  // the kernel refuses one that is not zero
    if (ioctl(listener_.get(), kReceive, &notification) != 0) {
      if (errno == EINTR || errno == ENOENT) continue;  // who called has ended meanwhile
      return;
    }
    Refusal refusal{};
    refusal.id = notification.id;
    refusal.error = -EPERM;
    ioctl(listener_.get(), kSend, &refusal);
    const auto known = known_.find(notification.number);
    const std::string name =
        known != known_.end() ? known->second : "system call " + std::to_string(notification.number);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (std::find(names_.begin(), names_.end(), name) != names_.end()) continue;
      names_.push_back(name);
    }
    report(name);
  }
}

}  // namespace flagos_isolation
