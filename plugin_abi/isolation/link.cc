#include "link.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

extern "C" char** environ;

namespace flagos_isolation {
namespace {

// Where the child finds its socket, and a number above it for ours, so that dup2 is never of a number to itself.
constexpr int kChildSocket = 3, kAboveChildSocket = 10;
// How long a child whose sockets are closed may take to end by itself.
constexpr int kEndMilliseconds = 2000;
constexpr char kModeVariable[] = "FLAGOS_ISOLATION=";

std::vector<char*> Pointers(std::vector<std::string>* strings) {
  std::vector<char*> pointers;
  for (std::string& string : *strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

// 0, or an errno. The child takes over `socket` and nothing else that it should not: standard input is empty.
int Spawn(std::vector<std::string> command, int socket, pid_t* process) {
  command.push_back(std::to_string(kChildSocket));
  std::vector<std::string> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (std::strncmp(*variable, kModeVariable, sizeof(kModeVariable) - 1) != 0) environment.emplace_back(*variable);
  }
  environment.push_back(std::string(kModeVariable) + "none");  // what the child loads stays in it
  const Descriptor high(fcntl(socket, F_DUPFD_CLOEXEC, kAboveChildSocket));
  if (!high.valid()) return errno;
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, high.get(), kChildSocket);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const int error = posix_spawnp(process, command[0].c_str(), &actions, &attributes, Pointers(&command).data(),
                                 Pointers(&environment).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return error;
}

std::string Describe(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    const int number = WTERMSIG(wait_status);
    return "was ended by signal " + std::to_string(number) + " (" + strsignal(number) + ")";
  }
  return "ended with exit status " + std::to_string(WEXITSTATUS(wait_status));
}

}  // namespace

// ---- Events ---------------------------------------------------------------------------------------------------------

void EventState::Complete(const Status& status) {
  std::vector<Listener> listeners;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ready_) return;
    ready_ = true;
    status_ = status;
    listeners.swap(listeners_);
    changed_.notify_all();
  }
  for (const Listener& listener : listeners) listener(status);
}

bool EventState::Query(Status* status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  *status = status_;
  return ready_;
}

bool EventState::Await(int64_t timeout_ns, Status* status) {
  // A time beyond any process's life is for ever; the clock would overflow.
  constexpr int64_t kForEver = int64_t{1} << 60;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto ready = [this] { return ready_; };
  if (timeout_ns < 0 || timeout_ns > kForEver) {
    changed_.wait(lock, ready);
  } else if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), ready)) {
    return false;
  }
  *status = status_;
  return true;
}

void EventState::OnReady(Listener listener) {
  Status status;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!ready_) {
      listeners_.push_back(std::move(listener));
      return;
    }
    status = status_;
  }
  listener(status);
}

// ---- Start and end --------------------------------------------------------------------------------------------------

Link::Link(Descriptor events, pid_t process) : events_(std::move(events)), process_(process), owner_(getpid()) {}

Link::~Link() = default;

std::shared_ptr<Link> Link::Start(const std::vector<std::string>& command, const Hello& own, int timeout_ms,
                                  Hello* hello, std::string* why) {
  Descriptor ours;
  Descriptor theirs;
  pid_t process = -1;
  int error = MakeSockets(&ours, &theirs) ? 0 : errno;
  if (error == 0) error = Spawn(command, theirs.get(), &process);
  if (error != 0) {
    *why = "the process " + command[0] + " cannot be started: " + std::strerror(error);
    return nullptr;
  }
  theirs.Reset();
  std::shared_ptr<Link> link(new Link(std::move(ours), process));
  Frame frame;
  SendFrame(link->events_.get(), 0, Encode(own));
  const Receipt receipt = ReceiveFrame(link->events_.get(), &frame, timeout_ms);
  std::string fault;
  if (receipt == Receipt::kTimeout) {
    fault = "did not answer within " + std::to_string(timeout_ms / 1000) + " s";
  } else if (receipt == Receipt::kMalformed || (receipt == Receipt::kFrame && !Decode(frame.message, hello))) {
    fault = "gave an answer that is none";
  } else if (receipt == Receipt::kFrame && hello->wire_version != kWireVersion) {
    fault = "speaks version " + std::to_string(hello->wire_version) + " of the wire, this host version " +
            std::to_string(kWireVersion) + "; install both from one build";
  }
  if (receipt != Receipt::kFrame || !fault.empty()) {
    *why = link->Bury(fault)->message;
    return nullptr;
  }
  if (!hello->refusal.empty()) {
    *why = hello->refusal;
    link->Bury("");
    return nullptr;
  }
  std::thread([link] { link->ReadEvents(); }).detach();
  return link;
}

