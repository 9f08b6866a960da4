#include "python.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "callers.h"
#include "log.h"

namespace flagos::python {
namespace {

std::atomic<const Functions*> g_functions{nullptr};
// How far the interpreter has got with its end.
enum class Phase {
  kOpen,
  kClosing,  // its exit handlers have run; other threads begin nothing, and what they began is waited for
  kClosed,   // nothing is begun; the thread that ends it may still compute, and have others of ours do so
  kGone,     // it was finalized: nobody enters it
};
std::atomic<Phase> g_phase{Phase::kOpen};
std::atomic<pthread_t> g_ender{};  // the thread that ends it, from kClosing to kClosed
std::atomic<bool> g_keeps_discarded{false};
// The exit hook is registered and sys.path is complete.
std::atomic<bool> g_prepared{false};
// Threads that are inside, or about to enter.
std::atomic<int> g_users{0};
std::atomic<void (*)()> g_drain{nullptr};

thread_local bool t_keep = false;
thread_local PyThreadState* t_kept = nullptr;
thread_local int t_uses = 0;  // of g_users, those of this thread

// How long a thread waits for the end while the process does nothing: another may wait for it.
constexpr std::chrono::seconds kPatience{10};

std::mutex& SetupMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

// References that wait for a thread with the GIL.
struct Trash {
  std::mutex mutex;
  std::condition_variable wanted;
  std::vector<PyObject*> objects;
  size_t bytes = 0;
  bool thread_started = false;
};
Trash& TheTrash() {
  static auto* const trash = new Trash;
  return *trash;
}
std::atomic<bool> g_trash_waits{false};

// More waiting than this wakes the thread that takes the GIL just to drop it.
constexpr size_t kTrashBytes = size_t{1} << 20;
constexpr size_t kTrashObjects = 1024;

template <class F>
bool Resolve(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  return function != nullptr;
}

// Fills `functions` from `library`; the name of the first function that is missing, or NULL.
const char* ResolveAll(void* library, Functions& functions) {
#define FLAGOS_PYTHON_RESOLVE(name, result, parameters) \
  if (!Resolve(library, #name, functions.name)) return #name;
  FLAGOS_PYTHON_FUNCTIONS(FLAGOS_PYTHON_RESOLVE)
#undef FLAGOS_PYTHON_RESOLVE
  if (!Resolve(library, "PyThreadState_GetUnchecked", functions.current_thread_state) &&
      !Resolve(library, "_PyThreadState_UncheckedGet", functions.current_thread_state)) {
    return "PyThreadState_GetUnchecked";
  }
  functions.none = static_cast<PyObject*>(dlsym(library, "_Py_NoneStruct"));
  if (functions.none == nullptr) return "_Py_NoneStruct";
  auto* error = static_cast<PyObject**>(dlsym(library, "PyExc_RuntimeError"));
  if (error == nullptr) return "PyExc_RuntimeError";
  // Still NULL before initialization; read again in Publish.
  functions.runtime_error = *error;
  return nullptr;
}

bool IsClosing() noexcept { return g_phase.load(std::memory_order_seq_cst) != Phase::kOpen; }

// Whether this thread can have the GIL. From a certain moment on CPython gives it to none but the one that ends it, which
// does not come to that moment while it waits for another.
bool MayEnter() noexcept { return !IsClosing() || EndsInterpreter() || Known()->Py_IsInitialized() != 0; }

void BeginUse() noexcept {
  ++t_uses;
  g_users.fetch_add(1, std::memory_order_seq_cst);
}

void EndUse() noexcept {
  g_users.fetch_sub(1, std::memory_order_seq_cst);
  --t_uses;
}

[[noreturn]] void Stay() noexcept {
  for (;;) pause();
}

// CPython ends a thread that asks for the GIL while the interpreter is finalized: it unwinds it, through frames that
// hold locks or may not throw, which takes the process down. The thread stays here instead until the process ends.
struct StaysWhereUnwound {
  bool unwound = true;
  ~StaysWhereUnwound() {
    if (unwound) Stay();
  }
};

// Not inlined: in a frame that may not throw, the compiler may leave out what an unwinding would run.
__attribute__((noinline)) void Enter(PyThreadState* state) {
  StaysWhereUnwound guard;
  Known()->PyEval_RestoreThread(state);
  guard.unwound = false;
}

__attribute__((noinline)) int EnterNew() {
  StaysWhereUnwound guard;
  const int ensured = Known()->PyGILState_Ensure();
  guard.unwound = false;
  return ensured;
}

bool IsCalledByPython() {
  const Functions& py = *Known();
  if (HoldsGil()) return py.PyEval_GetFrame() != nullptr;
  if (py.PyGILState_GetThisThreadState() == nullptr) return false;
  const int ensured = EnterNew();
  const bool is_called = py.PyEval_GetFrame() != nullptr;
  py.PyGILState_Release(ensured);
  return is_called;
}

// With the GIL: whatever of ours runs in the interpreter comes to its end, and no other thread begins anything again. The
// GIL is not given up between the last look at the other threads and the interpreter's finalization.
void Close() {
  const Functions& py = *Known();
  auto* const drain = g_drain.load(std::memory_order_acquire);
  {
    ReleaseGil released;
    if (drain != nullptr) drain();
    g_ender.store(pthread_self(), std::memory_order_seq_cst);
    g_phase.store(Phase::kClosing, std::memory_order_seq_cst);
    if (drain != nullptr) drain();  // what came meanwhile
  }
  Quiescence quiescence;
  for (;;) {
    PyThreadState* state = py.PyEval_SaveThread();
    do {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    } while (g_users.load(std::memory_order_seq_cst) > t_uses);
    py.PyEval_RestoreThread(state);
    Sweep();
    if (g_users.load(std::memory_order_seq_cst) <= t_uses && quiescence.is_over()) break;
  }
  g_phase.store(Phase::kClosed, std::memory_order_seq_cst);
}

void MarkGone() { g_phase.store(Phase::kGone, std::memory_order_seq_cst); }

// For this thread, from kClosing on, but no longer than the process is at work.
void WaitForClosed() noexcept {
  Idleness idleness;
  while (g_phase.load() == Phase::kClosing && !idleness.lasts(kPatience)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// A forked child has none of the other threads.
void ForgetThreads() {
  g_users.store(t_uses, std::memory_order_seq_cst);
  ForgetOtherCallers();
  ReleaseCallers();
}

// With the GIL. atexit lets go of its handlers when the last of them has run, and so of the one whose capsule this is.
// That is the last moment at which other threads can run Python code: next the interpreter is finalized. Being called
// as a handler would be too early: handlers run in the reverse order of their registration, and may compute.
void OnHandlersDropped(PyObject*) {
  if (IsClosing()) return;
  const Functions& py = *Known();
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  py.PyErr_Fetch(&type, &value, &traceback);
  Close();
  py.PyErr_Restore(type, value, traceback);
}

PyObject* DoNothing(PyObject*, PyObject*) {
  Known()->Py_IncRef(Known()->none);
  return Known()->none;
}

// With the GIL: a function of Python that is kept by who holds it, and `keeps`.
Object MakeFunction(PyMethodDef& method, PyObject* keeps) {
  return Check(Known()->PyCFunction_NewEx(&method, keeps, nullptr), "PyCFunction_NewEx");
}

void Register(const char* module, const char* name, PyObject* function) {
  Object imported = Import(module);
  Object register_function = Attribute(imported.get(), name);
  Call(register_function.get(), {function}, name);
}

void RegisterHandler() {
  static PyMethodDef method{"flagos_backend_exit", DoNothing, kMethodVarArgs, "Its going away says something."};
  static int address = 0;  // a capsule holds one
  Object capsule = Check(Known()->PyCapsule_New(&address, nullptr, OnHandlersDropped), "PyCapsule_New");
  Register("atexit", "register", MakeFunction(method, capsule.get()).get());
}

PyObject* OnThreadsJoined(PyObject* self, PyObject* arguments) {
  try {
    RegisterHandler();
  } catch (...) {
    Log(FLAGOS_LOG_WARNING, "%s", StatusOfException("registering the exit handler").data()->message.c_str());
  }
  return DoNothing(self, arguments);
}

// With the GIL. Only an interpreter that ends waits for its threads; a living one may be asked to run what is registered
// with atexit, which it then forgets.
void RegisterExitHook() {
  static PyMethodDef method{"flagos_backend_threads_exit", OnThreadsJoined, kMethodVarArgs, "Registers with atexit."};
  try {
    Register("threading", "_register_atexit", MakeFunction(method, nullptr).get());
  } catch (const Failure&) {  // it ends already
    RegisterHandler();
  }
}

// With the setup mutex, without the GIL: the mutex is only ever taken by threads that do not hold it.
const Functions& Publish(void* library, const Functions& found) {
  auto* functions = new Functions(found);
  functions->runtime_error = *static_cast<PyObject**>(dlsym(library, "PyExc_RuntimeError"));
  g_functions.store(functions, std::memory_order_release);
  return *functions;
}

bool FindInProcess(Functions& found) {
  if (dlsym(RTLD_DEFAULT, "Py_IsInitialized") == nullptr) return false;
  if (const char* missing = ResolveAll(RTLD_DEFAULT, found)) {
    Log(FLAGOS_LOG_WARNING, "the CPython in this process has no %s; CPython 3.11 or newer is needed", missing);
    return false;
  }
  return true;
}

// The directory that holds the package flagos_backend: this library lies in <site>/flagos_backend/lib/.
std::string OwnSite() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&OwnSite), &info) == 0 || info.dli_fname == nullptr) return "";
  char* real = realpath(info.dli_fname, nullptr);
  if (real == nullptr) return "";
  std::string path(real);
  std::free(real);
  for (int level = 0; level < 3; ++level) {
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return "";
    path.resize(slash);
  }
  return path;
}

// With the GIL: makes flagos_backend and what it needs importable in an interpreter that we started.
void PreparePath(const Settings& settings) {
  const Functions& py = *Known();
  PyObject* path = py.PySys_GetObject("path");
  const std::string own = OwnSite();
  if (path != nullptr && !own.empty()) {
    Object entry = Text(own);
    if (py.PySequence_Contains(path, entry.get()) == 0) py.PyList_Insert(path, 0, entry.get());
    if (py.PyErr_Occurred()) throw Failure(TakeException("adding the backend to sys.path"));
  }
  Object site = Import("site");
  Object add = Attribute(site.get(), "addsitedir");
  size_t begin = 0;
  while (begin < settings.site.size()) {
    const size_t end = std::min(settings.site.find(':', begin), settings.site.size());
    Object directory = Text(settings.site.substr(begin, end - begin));
    Call(add.get(), {directory.get()}, "site.addsitedir");
    begin = end + 1;
  }
}

void* OpenLibrary(const Settings& settings) {
  std::vector<std::string> names;
  const char* variable = std::getenv("FLAGOS_LIBPYTHON");
  if (!settings.libpython.empty()) {
    names.push_back(settings.libpython);
  } else if (variable != nullptr && *variable != '\0') {
    names.push_back(variable);
  } else {
    for (int minor = 15; minor >= 11; --minor) names.push_back(Format("libpython3.%d.so.1.0", minor));
  }
  std::string reasons;
  for (const std::string& name : names) {
    // Global, because extension modules do not name the library that they take the interpreter from.
    if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL)) return library;
    const char* reason = dlerror();
    reasons += Format("; %s", reason ? reason : name.c_str());
  }
  Fail(FLAGOS_NOT_FOUND,
       "there is no CPython in this process and none could be loaded%s; set the context option 'libpython' or "
       "FLAGOS_LIBPYTHON to a libpython3.x.so of version 3.11 or newer",
       reasons.c_str());
}

