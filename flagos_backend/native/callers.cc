#include "callers.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace flagos::python {
namespace {

struct Caller {
  pthread_t thread;
  int staying = 0;
};

struct Callers {
  std::mutex mutex;
  std::vector<Caller*> all;
};
Callers& TheCallers() {
  static auto* const callers = new Callers;
  return *callers;
}

// The calling thread's own entry of the list.
struct Entry {
  Caller caller{};
  bool listed = false;
  ~Entry() {
    if (!listed) return;
    Callers& callers = TheCallers();
    std::lock_guard<std::mutex> lock(callers.mutex);
    callers.all.erase(std::remove(callers.all.begin(), callers.all.end(), &caller), callers.all.end());
  }
};
thread_local Entry t_entry;

void AddToStaying(int count) noexcept {
  if (!t_entry.listed) return;
  std::lock_guard<std::mutex> lock(TheCallers().mutex);
  t_entry.caller.staying += count;
}

// The kernel's number of a living thread, which is in the identifier of its clock; 0 if it has none.
int NumberOf(pthread_t thread) noexcept {
  clockid_t clock = 0;
  return pthread_getcpuclockid(thread, &clock) == 0 ? ~(clock >> 3) : 0;
}

// The state that the kernel shows of a thread of this process, as 'R' or 'S'; '\0' if it shows none.
char StateOf(int number) noexcept {
  char path[64], text[512];
  std::snprintf(path, sizeof path, "/proc/self/task/%d/stat", number);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return '\0';
  const ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  if (size <= 0) return '\0';
  text[size] = '\0';
  const char* name_end = std::strrchr(text, ')');  // the name may hold anything
  return name_end != nullptr && name_end[1] == ' ' ? name_end[2] : '\0';
}

// Whether a thread other than those, which the kernel numbers, is about to compute.
bool IsBusy(const std::vector<int>& others) noexcept {
  DIR* folder = opendir("/proc/self/task");
  if (folder == nullptr) return false;
  bool busy = false;
  while (const dirent* entry = readdir(folder)) {
    const int number = std::atoi(entry->d_name);
    if (number == 0 || std::find(others.begin(), others.end(), number) != others.end()) continue;
    const char state = StateOf(number);
    busy = busy || state == 'R' || state == 'D';
  }
  closedir(folder);
  return busy;
}

// Whether a module is of a framework that calls the backend from C++ code, and may have such code below Python's frames.
bool IsOfFramework(const char* module) {
  for (const char* package : {"jax", "jaxlib", "flagos_backend"}) {
    const size_t length = std::strlen(package);
    if (std::strncmp(module, package, length) == 0 && (module[length] == '.' || module[length] == '\0')) return true;
  }
  return false;
}

bool RunsModuleOfFramework(PyObject* frame) {
  const Functions& py = *Known();
  const Object globals = Attribute(frame, "f_globals");
  PyObject* name = py.PyDict_GetItemString(globals.get(), "__name__");  // borrowed
  const char* module = name == nullptr ? nullptr : py.PyUnicode_AsUTF8AndSize(name, nullptr);
  if (module == nullptr) py.PyErr_Clear();
  return module != nullptr && IsOfFramework(module);
}

bool IsInFramework(PyObject* innermost) {
  for (Object frame = Object::Share(innermost); frame.get() != Known()->none;
       frame = Attribute(frame.get(), "f_back")) {
    if (RunsModuleOfFramework(frame.get())) return true;
  }
  return false;
}

// With the GIL: of the threads that run Python code, whether their frames are in a framework. Runs no Python code, so that
// nobody gets the GIL.
std::map<pthread_t, bool> ThreadsOfPython() {
  const Functions& py = *Known();
  std::map<pthread_t, bool> threads;
  PyObject* current_frames = py.PySys_GetObject("_current_frames");
  if (current_frames == nullptr) return threads;
  const Object frames = Call(current_frames, {}, "sys._current_frames");
  ptrdiff_t position = 0;
  PyObject *thread = nullptr, *frame = nullptr;
  while (py.PyDict_Next(frames.get(), &position, &thread, &frame) != 0) {
    threads[static_cast<pthread_t>(py.PyLong_AsLongLong(thread))] = IsInFramework(frame);
  }
  py.PyErr_Clear();
  return threads;
}

}  // namespace

void NoteCaller() noexcept {
  if (t_entry.listed) return;
  const Functions* py = Known();
  if (py == nullptr || py->PyGILState_GetThisThreadState() == nullptr || IsOurs()) return;
  t_entry.caller.thread = pthread_self();
  Callers& callers = TheCallers();
  try {
    std::lock_guard<std::mutex> lock(callers.mutex);
    callers.all.push_back(&t_entry.caller);
    t_entry.listed = true;
  } catch (...) {  // no memory: it is not waited for
  }
}

Staying::Staying() noexcept { AddToStaying(1); }

Staying::~Staying() { AddToStaying(-1); }

bool Idleness::lasts(std::chrono::steady_clock::duration window) noexcept {
  std::vector<int> others;
  try {
    std::lock_guard<std::mutex> lock(TheCallers().mutex);
    for (const Caller* caller : TheCallers().all) {
      if (caller->staying > 0) others.push_back(NumberOf(caller->thread));
    }
  } catch (...) {  // no memory: they count
  }
  ++looks_;
  if (IsBusy(others)) ++busy_;
  if (std::chrono::steady_clock::now() - begun_ < window) return false;
  const bool idle = busy_ * 20 < looks_;
  *this = Idleness();
  return idle;
}

void HoldCallers() noexcept { TheCallers().mutex.lock(); }

void ReleaseCallers() noexcept { TheCallers().mutex.unlock(); }

void ForgetOtherCallers() noexcept {
  TheCallers().all.clear();
  if (!t_entry.listed) return;
  TheCallers().all.push_back(&t_entry.caller);
}

bool Quiescence::is_over() noexcept {
  if (std::clock() - begun_ > kLongest) return true;
  try {
    return MayLeaveAll();
  } catch (...) {  // no memory: seen again next time
    Known()->PyErr_Clear();
    return false;
  }
}

bool Quiescence::Sleeps(pthread_t thread, Clock::duration window) {
  const char state = StateOf(NumberOf(thread));
  Sleep& sleep = sleeps_[thread];
  if (sleep.looks == 0 || state == 'R' || state == 'D' || state == '\0') sleep = {Clock::now(), 0};
  ++sleep.looks;
  return sleep.looks > kLooks && Clock::now() - sleep.begun > window;
}

bool Quiescence::MayLeaveAll() {
  std::map<pthread_t, bool> in_framework = ThreadsOfPython();
  std::vector<pthread_t> awaited;  // those that are in a framework, and callers, which may be without Python showing it
  Callers& callers = TheCallers();
  std::lock_guard<std::mutex> lock(callers.mutex);
  for (const Caller* caller : callers.all) {
    if (caller->staying > 0) {
      in_framework.erase(caller->thread);
    } else {
      awaited.push_back(caller->thread);
    }
  }
  for (const auto& [thread, is_in] : in_framework) {
    if (is_in && std::find(awaited.begin(), awaited.end(), thread) == awaited.end()) awaited.push_back(thread);
  }
  bool over = true;
  for (const pthread_t thread : awaited) {
    if (pthread_equal(thread, pthread_self()) != 0) continue;
    const auto found = in_framework.find(thread);
    const bool is_in = found != in_framework.end() && found->second;
    if (!Sleeps(thread, is_in ? kWindowInFramework : kWindow)) over = false;
  }
  return over;
}

}  // namespace flagos::python
