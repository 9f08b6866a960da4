#include "profiler.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "api.h"
#include "call.h"
#include "context.h"
#include "log.h"
#include "program.h"

namespace flagos {
namespace {

constexpr size_t kLongestCommand = 200;  // bytes of it that name a process

std::atomic<int> g_forks{0};  // between the first process and this one

// Which process and thread this is, without a system call for each event.
struct Caller {
  int forks = -1;
  uint32_t process = 0, thread = 0;
};

const Caller& ThisCaller() noexcept {
  static thread_local Caller caller;
  const int forks = g_forks.load(std::memory_order_relaxed);
  if (caller.forks != forks) {
    caller = {forks, static_cast<uint32_t>(getpid()), static_cast<uint32_t>(syscall(SYS_gettid))};
  }
  return caller;
}

// Before the first event. A fork goes on in the same file under its own number.
void CountForks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_forks.fetch_add(1); });
  if (registered != 0) Fail(FLAGOS_RESOURCE_EXHAUSTED, "profiler: no memory to follow forks");
}

std::string NameEvent(const char* kind, uint32_t thread, const std::string& name) {
  return Format("{\"ph\":\"M\",\"name\":\"%s\",\"pid\":%u,\"tid\":%u,\"args\":{\"name\":%s}}", kind,
                ThisCaller().process, thread, Quoted(name).c_str());
}