// With the setup mutex: loads CPython and initializes it if nobody did. True: we did.
bool Load(const Settings& settings) {
  Functions found{};
  void* library = OpenLibrary(settings);
  if (const char* missing = ResolveAll(library, found)) {
    Fail(FLAGOS_FAILED_PRECONDITION, "the loaded libpython has no %s; CPython 3.11 or newer is needed", missing);
  }
  const bool started = found.Py_IsInitialized() == 0;
  if (started) found.Py_InitializeEx(0);  // 0: signal handlers stay the host's
  const Functions& functions = Publish(library, found);
  // The thread that initializes owns the GIL and would keep it for ever.
  if (started) functions.PyEval_SaveThread();
  return started;
}

// Without the setup mutex: nobody waits for a mutex whose holder waits for the GIL.
void Prepare(const Settings& settings, bool started) {
  Gil gil;
  if (!gil) return;
  RegisterExitHook();
  Known()->Py_AtExit(MarkGone);
  pthread_atfork(HoldCallers, ReleaseCallers, ForgetThreads);
  if (!started) return;
  Log(FLAGOS_LOG_INFO, "started CPython %s", Known()->Py_GetVersion());
  PreparePath(settings);
}

void SweepLoop() {
  KeepThreadState();
  Trash& trash = TheTrash();
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(trash.mutex);
      trash.wanted.wait(lock, [&trash] { return trash.bytes > kTrashBytes || trash.objects.size() > kTrashObjects; });
    }
    Gil gil;
    if (!gil) return;
    Sweep();
  }
}

}  // namespace

