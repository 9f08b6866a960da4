#include "link.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace flagos_isolation {
namespace {

constexpr int kTickMilliseconds = 250;
// What may wait for the next call that takes it along.
constexpr int64_t kTicksOfLife = 8;  // a child says each second that it lives
constexpr size_t kMaxReleased = 256;
constexpr int64_t kMaxReleasedBytes = int64_t{1} << 20;

// Buffers that were let go of may be added.
constexpr size_t kMaxMessage = UINT32_MAX - (size_t{1} << 20);

Status TooLarge(const std::string& what, size_t size) {
  return MakeStatus(FLAGOS_RESOURCE_EXHAUSTED, what + " of " + std::to_string(size) +
                                                   " bytes does not fit into a message to the backend's process. Pass "
                                                   "large constants of a program as arguments.");
}

std::string Seconds(int milliseconds) {
  std::string text = std::to_string(milliseconds / 1000);
  if (milliseconds % 1000 != 0) text += "." + std::to_string(milliseconds % 1000 / 100);
  return text + " s";
}

// Copies to memory that is not read soon: past the caches, where the processor can, so that it is not read before it is
// written. SettleStreamed() is called after the last copy.
void CopyStreaming(char* to, const char* from, size_t size) {
#if defined(__SSE2__)
  constexpr size_t kVector = sizeof(__m128i);
  const size_t head = std::min(size, (kVector - reinterpret_cast<uintptr_t>(to) % kVector) % kVector);
  std::memcpy(to, from, head);
  size_t done = head;
  for (; size - done >= 4 * kVector; done += 4 * kVector) {
    const auto* source = reinterpret_cast<const __m128i*>(from + done);
    auto* target = reinterpret_cast<__m128i*>(to + done);
    const __m128i vectors[4] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1), _mm_loadu_si128(source + 2),
                                _mm_loadu_si128(source + 3)};
    for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, vectors[i]);
  }
  std::memcpy(to + done, from + done, size - done);
#else
  std::memcpy(to, from, size);
#endif
}

void SettleStreamed() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
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

Link::Link(const Settings& settings, Descriptor events, std::shared_ptr<ChildLog> log, pid_t process)
    : silence_ms_(settings.silence_ms),
      hang_ms_(settings.hang_ms),
      log_(std::move(log)),
      events_(std::move(events)),
      process_(process),
      owner_(getpid()) {}

Link::~Link() = default;

std::shared_ptr<Link> Link::Start(const Settings& settings, const Hello& own, Hello* hello, std::string* why) {
  // The child is killed when the thread that started it ends: it must be one that lives as long as the child is used.
  // No std::promise: it holds exceptions, whose functions a libstdc++ of manylinux_2_28 lacks.
  struct Begun {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::shared_ptr<Link> link;
  };
  auto begun = std::make_shared<Begun>();
  std::thread([&settings, &own, hello, why, begun] {
    std::shared_ptr<Link> made = Begin(settings, own, hello, why);
    {
      std::lock_guard<std::mutex> lock(begun->mutex);
      begun->link = made;
      begun->done = true;
      begun->changed.notify_all();
    }
    if (made != nullptr) made->ReadEvents();
  }).detach();
  std::unique_lock<std::mutex> lock(begun->mutex);
  begun->changed.wait(lock, [&begun] { return begun->done; });
  return std::move(begun->link);
}

std::shared_ptr<Link> Link::Begin(const Settings& settings, const Hello& own, Hello* hello, std::string* why) {
  Descriptor ours;
  Descriptor theirs;
  int pipes[2] = {-1, -1};
  pid_t process = -1;
  int error = MakeSockets(&ours, &theirs) && pipe2(pipes, O_CLOEXEC) == 0 ? 0 : errno;
  Descriptor reading(pipes[0]);
  Descriptor writing(pipes[1]);
  if (error == 0) error = StartProcess(settings, theirs.get(), writing.get(), &process);
  if (error != 0) {
    *why = "the process " + settings.command[0] + " cannot be started: " + std::strerror(error);
    return nullptr;
  }
  theirs.Reset();
  writing.Reset();
  auto log = std::make_shared<ChildLog>(std::move(reading));
  log->Start();
  std::shared_ptr<Link> link(new Link(settings, std::move(ours), std::move(log), process));
  SendFrame(link->events_.get(), 0, Encode(own));
  Receipt receipt = Receipt::kEnd;
  const std::string fault = link->AwaitHello(settings.start_ms, &receipt, hello);
  if (receipt != Receipt::kFrame || !fault.empty()) {
    *why = link->Bury(fault)->message;
    return nullptr;
  }
  if (!hello->refusal.empty()) {
    *why = hello->refusal;
    link->Bury("");
    return nullptr;
  }
  char probe = 0;
  const iovec here{&probe, sizeof(probe)};
  const iovec there{reinterpret_cast<void*>(hello->probe), sizeof(probe)};
  link->reaches_memory_ = process_vm_readv(process, &here, 1, &there, 1, 0) == ssize_t{sizeof(probe)};
  std::thread([link] { link->Watch(); }).detach();
  return link;
}