std::string Link::HowItEnded() {
  // Its sockets are closed before it can be waited for.
  for (int waited = 0;; ++waited) {
    int status = 0;
    const pid_t found = waitpid(process_, &status, WNOHANG);
    if (found == process_) return Describe(status);
    if (found < 0 && errno != EINTR) return "ended, and somebody else was told how";
    if (waited == kEndMilliseconds) kill(process_, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Status Link::Bury(const std::string& fault) {
  {
    std::unique_lock<std::mutex> lock(phase_mutex_);
    if (phase_ != kAlive) {
      buried_.wait(lock, [this] { return phase_ == kDead; });
      return death_;
    }
    phase_ = kEnding;
  }
  if (!fault.empty()) kill(process_, SIGKILL);
  shutdown(events_.get(), SHUT_RDWR);
  {
    const std::lock_guard<std::mutex> lock(channels_mutex_);
    for (const auto& channel : channels_) shutdown(channel->socket.get(), SHUT_RDWR);
  }
  const std::string ended = HowItEnded();
  const std::string place = "the backend's process " + std::to_string(process_) + " ";
  const std::string fact = place + (fault.empty() ? ended : fault + ", and was ended");
  Status death = MakeStatus(FLAGOS_UNAVAILABLE,
                            fact + ". What was on its devices is lost. Make a new client, which starts a new process.");
  std::unordered_map<uint64_t, Expected> expected;
  {
    const std::lock_guard<std::mutex> lock(phase_mutex_);
    death_ = death;
    phase_ = kDead;
    buried_.notify_all();
  }
  {
    const std::lock_guard<std::mutex> lock(expected_mutex_);
    expected.swap(expected_);
  }
  for (auto& [id, waiting] : expected) {
    Status status = death;
    if (waiting.arrival != nullptr) waiting.arrival(&status, {});
    waiting.state->Complete(status);
  }
  return death;
}

Status Link::death() const {
  std::unique_lock<std::mutex> lock(phase_mutex_);
  buried_.wait(lock, [this] { return phase_ == kDead; });
  return death_;
}

bool Link::IsUsable() const { return alive() && getpid() == owner_; }

void Link::Close() {
  if (getpid() == owner_) shutdown(events_.get(), SHUT_RDWR);  // the thread of the link does the rest
}

Status Link::Malformed(const std::string& what) { return Bury("sent " + what); }

// ---- Calls ----------------------------------------------------------------------------------------------------------

Link::Channel* Link::TakeChannel(Status* why) {
  if (getpid() != owner_) {
    *why = MakeStatus(FLAGOS_UNAVAILABLE,
                      "the backend's process belongs to the process that this one was forked from. Make a client in a "
                      "process that was started anew (multiprocessing: \"spawn\").");
    return nullptr;
  }
  {
    const std::lock_guard<std::mutex> lock(channels_mutex_);
    if (!free_channels_.empty()) {
      Channel* channel = free_channels_.back();
      free_channels_.pop_back();
      return channel;
    }
  }
  if (!alive()) {
    *why = death();
    return nullptr;
  }
  Descriptor ours;
  Descriptor theirs;
  if (!MakeSockets(&ours, &theirs)) {
    *why = MakeStatus(FLAGOS_RESOURCE_EXHAUSTED, std::string("no more sockets to the backend's process: ") +
                                                     std::strerror(errno) + ". Close files, or allow more.");
    return nullptr;
  }
  bool sent = false;
  {
    const std::lock_guard<std::mutex> lock(opening_mutex_);
    sent = SendFrame(events_.get(), 0, {}, theirs.get());
  }
  if (!sent) {
    *why = Bury("");
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(channels_mutex_);
  if (!alive()) shutdown(ours.get(), SHUT_RDWR);  // Bury() has not seen this one
  channels_.push_back(std::make_unique<Channel>(std::move(ours)));
  return channels_.back().get();
}

void Link::GiveChannel(Channel* channel) {
  const std::lock_guard<std::mutex> lock(channels_mutex_);
  free_channels_.push_back(channel);
}

Status Link::Request(const Call& call, Reply* reply, Segment* segment) {
  const std::string message = Encode(call);
  if (message.size() > UINT32_MAX) {
    return MakeStatus(FLAGOS_RESOURCE_EXHAUSTED,
                      "a call of " + std::to_string(message.size()) +
                          " bytes does not fit into a message to the backend's process. Pass "
                          "large constants of a program as arguments.");
  }
  Status why;
  Channel* channel = TakeChannel(&why);
  if (channel == nullptr) return why;
  Frame frame;
  const bool announce = segment != nullptr && !segment->announced;
  const uint64_t sequence = ++channel->sequence;
  Receipt receipt = Receipt::kEnd;
  if (SendFrame(channel->socket.get(), sequence, message, announce ? segment->descriptor() : -1)) {
    receipt = ReceiveFrame(channel->socket.get(), &frame);
  }
  GiveChannel(channel);
  if (receipt == Receipt::kEnd) return Bury("");
  if (receipt != Receipt::kFrame || frame.sequence != sequence || !Decode(frame.message, reply)) {
    return Malformed("a reply that is none");
  }
  if (announce) segment->announced = true;
  for (const int64_t id : reply->ready) Complete(static_cast<uint64_t>(id), nullptr, reply->data);
  return reply->error;
}

void Link::Post(const Call& call) {
  Status why;
  Channel* channel = TakeChannel(&why);
  if (channel == nullptr) return;
  ++channel->sequence;
  SendFrame(channel->socket.get(), channel->sequence, Encode(call));
  GiveChannel(channel);
}

// ---- What the child says unasked ------------------------------------------------------------------------------------

std::shared_ptr<EventState> Link::Expect(uint64_t id, Arrival arrival) {
  auto state = std::make_shared<EventState>();
  {
    const std::lock_guard<std::mutex> lock(expected_mutex_);
    expected_[id] = {state, std::move(arrival)};
  }
  // Bury() fails what it finds, after it has set the phase.
  if (!alive()) Complete(id, death(), {});
  return state;
}

void Link::Complete(uint64_t id, Status status, std::string_view data) {
  Expected expected;
  {
    const std::lock_guard<std::mutex> lock(expected_mutex_);
    const auto found = expected_.find(id);
    if (found == expected_.end()) return;
    expected = std::move(found->second);
    expected_.erase(found);
  }
  if (expected.arrival != nullptr) expected.arrival(&status, data);
  expected.state->Complete(status);
}

void Link::ReadEvents() {
  Frame frame;
  while (true) {
    const Receipt receipt = ReceiveFrame(events_.get(), &frame);
    Done done;
    if (receipt == Receipt::kEnd) {
      Bury("");
      return;
    }
    if (receipt != Receipt::kFrame || !Decode(frame.message, &done)) {
      Malformed("an event that is none");
      return;
    }
    Complete(done.event, done.error, done.data);
  }
}

}  // namespace flagos_isolation