const Functions* Known() noexcept { return g_functions.load(std::memory_order_acquire); }

const Functions& Require(const Settings& settings) {
  RequireOpen();
  Notice();
  bool load = false, started = false;
  if (Known() == nullptr) {
    std::lock_guard<std::mutex> lock(SetupMutex());
    load = Known() == nullptr;
    if (load) started = Load(settings);
  }
  if (load) {
    struct Done {
      ~Done() { g_prepared.store(true, std::memory_order_release); }
    } done;
    Prepare(settings, started);
  }
  if (!g_prepared.load(std::memory_order_acquire)) {
    ReleaseGil released;
    while (!g_prepared.load(std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return *Known();
}

void Notice() noexcept {
  if (Known() != nullptr) return;
  try {
    {
      std::lock_guard<std::mutex> lock(SetupMutex());
      Functions found{};
      if (Known() != nullptr || !FindInProcess(found) || found.Py_IsInitialized() == 0) return;
      Publish(RTLD_DEFAULT, found);
    }
    struct Done {
      ~Done() { g_prepared.store(true, std::memory_order_release); }
    } done;
    Prepare(Settings{}, false);
  } catch (...) {
    Log(FLAGOS_LOG_WARNING, "%s", StatusOfException("finding CPython").data()->message.c_str());
  }
}

bool HoldsGil() noexcept {
  const Functions* py = Known();
  if (py == nullptr) return false;
  PyThreadState* mine = py->PyGILState_GetThisThreadState();
  return mine != nullptr && mine == py->current_thread_state();
}

Gil::Gil() noexcept {
  const Functions* py = Known();
  if (py == nullptr) return;
  if (HoldsGil()) {
    mode_ = Mode::kHeldBefore;
    return;
  }
  BeginUse();
  if (!MayEnter()) {
    EndUse();
    return;
  }
  if (t_kept != nullptr) {
    Enter(t_kept);
    mode_ = Mode::kKept;
  } else {
    ensured_ = EnterNew();
    mode_ = t_keep ? Mode::kKept : Mode::kEnsured;
  }
  if (g_trash_waits.load(std::memory_order_relaxed)) Sweep();
}

Gil::~Gil() {
  if (mode_ == Mode::kRefused || mode_ == Mode::kHeldBefore) return;
  if (mode_ == Mode::kKept) {
    t_kept = Known()->PyEval_SaveThread();
  } else {
    Known()->PyGILState_Release(ensured_);
  }
  EndUse();
}

ReleaseGil::ReleaseGil() noexcept {
  if (HoldsGil()) state_ = Known()->PyEval_SaveThread();
}

ReleaseGil::~ReleaseGil() {
  if (state_ != nullptr) Enter(state_);
}

void KeepThreadState() noexcept { t_keep = true; }

void DropThreadState() noexcept {
  t_keep = false;
  if (t_kept == nullptr) return;
  BeginUse();
  if (MayEnter()) {
    Enter(t_kept);
    Known()->PyGILState_Release(1 /* PyGILState_UNLOCKED: the thread was new to Python */);
  }
  t_kept = nullptr;
  EndUse();
}

bool EndsInterpreter() noexcept {
  const Phase phase = g_phase.load(std::memory_order_seq_cst);
  return phase != Phase::kOpen && phase != Phase::kGone && pthread_equal(g_ender.load(), pthread_self()) != 0;
}

void FailTooLate() {
  Fail(FLAGOS_UNAVAILABLE,
       "Python has ended: its exit handlers have all run, and no other thread runs Python code any more. Compute and "
       "wait for results before: in the program, or in a handler of atexit, threading or weakref.finalize, of whatever "
       "order");
}

void RequireOpen() {
  if (!IsClosing() || EndsInterpreter()) return;
  if (!MayEnter()) FailTooLate();
  // A thread that is inside is waited for. So is one that was not called by Python code: by the one that ends it.
  if (t_uses > 0 || !IsCalledByPython()) return;
  // CPython would end this one at its next step. It gets no error, which it might print. Where a thread inside waits for
  // it, it does.
  ReleaseGil released;
  {
    Staying staying;
    WaitForClosed();
  }
  if (g_phase.load() == Phase::kClosing) FailTooLate();
  Stay();
}

void StayAtEnd() noexcept {
  if (!IsClosing() || g_phase.load(std::memory_order_seq_cst) == Phase::kClosing || EndsInterpreter()) return;
  if (t_keep || Known()->PyGILState_GetThisThreadState() == nullptr) return;
  ReleaseGil released;
  Stay();
}

bool IsOurs() noexcept { return t_keep; }

void SetDrain(void (*drain)()) noexcept { g_drain.store(drain, std::memory_order_release); }

void KeepDiscarded() noexcept { g_keeps_discarded.store(true, std::memory_order_relaxed); }

void Discard(PyObject* object, size_t bytes) noexcept {
  if (object == nullptr || g_keeps_discarded.load(std::memory_order_relaxed)) return;
  if (HoldsGil()) {
    Known()->Py_DecRef(object);
    return;
  }
  if (!MayEnter()) return;  // the process ends; its memory goes with it
  Trash& trash = TheTrash();
  try {
    std::lock_guard<std::mutex> lock(trash.mutex);
    trash.objects.push_back(object);
    trash.bytes += bytes;
    g_trash_waits.store(true, std::memory_order_relaxed);
    if (trash.bytes <= kTrashBytes && trash.objects.size() <= kTrashObjects) return;
    if (!trash.thread_started) {
      std::thread(SweepLoop).detach();
      trash.thread_started = true;
    }
    trash.wanted.notify_one();
  } catch (...) {
    Log(FLAGOS_LOG_WARNING, "no memory to note a Python object for release; it leaks");
  }
}

void Sweep() noexcept {
  Trash& trash = TheTrash();
  std::vector<PyObject*> objects;
  {
    std::lock_guard<std::mutex> lock(trash.mutex);
    objects.swap(trash.objects);
    trash.bytes = 0;
    g_trash_waits.store(false, std::memory_order_relaxed);
  }
  if (g_keeps_discarded.load(std::memory_order_relaxed)) return;
  for (PyObject* object : objects) Known()->Py_DecRef(object);
}

}  // namespace flagos::python