std::string Link::AwaitHello(int start_ms, Receipt* receipt, Hello* hello) {
  while (true) {
    Frame frame;
    *hello = Hello();
    *receipt = ReceiveFrame(events_.get(), &frame, start_ms);
    if (*receipt == Receipt::kTimeout) return "did not answer within " + Seconds(start_ms);
    if (*receipt == Receipt::kEnd) return "";
    if (*receipt == Receipt::kMalformed || !Decode(frame.message, hello)) return "gave an answer that is none";
    if (hello->wire_version != kWireVersion) {
      return "speaks version " + std::to_string(hello->wire_version) + " of the wire, this host version " +
             std::to_string(kWireVersion) + "; install both from one build";
    }
    if (!frame.descriptor.valid()) return "";
    if (denials_ != nullptr) return "gave an answer that is none";
    denials_ = std::make_shared<Denials>(std::move(frame.descriptor), hello->denied);
    denials_->Start([log = log_, own = process_](const std::string& name) {
      log->Add("flagos: the backend's process " + std::to_string(own) + " was denied " + name + "\n");
    });
  }
}

// ---- Signs of life --------------------------------------------------------------------------------------------------

void Link::Watch() {
  size_t num_released = 0;
  while (alive()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(kTickMilliseconds));
    ++tick_;
    // What came while nobody listened is not read yet.
    if (!is_listening_) heard_ = tick_.load();
    const std::string fault = WhatIsWrong();
    if (!fault.empty()) Bury(fault);
    // No call has come since the last tick. A child that does not read is not written to: that might never return.
    const bool is_heard = tick_ - heard_ <= kTicksOfLife;
    if (const size_t now = num_released_; now != 0 && now == std::exchange(num_released, now) && is_heard)
      PostReleased();
  }
}

std::string Link::WhatIsWrong() {
  const int64_t now = tick_;
  const auto is_over = [now](int64_t since, int limit_ms) {
    return limit_ms > 0 && (now - since) * kTickMilliseconds > limit_ms;
  };
  if (is_over(heard_, silence_ms_)) {
    return "gave no sign of life for " + Seconds(silence_ms_) + " (stopped, or out of memory or of processors)";
  }
  if (hang_ms_ <= 0 || num_owed_by_host_ > 0) return "";
  const std::string limit = Seconds(hang_ms_) + ", the limit that FLAGOS_ISOLATION_TIMEOUT or its manifest sets";
  {
    const std::lock_guard<std::mutex> lock(channels_mutex_);
    for (const auto& channel : channels_) {
      const int64_t began = channel->call_began;
      if (began != 0 && is_over(began, hang_ms_)) return "did not answer a call within " + limit;
    }
  }
  const std::lock_guard<std::mutex> lock(expected_mutex_);
  if (num_owed_ == 0 || !is_over(last_completion_, hang_ms_)) return "";
  return "completed no launch and no transfer within " + limit;
}

// ---- End ------------------------------------------------------------------------------------------------------------

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
    for (const auto& channel : channels_) channel->Shutdown();
  }
  // Who uses the child's memory looks at the phase first.
  {
    std::unique_lock<std::mutex> lock(memory_mutex_);
    copies_changed_.wait(lock, [this] { return num_copies_ == 0; });
  }
  const std::string ended = AwaitEnd(process_);
  if (denials_ != nullptr) denials_->Close();
  const std::string place = "the backend's process " + std::to_string(process_) + " ";
  std::string fact = place + (fault.empty() ? ended : fault + ", and was ended") + ".";
  if (const std::string lines = log_->LastLines(); !lines.empty()) fact += " It wrote last: " + lines + ".";
  Status death = MakeStatus(FLAGOS_UNAVAILABLE,
                            fact + " What was on its devices is lost. Make a new client, which starts a new process.");
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
    num_owed_ = 0;
    heard_changed_.notify_all();
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

