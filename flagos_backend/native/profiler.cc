#include "profiler.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

#include "api.h"
#include "call.h"
#include "context.h"

namespace flagos {
namespace {

int64_t Now() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string Quote(const std::string& text) {
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

}  // namespace

bool Profiler::Start() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (active_.load()) return false;
  spans_.clear();
  active_.store(true);
  return true;
}

bool Profiler::Stop(std::string& json) {
  std::vector<Span> spans;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!active_.load()) return false;
    active_.store(false);
    spans.swap(spans_);
  }
  json = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
  const char* separator = "";
  for (const Span& span : spans) {
    json += Format(
        "%s\n{\"ph\":\"X\",\"cat\":\"%s\",\"name\":%s,\"pid\":%d,\"tid\":%lld,\"ts\":%.3f,\"dur\":%.3f,"
        "\"args\":{\"device\":%lld}}",
        separator, span.category, Quote(span.name).c_str(), static_cast<int>(getpid()),
        static_cast<long long>(span.thread), static_cast<double>(span.begin_ns) / 1e3,
        static_cast<double>(span.end_ns - span.begin_ns) / 1e3, static_cast<long long>(span.device));
    separator = ",";
  }
  json += "\n]}\n";
  return true;
}

void Profiler::Record(const char* category, std::string name, int64_t begin_ns, int64_t end_ns,
                      int64_t device) noexcept {
  try {
    const auto thread = static_cast<int64_t>(syscall(SYS_gettid));
    std::lock_guard<std::mutex> lock(mutex_);
    if (active_.load(std::memory_order_relaxed)) {
      spans_.push_back({category, std::move(name), begin_ns, end_ns, device, thread});
    }
  } catch (...) {
    // A span that finds no memory is missing from the trace; the program goes on.
  }
}

ScopedSpan::ScopedSpan(Profiler& profiler, const char* category, const std::string& name, int64_t device)
    : category_(category), device_(device) {
  if (!profiler.active()) return;
  profiler_ = &profiler;
  name_ = name;
  begin_ns_ = Now();
}

ScopedSpan::~ScopedSpan() {
  if (profiler_) profiler_->Record(category_, std::move(name_), begin_ns_, Now(), device_);
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
