#include "python.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "log.h"

namespace flagos::python {
namespace {

std::atomic<const Functions*> g_functions{nullptr};
// Set first by the exit hook: what comes in from now on is refused, or waiting for the rest might never end.
std::atomic<bool> g_ending{false};
// Set last by the exit hook; from then on no thread enters the interpreter.
std::atomic<bool> g_closing{false};
std::atomic<bool> g_keeps_discarded{false};
// The exit hook is registered and sys.path is complete.
std::atomic<bool> g_prepared{false};
// Threads that are inside, or about to enter.
std::atomic<int> g_users{0};
std::atomic<void (*)()> g_drain{nullptr};
PyObject* g_describe = nullptr;  // guarded by the GIL

thread_local bool t_keep = false;
thread_local PyThreadState* t_kept = nullptr;

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

// atexit runs it at the start of finalization, while the interpreter still works: whatever of ours runs in it comes to
// its end, and nothing enters it again. Without this a worker could be killed inside Python, or take the process down.
PyObject* OnExit(PyObject*, PyObject*) {
  const Functions& py = *Known();
  PyThreadState* state = py.PyEval_SaveThread();
  g_ending.store(true, std::memory_order_seq_cst);
  if (auto* drain = g_drain.load(std::memory_order_acquire)) drain();
  g_closing.store(true, std::memory_order_seq_cst);
  while (g_users.load(std::memory_order_seq_cst) != 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  py.PyEval_RestoreThread(state);
  Sweep();
  py.Py_IncRef(py.none);
  return py.none;
}

// With the GIL.
void RegisterExitHook() {
  static PyMethodDef method{"flagos_backend_exit", OnExit, kMethodVarArgs, "Lets the backend leave the interpreter."};
  Object hook = Check(Known()->PyCFunction_NewEx(&method, nullptr, nullptr), "PyCFunction_NewEx");
  Object atexit = Import("atexit");
  Object register_hook = Attribute(atexit.get(), "register");
  Call(register_hook.get(), {hook.get()}, "atexit.register");
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
  g_users.fetch_add(1, std::memory_order_seq_cst);
  if (g_closing.load(std::memory_order_seq_cst)) {
    g_users.fetch_sub(1, std::memory_order_seq_cst);
    return;
  }
  if (t_kept != nullptr) {
    py->PyEval_RestoreThread(t_kept);
    mode_ = Mode::kKept;
  } else {
    ensured_ = py->PyGILState_Ensure();
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
  g_users.fetch_sub(1, std::memory_order_seq_cst);
}

ReleaseGil::ReleaseGil() noexcept {
  if (HoldsGil()) state_ = Known()->PyEval_SaveThread();
}

ReleaseGil::~ReleaseGil() {
  if (state_ != nullptr) Known()->PyEval_RestoreThread(state_);
}

void KeepThreadState() noexcept { t_keep = true; }

void DropThreadState() noexcept {
  t_keep = false;
  if (t_kept == nullptr) return;
  g_users.fetch_add(1, std::memory_order_seq_cst);
  if (!g_closing.load(std::memory_order_seq_cst)) {
    Known()->PyEval_RestoreThread(t_kept);
    Known()->PyGILState_Release(1 /* PyGILState_UNLOCKED: the thread was new to Python */);
  }
  t_kept = nullptr;
  g_users.fetch_sub(1, std::memory_order_seq_cst);
}

void RequireOpen() {
  if (g_ending.load(std::memory_order_relaxed)) {
    Fail(FLAGOS_UNAVAILABLE, "the Python interpreter is shutting down; nothing can be compiled or run any more");
  }
}

void SetDrain(void (*drain)()) noexcept { g_drain.store(drain, std::memory_order_release); }

void KeepDiscarded() noexcept { g_keeps_discarded.store(true, std::memory_order_relaxed); }

void Discard(PyObject* object, size_t bytes) noexcept {
  if (object == nullptr || g_keeps_discarded.load(std::memory_order_relaxed)) return;
  if (HoldsGil()) {
    Known()->Py_DecRef(object);
    return;
  }
  if (g_closing.load(std::memory_order_relaxed)) return;  // the process ends; its memory goes with it
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

void SetDescribe(Object describe) noexcept {
  if (g_describe == nullptr) g_describe = describe.Detach();
}

Status TakeException(const char* place) {
  const Functions& py = *Known();
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  py.PyErr_Fetch(&type, &value, &traceback);
  py.PyErr_NormalizeException(&type, &value, &traceback);
  Object owned_type(type), owned_value(value), owned_traceback(traceback);
  if (value == nullptr) return Status(FLAGOS_INTERNAL, Format("%s: failed without saying why", place));
  if (g_describe != nullptr) {
    PyObject* arguments[] = {value};
    Object described(py.PyObject_Vectorcall(g_describe, arguments, 1, nullptr));
    if (described) {
      Reader reader(described.get());
      const auto code = static_cast<int32_t>(reader.Integer());
      std::string message = reader.Text();
      std::vector<Payload> payloads;
      Reader list = reader.Tuple();
      while (!list.done()) {
        Reader pair = list.Tuple();
        std::string name = pair.Text();
        payloads.push_back({std::move(name), pair.Bytes()});
      }
      return Status(code, std::move(message), std::move(payloads));
    }
    py.PyErr_Clear();
  }
  Object text(py.PyObject_Str(value));
  const char* utf8 = text ? py.PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
  Status status(FLAGOS_INTERNAL, Format("%s: %s", place, utf8 ? utf8 : "an exception that cannot be printed"));
  py.PyErr_Clear();
  return status;
}

Object Check(PyObject* object, const char* place) {
  if (object == nullptr) throw Failure(TakeException(place));
  return Object(object);
}

Object Import(const char* module) { return Check(Known()->PyImport_ImportModule(module), module); }

Object Attribute(PyObject* object, const char* name) {
  return Check(Known()->PyObject_GetAttrString(object, name), name);
}

Object Text(const std::string& text) {
  return Check(Known()->PyUnicode_FromStringAndSize(text.data(), static_cast<ptrdiff_t>(text.size())), "text");
}

Object Bytes(const void* data, size_t size) {
  return Check(Known()->PyBytes_FromStringAndSize(static_cast<const char*>(data), static_cast<ptrdiff_t>(size)),
               "bytes");
}

Object Integer(int64_t value) { return Check(Known()->PyLong_FromLongLong(value), "integer"); }

Object Call(PyObject* callable, std::initializer_list<PyObject*> arguments, const char* place) {
  return Check(Known()->PyObject_Vectorcall(callable, arguments.begin(), arguments.size(), nullptr), place);
}

Reader::Reader(PyObject* tuple) : tuple_(tuple), size_(Known()->PyTuple_Size(tuple)) {
  if (size_ < 0) throw Failure(TakeException("reading a tuple from the bridge"));
}

PyObject* Reader::Next() {
  if (next_ == size_) Fail(FLAGOS_INTERNAL, "the bridge returned a tuple of %td, too few", size_);
  return Known()->PyTuple_GetItem(tuple_, next_++);
}

int64_t Reader::Integer() {
  const int64_t value = Known()->PyLong_AsLongLong(Next());
  if (value == -1 && Known()->PyErr_Occurred()) throw Failure(TakeException("reading an integer from the bridge"));
  return value;
}

double Reader::Double() {
  const double value = Known()->PyFloat_AsDouble(Next());
  if (value == -1.0 && Known()->PyErr_Occurred()) throw Failure(TakeException("reading a number from the bridge"));
  return value;
}

std::string Reader::Text() {
  ptrdiff_t size = 0;
  const char* text = Known()->PyUnicode_AsUTF8AndSize(Next(), &size);
  if (text == nullptr) throw Failure(TakeException("reading a text from the bridge"));
  return std::string(text, static_cast<size_t>(size));
}

std::string Reader::Bytes() {
  char* data = nullptr;
  ptrdiff_t size = 0;
  if (Known()->PyBytes_AsStringAndSize(Next(), &data, &size) != 0) {
    throw Failure(TakeException("reading bytes from the bridge"));
  }
  return std::string(data, static_cast<size_t>(size));
}

bool Reader::NextIsNone() {
  if (next_ == size_) return false;
  if (Known()->PyTuple_GetItem(tuple_, next_) != Known()->none) return false;
  ++next_;
  return true;
}

}  // namespace flagos::python