Channel* Link::TakeChannel(Status* why) {
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
  Descriptor theirs;
  std::unique_ptr<Channel> channel = Channel::Open(&theirs);
  if (channel == nullptr) {
    *why =
        MakeStatus(FLAGOS_RESOURCE_EXHAUSTED, std::string("no more channels to the backend's process: ") +
                                                  std::strerror(errno) + ". Close files, free memory, or allow more.");
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
  if (!alive()) channel->Shutdown();  // Bury() has not seen this one
  channels_.push_back(std::move(channel));
  return channels_.back().get();
}

void Link::GiveChannel(Channel* channel) {
  const std::lock_guard<std::mutex> lock(channels_mutex_);
  free_channels_.push_back(channel);
}

Status Link::Request(const Call& call, Reply* reply, Segment* segment) {
  std::string message = Encode(call);
  if (message.size() > kMaxMessage) return TooLarge("a call", message.size());
  Status why;
  Channel* channel = TakeChannel(&why);
  if (channel == nullptr) return why;
  AddReleased(&message);
  Frame frame;
  const bool announce = segment != nullptr && !segment->announced;
  const uint64_t sequence = ++channel->sequence;
  channel->call_began.store(tick_, std::memory_order_relaxed);
  Receipt receipt = channel->Send(sequence, message, announce ? segment->descriptor() : -1);
  if (receipt == Receipt::kFrame) receipt = channel->Receive(&frame);
  channel->call_began.store(0, std::memory_order_relaxed);
  GiveChannel(channel);
  if (receipt == Receipt::kEnd) return Bury("");
  if (receipt != Receipt::kFrame || frame.sequence != sequence || !Decode(frame.message, reply)) {
    return Malformed("a reply that is none");
  }
  if (announce) segment->announced = true;
  for (const int64_t id : reply->ready) Complete(static_cast<uint64_t>(id), nullptr, {reply->data, reply->address});
  return reply->error;
}

Status Link::Post(const Call& call) {
  std::string message = Encode(call);
  if (message.size() > kMaxMessage) return TooLarge("a message", message.size());
  Status why;
  Channel* channel = TakeChannel(&why);
  if (channel == nullptr) return why;
  AddReleased(&message);
  ++channel->sequence;
  const Receipt receipt = channel->Send(channel->sequence, message);
  GiveChannel(channel);
  return receipt == Receipt::kFrame ? nullptr : Bury("");
}

void Link::Release(uint64_t buffer, int64_t size) {
  bool is_much = false;
  {
    const std::lock_guard<std::mutex> lock(released_mutex_);
    released_.push_back(static_cast<int64_t>(buffer));
    released_bytes_ += std::min(size, kMaxReleasedBytes);
    num_released_ = released_.size();
    is_much = released_bytes_ >= kMaxReleasedBytes || released_.size() >= kMaxReleased;
  }
  if (is_much) PostReleased();
}

void Link::AddReleased(std::string* message) {
  if (num_released_ == 0) return;
  Call released;
  {
    const std::lock_guard<std::mutex> lock(released_mutex_);
    released.destroyed.swap(released_);
    released_bytes_ = 0;
    num_released_ = 0;
  }
  message->append(Encode(released));  // two messages in a row are one with the fields of both
}

void Link::PostReleased() {
  Call call;
  call.method = Method::kBufferDestroy;
  Post(call);
}

// ---- The child's memory ---------------------------------------------------------------------------------------------

Status Link::ReadMemory(void* to, uint64_t address, size_t size) {
  // A copy by the system takes three times as long where its target is less than a vector behind its source within a page,
  // as large arrays of malloc are: loads wait for stores that seem to be to their place. Those go through the cache.
  constexpr size_t kPage = 4096;
  constexpr size_t kBehind = 32;
  const size_t behind = (reinterpret_cast<uintptr_t>(to) - address) % kPage;
  if (behind == 0 || behind >= kBehind || size < kPage) {
    return CopyMemory(static_cast<char*>(to), address, size, /*is_read=*/true);
  }
  constexpr size_t kStep = size_t{256} << 10;
  const std::unique_ptr<char[]> space(new char[kStep + kPage]);
  // Neither copy has such a distance then.
  const size_t wanted = (reinterpret_cast<uintptr_t>(to) + 2 * kBehind) % kPage;
  char* between = space.get() + (wanted - reinterpret_cast<uintptr_t>(space.get())) % kPage;
  for (size_t done = 0; done < size; done += kStep) {
    const size_t step = std::min(kStep, size - done);
    if (Status status = CopyMemory(between, address + done, step, /*is_read=*/true); status != nullptr) return status;
    CopyStreaming(static_cast<char*>(to) + done, between, step);
  }
  SettleStreamed();
  return nullptr;
}

Status Link::WriteMemory(uint64_t address, const void* from, size_t size) {
  return CopyMemory(static_cast<char*>(const_cast<void*>(from)), address, size, /*is_read=*/false);
}

Status Link::CopyMemory(char* ours, uint64_t theirs, size_t size, bool is_read) {
  constexpr size_t kMostAtOnce = size_t{64} << 20;
  while (size > 0) {
    bool has_begun = false;
    {
      const std::lock_guard<std::mutex> lock(memory_mutex_);
      has_begun = alive();
      if (has_begun) ++num_copies_;
    }
    if (!has_begun) return death();
    const size_t step = std::min(size, kMostAtOnce);
    const iovec here{ours, step};
    const iovec there{reinterpret_cast<void*>(theirs), step};
    const ssize_t copied = is_read ? process_vm_readv(process_, &here, 1, &there, 1, 0)
                                   : process_vm_writev(process_, &here, 1, &there, 1, 0);
    const int error = errno;
    {
      const std::lock_guard<std::mutex> lock(memory_mutex_);
      if (--num_copies_ == 0) copies_changed_.notify_all();
    }
    if (copied <= 0) {
      if (!alive()) return death();
      if (error == ESRCH) return Bury("");
      return Malformed(std::string("an address of memory that is not there (") + std::strerror(error) + ")");
    }
    ours += copied;
    theirs += static_cast<uint64_t>(copied);
    size -= static_cast<size_t>(copied);
  }
  return nullptr;
}

// ---- What the child says unasked ------------------------------------------------------------------------------------

std::shared_ptr<EventState> Link::Expect(uint64_t id, Arrival arrival, bool is_owed) {
  auto state = std::make_shared<EventState>();
  {
    const std::lock_guard<std::mutex> lock(expected_mutex_);
    expected_[id] = {state, std::move(arrival), is_owed};
    ++num_expected_;
    if (is_owed && num_owed_++ == 0) last_completion_ = tick_;
  }
  // Bury() fails what it finds, after it has set the phase.
  if (!alive()) Complete(id, death(), {});
  return state;
}

void Link::Complete(uint64_t id, Status status, const Delivery& delivery) {
  Expected expected;
  {
    const std::lock_guard<std::mutex> lock(expected_mutex_);
    const auto found = expected_.find(id);
    if (found == expected_.end()) return;
    expected = std::move(found->second);
    expected_.erase(found);
    if (expected.is_owed) {
      --num_owed_;
      last_completion_ = tick_;
    }
  }
  if (expected.arrival != nullptr) expected.arrival(&status, delivery);
  expected.state->Complete(status);
}

Status Link::AwaitEvents(int64_t count) {
  std::unique_lock<std::mutex> lock(expected_mutex_);
  if (count < 0 || static_cast<uint64_t>(count) > num_expected_) {
    lock.unlock();
    return Malformed("more events than it owes");
  }
  // What the reader itself asks for, in a listener, it cannot wait for.
  if (std::this_thread::get_id() == reader_) return nullptr;
  if (num_owed_++ == 0) last_completion_ = tick_;
  heard_changed_.wait(lock, [&] { return num_heard_ >= static_cast<uint64_t>(count) || !alive(); });
  if (num_owed_ > 0) --num_owed_;
  return nullptr;
}

void Link::ReadEvents() {
  {
    const std::lock_guard<std::mutex> lock(expected_mutex_);
    reader_ = std::this_thread::get_id();
  }
  Frame frame;
  while (true) {
    is_listening_ = true;
    const Receipt receipt = ReceiveFrame(events_.get(), &frame);
    is_listening_ = false;
    heard_ = tick_.load();
    Done done;
    if (receipt == Receipt::kEnd) {
      Bury("");
      return;
    }
    if (receipt != Receipt::kFrame || !Decode(frame.message, &done)) {
      Malformed("an event that is none");
      return;
    }
    if (done.ask.id != 0) {
      if (answerer_.Take(shared_from_this(), std::move(done.ask))) continue;
      Malformed("more questions than a host answers");
      return;
    }
    if (done.event == 0) continue;  // a sign of life
    Complete(done.event, done.error, {done.data, done.address});
    const std::lock_guard<std::mutex> lock(expected_mutex_);
    ++num_heard_;
    heard_changed_.notify_all();
  }
}

}  // namespace flagos_isolation
