#include "profiler.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "api.h"
#include "call.h"
#include "context.h"
#include "log.h"

namespace flagos {
namespace {

constexpr size_t kLongestCommand = 200;  // bytes of it that name a process

int64_t ThisThread() noexcept { return static_cast<int64_t>(syscall(SYS_gettid)); }

// A fork goes on in the same file under its own number.
int ThisProcess() noexcept { return static_cast<int>(getpid()); }

std::string SpanEvent(const Span& span, int64_t thread) {
  std::string text = Format(
      "{\"ph\":\"X\",\"cat\":\"%s\",\"name\":%s,\"pid\":%d,\"tid\":%lld,\"ts\":%.3f,\"dur\":%.3f,"
      "\"args\":{\"device\":%lld",
      span.category.c_str(), Quoted(span.name).c_str(), ThisProcess(), static_cast<long long>(thread),
      static_cast<double>(span.begin_ns) / 1e3, static_cast<double>(span.end_ns - span.begin_ns) / 1e3,
      static_cast<long long>(span.facts.device));
  const std::pair<const char*, int64_t> more[] = {
      {"bytes", span.facts.bytes}, {"program", span.facts.program}, {"step", span.facts.step}};
  for (const auto& [name, value] : more) {
    if (value >= 0) text += Format(",\"%s\":%lld", name, static_cast<long long>(value));
  }
  return text + "}}";
}

std::string NameEvent(const char* kind, int64_t thread, const std::string& name) {
  return Format("{\"ph\":\"M\",\"name\":\"%s\",\"pid\":%d,\"tid\":%lld,\"args\":{\"name\":%s}}", kind, ThisProcess(),
                static_cast<long long>(thread), Quoted(name).c_str());
}

// How this process was called.
std::string CommandOfProcess() {
  std::string command(kLongestCommand, '\0');
  const int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  const ssize_t size = file < 0 ? 0 : read(file, command.data(), command.size());
  if (file >= 0) close(file);
  command.resize(size > 0 ? static_cast<size_t>(size) : 0);
  while (!command.empty() && command.back() == '\0') command.pop_back();
  for (char& c : command) c = c == '\0' ? ' ' : c;
  return command.empty() ? "flagos" : command;
}

}  // namespace

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      quoted += Format("\\u%04x", c);
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

int64_t MonotonicNs() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Profiler::~Profiler() {
  if (file_ >= 0) close(file_);
}

bool Profiler::Start() {
  std::lock_guard<std::mutex> lock(mutex_);
  if ((active_.load() & kSession) != 0) return false;
  events_.clear();
  active_.fetch_or(kSession);
  return true;
}

bool Profiler::Stop(std::string& json) {
  std::vector<std::string> events;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if ((active_.load() & kSession) == 0) return false;
    active_.fetch_and(~kSession);
    events.swap(events_);
    if (!events.empty()) events.insert(events.begin(), descriptions_.begin(), descriptions_.end());
  }
  json = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
  const char* separator = "\n";
  for (const std::string& event : events) {
    json += separator;
    json += event;
    separator = ",\n";
  }
  json += "\n]}\n";
  return true;
}

void Profiler::Follow(const std::string& folder) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int number = 0; file_ < 0; ++number) {
    const std::string path = Format("%s/%d-%d.jsonl", folder.c_str(), ThisProcess(), number);
    file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (file_ < 0 && errno != EEXIST) {
      Fail(FLAGOS_INVALID_ARGUMENT,
           "context_create: FLAGOS_TRACE is '%s', where no file can be made (%s); name a folder that can be written in",
           folder.c_str(), std::strerror(errno));
    }
  }
  Write({NameEvent("process_name", ThisProcess(), CommandOfProcess())});
  active_.fetch_or(kFile);
}

void Profiler::Write(const std::vector<std::string>& events) {
  std::string lines;
  for (const std::string& event : events) (lines += event) += '\n';
  const char* next = lines.data();
  size_t left = lines.size();
  while (left > 0) {
    const ssize_t written = write(file_, next, left);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      Log(FLAGOS_LOG_ERROR, "the file of FLAGOS_TRACE cannot be written (%s); nothing more is recorded there",
          std::strerror(errno));
      active_.fetch_and(~kFile);
      return;
    }
    next += written;
    left -= static_cast<size_t>(written);
  }
}