// What the numbers of records mean.
std::string FormatEvent() {
  std::string categories;
  for (const char* name : kSpanCategories) categories += (categories.empty() ? "" : ",") + Quoted(name);
  return Format("{\"ph\":\"M\",\"name\":\"flagos_records\",\"pid\":%u,\"args\":{\"categories\":[%s]}}",
                ThisCaller().process, categories.c_str());
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

TraceRecord SpanRecord(SpanCategory category, uint32_t name, int64_t begin_ns, int64_t end_ns, const SpanFacts& facts) {
  TraceRecord record;
  record.kind = RecordKind::kSpan;
  record.category = category;
  record.name = name;
  record.device = static_cast<int32_t>(facts.device);
  record.program = static_cast<int32_t>(facts.program);
  record.step = static_cast<int32_t>(facts.step);
  record.begin_ns = begin_ns;
  record.end_ns = end_ns;
  record.bytes = facts.bytes;
  return record;
}

Profiler::~Profiler() {
  if (texts_file_ >= 0) close(texts_file_);
}

bool Profiler::Start() {
  CountForks();
  std::lock_guard<std::mutex> lock(mutex_);
  if ((active_.load() & kSession) != 0) return false;
  records_.clear();
  active_.fetch_or(kSession);
  return true;
}

bool Profiler::Stop(std::string& json) {
  std::lock_guard<std::mutex> lock(mutex_);
  if ((active_.load() & kSession) == 0) return false;
  active_.fetch_and(~kSession);
  std::vector<TraceRecord> records;
  records.swap(records_);
  json = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
  const char* separator = "\n";
  const auto add = [&](const std::string& event) {
    json += separator;
    json += event;
    separator = ",\n";
  };
  if (!records.empty()) {
    for (const auto& [number, program] : descriptions_) add(DescriptionEvent(number, program));
  }
  TraceRecord step;  // the next of a run
  for (const TraceRecord& record : records) {
    if (record.kind == RecordKind::kSteps) {
      step = record;
      step.kind = RecordKind::kSpan;
      step.bytes = -1;
    } else if (record.kind == RecordKind::kStepEnds) {
      StepEnds ends;
      std::memcpy(static_cast<void*>(&ends), &record, sizeof(ends));
      for (uint32_t i = 0; i < ends.count; ++i) {
        step.end_ns = ends.end_ns[i];
        add(Event(step));
        step.begin_ns = step.end_ns;
        ++step.step;
      }
    } else {
      add(Event(record));
    }
  }
  json += "\n]}\n";
  return true;
}

void Profiler::Follow(const std::string& folder) {
  CountForks();
  std::lock_guard<std::mutex> lock(mutex_);
  for (int number = 0; texts_file_ < 0; ++number) {
    const std::string path = Format("%s/%u-%d", folder.c_str(), ThisCaller().process, number);
    if (file_.is_open() || file_.Open(path + ".records")) {
      texts_file_ = open((path + ".jsonl").c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    }
    if (texts_file_ < 0 && (file_.is_open() || errno != EEXIST)) {
      Fail(FLAGOS_INVALID_ARGUMENT,
           "context_create: FLAGOS_TRACE is '%s', where no file can be made (%s); name a folder that can be written in",
           folder.c_str(), std::strerror(errno));
    }
  }
  active_.fetch_or(kFile);
  Write(FormatEvent());
  Write(NameEvent("process_name", ThisCaller().process, CommandOfProcess()));
}

void Profiler::GiveFileUp(const char* what) noexcept {
  Log(FLAGOS_LOG_ERROR, "the %s of FLAGOS_TRACE cannot be written (%s); nothing more is recorded there", what,
      std::strerror(errno));
  active_.fetch_and(~kFile);
}

void Profiler::Write(const std::string& event) {
  if ((active_.load(std::memory_order_relaxed) & kFile) == 0) return;
  const std::string line = event + '\n';
  const char* next = line.data();
  size_t left = line.size();
  while (left > 0) {
    const ssize_t written = write(texts_file_, next, left);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return GiveFileUp("texts");
    next += written;
    left -= static_cast<size_t>(written);
  }
}

void Profiler::NameThread(uint32_t thread) {
  if (thread == last_named_) return;
  last_named_ = thread;
  if (!named_threads_.insert(thread).second) return;
  char name[16] = "";  // as long as Linux has them
  pthread_getname_np(pthread_self(), name, sizeof(name));
  Write(NameEvent("thread_name", thread, name));
}

uint32_t Profiler::Text(std::string_view text) noexcept {
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [found, is_new] = texts_.try_emplace(std::string(text), 0);
    if (!is_new && found->second != 0) return found->second;
    const uint32_t number = file_.is_open() ? file_.NewTextNumber() : static_cast<uint32_t>(texts_.size());
    by_number_.emplace(number, &found->first);
    found->second = number;
    Write(Format("{\"ph\":\"M\",\"name\":\"flagos_text\",\"pid\":%u,\"args\":{\"number\":%u,\"text\":%s}}",
                 ThisCaller().process, number, Quoted(found->first).c_str()));
    return number;
  } catch (...) {
    return 0;
  }
}

void Profiler::Record(TraceRecord record) noexcept {
  const Caller& caller = ThisCaller();
  record.process = caller.process;
  record.thread = caller.thread;
  Keep(&record, 1);
}

void Profiler::RecordSteps(const SpanFacts& run, const std::vector<int64_t>& times) noexcept {
  if (times.size() < 2) return;
  try {
    const size_t steps = times.size() - 1;
    std::vector<TraceRecord> records(1 + (steps + StepEnds::kMost - 1) / StepEnds::kMost);
    const Caller& caller = ThisCaller();
    records[0] = SpanRecord(SpanCategory::kStep, 0, times.front(), times.back(), run);
    records[0].kind = RecordKind::kSteps;
    records[0].process = caller.process;
    records[0].thread = caller.thread;
    records[0].step = 0;
    records[0].bytes = static_cast<int64_t>(steps);
    for (size_t done = 0, record = 1; done < steps; done += StepEnds::kMost, ++record) {
      StepEnds ends;
      ends.count = static_cast<uint32_t>(std::min(StepEnds::kMost, steps - done));
      std::copy_n(&times[1 + done], ends.count, ends.end_ns);
      std::memcpy(static_cast<void*>(&records[record]), &ends, sizeof(ends));
    }
    Keep(records.data(), records.size());
  } catch (...) {
    // As in Keep.
  }
}

void Profiler::Keep(const TraceRecord* records, size_t count) noexcept {
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    const int listeners = active_.load(std::memory_order_relaxed);
    if ((listeners & kSession) != 0) records_.insert(records_.end(), records, records + count);
    if ((listeners & kFile) == 0) return;
    NameThread(ThisCaller().thread);
    if (!file_.Append(records, count)) GiveFileUp("records");
  } catch (...) {
    // An event that finds no memory is missing from the trace; the program goes on.
  }
}

