#include "log.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace flagos {
namespace {

struct Sink {
  FlagosLogCallback callback;
  void* user_data;
};

// Replaced whole, never freed: a thread may be inside the former one. Hosts set it once or twice in a process.
std::atomic<const Sink*> g_sink{nullptr};
std::atomic<int32_t> g_level{-1};

// FLAGOS_DEBUG as a level: 1 warnings, 2 what is decided, 3 each call, 4 each step. Anything else asks for nothing.
int32_t DebugLevel() noexcept {
  const char* text = std::getenv("FLAGOS_DEBUG");
  if (text == nullptr || text[0] < '0' || text[0] > '9' || text[1] != '\0') return -1;
  return std::min(text[0] - '0', int{FLAGOS_LOG_TRACE});
}

}  // namespace

void SetLog(FlagosLogCallback callback, void* user_data, int32_t level) noexcept {
  const int32_t debug = DebugLevel();
  if (callback != nullptr) {
    try {
      g_sink.store(new Sink{callback, user_data}, std::memory_order_release);
    } catch (...) {
      return;
    }
    g_level.store(std::max(level, debug), std::memory_order_relaxed);
  } else {
    // Also how a host takes its callback back, before what it calls goes away.
    g_sink.store(nullptr, std::memory_order_release);
    g_level.store(debug > 0 ? debug : -1, std::memory_order_relaxed);
  }
}

bool LogEnabled(int32_t level) noexcept { return level <= g_level.load(std::memory_order_relaxed); }

void Log(int32_t level, const char* format, ...) noexcept {
  if (!LogEnabled(level)) return;
  char short_line[2048];
  va_list list, again;
  va_start(list, format);
  va_copy(again, list);
  const int size = std::vsnprintf(short_line, sizeof(short_line), format, list);
  va_end(list);
  size_t length = size < 0 ? 0 : static_cast<size_t>(size);
  char* line = short_line;
  std::unique_ptr<char[]> long_line;
  if (length >= sizeof(short_line)) {
    long_line.reset(new (std::nothrow) char[length + 1]);
    if (long_line) {
      line = long_line.get();
      std::vsnprintf(line, length + 1, format, again);
    } else {
      length = sizeof(short_line) - 1;  // what there is memory for
    }
  }
  va_end(again);
  if (size < 0) return;
  std::replace(line, line + length, '\n', ' ');
  if (const Sink* sink = g_sink.load(std::memory_order_acquire)) {
    sink->callback(sink->user_data, level, line, length);
  } else {
    std::fprintf(stderr, "flagos backend: %s\n", line);
  }
}

}  // namespace flagos