void Profiler::NameThread(int64_t thread, std::vector<std::string>& events) {
  if (!named_threads_.insert(thread).second) return;
  char name[16] = "";  // as long as Linux has them
  pthread_getname_np(pthread_self(), name, sizeof(name));
  events.insert(events.begin(), NameEvent("thread_name", thread, name));
}

void Profiler::Record(std::vector<Span> spans) noexcept {
  try {
    const int64_t thread = ThisThread();
    std::vector<std::string> events;
    events.reserve(spans.size() + 1);
    for (const Span& span : spans) events.push_back(SpanEvent(span, thread));
    std::lock_guard<std::mutex> lock(mutex_);
    const int listeners = active_.load(std::memory_order_relaxed);
    if ((listeners & kSession) != 0) events_.insert(events_.end(), events.begin(), events.end());
    if ((listeners & kFile) == 0) return;
    NameThread(thread, events);
    Write(events);
  } catch (...) {
    // A span that finds no memory is missing from the trace; the program goes on.
  }
}

void Profiler::RecordMemory(int64_t device, int64_t bytes_in_use) noexcept {
  try {
    const std::string event = Format(
        "{\"ph\":\"C\",\"name\":\"memory in use, device %lld\",\"pid\":%d,\"ts\":%.3f,\"args\":{\"bytes\":%lld}}",
        static_cast<long long>(device), ThisProcess(), static_cast<double>(MonotonicNs()) / 1e3,
        static_cast<long long>(bytes_in_use));
    std::lock_guard<std::mutex> lock(mutex_);
    const int listeners = active_.load(std::memory_order_relaxed);
    if ((listeners & kSession) != 0) events_.push_back(event);
    if ((listeners & kFile) != 0) Write({event});
  } catch (...) {
    // As for spans.
  }
}

int64_t Profiler::NumberOf(const std::string& fingerprint) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = programs_.find(fingerprint);
  return found == programs_.end() ? -1 : found->second;
}

int64_t Profiler::Describe(const std::string& fingerprint, const std::string& facts) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [found, is_new] = programs_.emplace(fingerprint, static_cast<int64_t>(programs_.size()));
  if (is_new) {
    descriptions_.push_back(
        Format("{\"ph\":\"M\",\"name\":\"flagos_program\",\"pid\":%d,\"args\":{\"program\":%lld,\"facts\":%s}}",
               ThisProcess(), static_cast<long long>(found->second), facts.c_str()));
    if ((active_.load() & kFile) != 0) Write({descriptions_.back()});
  }
  return found->second;
}

ScopedSpan::ScopedSpan(Profiler& profiler, const char* category, const std::string& name, const SpanFacts& facts)
    : category_(category) {
  if (!profiler.active()) return;
  profiler_ = &profiler;
  name_ = name;
  facts_ = facts;
  begin_ns_ = MonotonicNs();
}

ScopedSpan::~ScopedSpan() { End(); }

void ScopedSpan::End() noexcept {
  if (profiler_ == nullptr) return;
  const int64_t end_ns = MonotonicNs();
  std::vector<Span> spans;
  try {
    spans.push_back({category_, std::move(name_), begin_ns_, end_ns, facts_});
  } catch (...) {
    // As in Record.
  }
  std::exchange(profiler_, nullptr)->Record(std::move(spans));
}

namespace api {

FlagosError* profiler_start(FlagosProfilerStartArgs* host) {
  return Enter("profiler_start", host, [](FlagosProfilerStartArgs& args) {
    FLAGOS_REQUIRE(args, context);
    if (!args.context->profiler.Start()) {
      Fail(FLAGOS_FAILED_PRECONDITION, "profiler_start: the profiler of this context runs already; stop it first");
    }
  });
}

FlagosError* profiler_stop(FlagosProfilerStopArgs* host) {
  return Enter("profiler_stop", host, [](FlagosProfilerStopArgs& args) {
    FLAGOS_REQUIRE(args, context);
    FLAGOS_REQUIRE(args, sink);
    std::string json;
    if (!args.context->profiler.Stop(json)) {
      Fail(FLAGOS_FAILED_PRECONDITION, "profiler_stop: the profiler of this context does not run; start it first");
    }
    args.sink(args.sink_data, json.data(), json.size());
  });
}

}  // namespace api
}  // namespace flagos