void Profiler::RecordMemory(int64_t device, int64_t bytes_in_use) noexcept {
  TraceRecord record;
  record.kind = RecordKind::kMemoryInUse;
  record.device = static_cast<int32_t>(device);
  record.begin_ns = record.end_ns = MonotonicNs();
  record.bytes = bytes_in_use;
  Record(record);
}

int64_t Profiler::NumberOf(const std::string& fingerprint) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = programs_.find(fingerprint);
  return found == programs_.end() ? -1 : static_cast<int64_t>(found->second);
}

int64_t Profiler::Describe(const std::string& fingerprint, const std::string& name,
                           std::shared_ptr<const ProgramNotes> notes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = programs_.find(fingerprint); found != programs_.end()) return found->second;
  const uint32_t number = file_.is_open() ? file_.NewProgramNumber() : static_cast<uint32_t>(programs_.size());
  const auto described = descriptions_.emplace(number, Described{ThisCaller().process, name, std::move(notes)}).first;
  programs_.emplace(fingerprint, number);
  Write(DescriptionEvent(number, described->second));
  return number;
}

std::string Profiler::DescriptionEvent(uint32_t number, const Described& program) const {
  const std::string facts = program.notes ? program.notes->facts : "{\"name\":" + Quoted(program.name) + "}";
  return Format("{\"ph\":\"M\",\"name\":\"flagos_program\",\"pid\":%u,\"args\":{\"program\":%u,\"facts\":%s}}",
                program.process, number, facts.c_str());
}

std::string Profiler::NameOf(const TraceRecord& record) const {
  if (const auto text = by_number_.find(record.name); text != by_number_.end()) return *text->second;
  const auto program = descriptions_.find(static_cast<uint32_t>(record.program));
  if (record.step >= 0) {
    const auto step = static_cast<size_t>(record.step);
    const ProgramNotes* notes = program == descriptions_.end() ? nullptr : program->second.notes.get();
    const bool is_known = notes != nullptr && step < notes->steps.size() && !notes->steps[step].empty();
    return is_known ? notes->steps[step] : Format("step %zu", step);
  }
  return program != descriptions_.end() ? program->second.name : "";
}

std::string Profiler::Event(const TraceRecord& record) const {
  const double begin_us = static_cast<double>(record.begin_ns) / 1e3;
  if (record.kind == RecordKind::kMemoryInUse) {
    return Format(
        "{\"ph\":\"C\",\"name\":\"memory in use, device %d\",\"pid\":%u,\"ts\":%.3f,\"args\":{\"bytes\":%lld}}",
        record.device, record.process, begin_us, static_cast<long long>(record.bytes));
  }
  std::string text = Format(
      "{\"ph\":\"X\",\"cat\":\"%s\",\"name\":%s,\"pid\":%u,\"tid\":%u,\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"device\":%d",
      kSpanCategories[static_cast<size_t>(record.category)], Quoted(NameOf(record)).c_str(), record.process,
      record.thread, begin_us, static_cast<double>(record.end_ns - record.begin_ns) / 1e3, record.device);
  const std::pair<const char*, int64_t> more[] = {
      {"bytes", record.bytes}, {"program", record.program}, {"step", record.step}};
  for (const auto& [name, value] : more) {
    if (value >= 0) text += Format(",\"%s\":%lld", name, static_cast<long long>(value));
  }
  return text + "}}";
}

ScopedSpan::ScopedSpan(Profiler& profiler, SpanCategory category, const char* name, const SpanFacts& facts) noexcept
    : category_(category) {
  if (!profiler.active()) return;
  profiler_ = &profiler;
  name_ = name == nullptr ? 0 : profiler.Text(name);
  facts_ = facts;
  begin_ns_ = MonotonicNs();
}

void ScopedSpan::End() noexcept {
  if (profiler_ == nullptr) return;
  std::exchange(profiler_, nullptr)->Record(SpanRecord(category_, name_, begin_ns_, MonotonicNs(), facts_));
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
