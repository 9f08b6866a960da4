// The CPython of the process, through its stable ABI and without linking it: whichever version is there is used.
// Rule of the house: no lock of ours is held while the GIL is taken, and the GIL is never held while waiting for work.
#ifndef FLAGOS_NATIVE_PYTHON_H_
#define FLAGOS_NATIVE_PYTHON_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "error.h"

// Named as in CPython, opaque here.
struct PyObject;
struct PyThreadState;

namespace flagos::python {

using PyCFunction = PyObject* (*)(PyObject* self, PyObject* arguments);

// Layout frozen by the stable ABI.
struct PyMethodDef {
  const char* name;
  PyCFunction function;
  int flags;
  const char* doc;
};
inline constexpr int kMethodVarArgs = 1;

// Every function of the stable ABI that is used: name, result, parameters. Resolved with dlsym when first needed.
#define FLAGOS_PYTHON_FUNCTIONS(X)                                                    \
  X(Py_IsInitialized, int, ())                                                        \
  X(Py_InitializeEx, void, (int))                                                     \
  X(Py_GetVersion, const char*, ())                                                   \
  X(Py_IncRef, void, (PyObject*))                                                     \
  X(Py_DecRef, void, (PyObject*))                                                     \
  X(PyGILState_Ensure, int, ())                                                       \
  X(PyGILState_Release, void, (int))                                                  \
  X(PyGILState_GetThisThreadState, PyThreadState*, ())                                \
  X(PyEval_SaveThread, PyThreadState*, ())                                            \
  X(PyEval_RestoreThread, void, (PyThreadState*))                                     \
  X(PyImport_ImportModule, PyObject*, (const char*))                                  \
  X(PySys_GetObject, PyObject*, (const char*))                                        \
  X(PyObject_GetAttrString, PyObject*, (PyObject*, const char*))                      \
  X(PyObject_Vectorcall, PyObject*, (PyObject*, PyObject* const*, size_t, PyObject*)) \
  X(PyObject_IsTrue, int, (PyObject*))                                                \
  X(PyObject_Str, PyObject*, (PyObject*))                                             \
  X(PyCFunction_NewEx, PyObject*, (PyMethodDef*, PyObject*, PyObject*))               \
  X(PyCapsule_New, PyObject*, (void*, const char*, void (*)(PyObject*)))              \
  X(PyCapsule_GetPointer, void*, (PyObject*, const char*))                            \
  X(PyCapsule_IsValid, int, (PyObject*, const char*))                                 \
  X(PyCapsule_SetName, int, (PyObject*, const char*))                                 \
  X(PyDict_GetItemString, PyObject*, (PyObject*, const char*))                        \
  X(PyDict_Next, int, (PyObject*, ptrdiff_t*, PyObject**, PyObject**))                \
  X(PyTuple_New, PyObject*, (ptrdiff_t))                                              \
  X(PyTuple_Size, ptrdiff_t, (PyObject*))                                             \
  X(PyTuple_GetItem, PyObject*, (PyObject*, ptrdiff_t))                               \
  X(PyTuple_SetItem, int, (PyObject*, ptrdiff_t, PyObject*))                          \
  X(PyList_New, PyObject*, (ptrdiff_t))                                               \
  X(PyList_Size, ptrdiff_t, (PyObject*))                                              \
  X(PyList_GetItem, PyObject*, (PyObject*, ptrdiff_t))                                \
  X(PyList_SetItem, int, (PyObject*, ptrdiff_t, PyObject*))                           \
  X(PyList_Insert, int, (PyObject*, ptrdiff_t, PyObject*))                            \
  X(PySequence_Contains, int, (PyObject*, PyObject*))                                 \
  X(PyLong_FromLongLong, PyObject*, (long long))                                      \
  X(PyLong_AsLongLong, long long, (PyObject*))                                        \
  X(PyFloat_AsDouble, double, (PyObject*))                                            \
  X(PyUnicode_FromStringAndSize, PyObject*, (const char*, ptrdiff_t))                 \
  X(PyUnicode_AsUTF8AndSize, const char*, (PyObject*, ptrdiff_t*))                    \
  X(PyBytes_FromStringAndSize, PyObject*, (const char*, ptrdiff_t))                   \
  X(PyBytes_AsStringAndSize, int, (PyObject*, char**, ptrdiff_t*))                    \
  X(PyErr_Occurred, PyObject*, ())                                                    \
  X(PyErr_Fetch, void, (PyObject**, PyObject**, PyObject**))                          \
  X(PyErr_NormalizeException, void, (PyObject**, PyObject**, PyObject**))             \
  X(PyErr_Restore, void, (PyObject*, PyObject*, PyObject*))                           \
  X(PyErr_SetString, void, (PyObject*, const char*))                                  \
  X(PyErr_Clear, void, ())                                                            \
  X(Py_AtExit, int, (void (*)()))                                                     \
  X(PyEval_GetFrame, PyObject*, ())

struct Functions {
#define FLAGOS_PYTHON_MEMBER(name, result, parameters) result(*name) parameters;
  FLAGOS_PYTHON_FUNCTIONS(FLAGOS_PYTHON_MEMBER)
#undef FLAGOS_PYTHON_MEMBER
  // Not in the stable ABI, but exported by every version under one of two names.
  PyThreadState* (*current_thread_state)();
  PyObject* none;           // borrowed
  PyObject* runtime_error;  // borrowed
};

// Where to look for an interpreter when the process has none.
struct Settings {
  std::string libpython;  // path or name; empty: FLAGOS_LIBPYTHON, then the usual names
  std::string site;       // colon-separated directories to add as site directories
};

// The interpreter, started if there is none. Throws Failure when there is none to be had.
const Functions& Require(const Settings& settings);
// The interpreter if it was found before, else NULL. Never looks for one.
const Functions* Known() noexcept;
// Finds an interpreter that the process has already and registers the shutdown hook. Never starts one.
void Notice() noexcept;

// Holds the GIL; false once only the thread that ends the interpreter can have it, in all others, and then nothing of
// Python may be touched.
class Gil {
 public:
  Gil() noexcept;
  ~Gil();
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  explicit operator bool() const noexcept { return mode_ != Mode::kRefused; }

 private:
  enum class Mode { kRefused, kHeldBefore, kEnsured, kKept };
  Mode mode_ = Mode::kRefused;
  int ensured_ = 0;
};

// Gives up the GIL if this thread holds it, for the length of a wait.
class ReleaseGil {
 public:
  ReleaseGil() noexcept;
  ~ReleaseGil();
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

bool HoldsGil() noexcept;

// A thread of ours that enters Python often keeps its thread state between two entries.
void KeepThreadState() noexcept;
void DropThreadState() noexcept;

// Before work that the host asks for. Returns as long as Python code can run: until the last exit handler has run, and
// for the thread that ends the interpreter until it is gone. Then throws Failure(UNAVAILABLE), or where Python code of
// another thread asks, does not return: CPython lets none of it go on.
void RequireOpen();
// Before a call of the host returns: does not where Python code of another thread than the one that ends the interpreter
// made it, and the interpreter is being finalized.
void StayAtEnd() noexcept;
// Whether this thread ends the interpreter, and so may be the only one that can run Python code.
bool EndsInterpreter() noexcept;
// Why Gil is false, as a Failure(UNAVAILABLE).
[[noreturn]] void FailTooLate();

// Whether this thread is one of the backend, which keeps its thread state.
bool IsOurs() noexcept;

// Called once, after the last exit handler: wait for what runs in the interpreter. Set by the context.
void SetDrain(void (*drain)()) noexcept;

// An owned reference. Only made, copied and destroyed with the GIL.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* owned) noexcept : object_(owned) {}
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() {
    if (object_) Known()->Py_DecRef(object_);
  }
  static Object Share(PyObject* borrowed) noexcept {
    Known()->Py_IncRef(borrowed);
    return Object(borrowed);
  }

  PyObject* get() const noexcept { return object_; }
  PyObject* Detach() noexcept { return std::exchange(object_, nullptr); }
  explicit operator bool() const noexcept { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// From now on what is discarded is never freed. For when a device broke: freeing its memory, torch throws out of a
// destructor, which ends the process.
void KeepDiscarded() noexcept;

// Drops a reference from a thread that may not hold the GIL: now if it does, else when some thread next does. `bytes`
// is the memory that hangs on it, so that much memory does not wait long.
void Discard(PyObject* object, size_t bytes) noexcept;
// With the GIL: drops what was discarded.
void Sweep() noexcept;

// With the GIL: the exception in flight, cleared, as a Status. Uses the bridge's description when it is there.
Status TakeException(const char* place);
// How exceptions become (code, message, ((payload name, bytes), ...)); a callable of the bridge, kept for ever.
void SetDescribe(Object describe) noexcept;

// With the GIL: throws Failure when `object` is NULL.
Object Check(PyObject* object, const char* place);
Object Import(const char* module);
Object Attribute(PyObject* object, const char* name);
Object Text(const std::string& text);
Object Bytes(const void* data, size_t size);
Object Integer(int64_t value);
Object Call(PyObject* callable, std::initializer_list<PyObject*> arguments, const char* place);

// Walks a tuple of plain values in order; throws Failure(INTERNAL) when it does not hold what is asked for.
class Reader {
 public:
  explicit Reader(PyObject* tuple);
  bool done() const noexcept { return next_ == size_; }
  ptrdiff_t size() const noexcept { return size_; }
  PyObject* Next();  // borrowed
  int64_t Integer();
  double Double();
  std::string Text();
  std::string Bytes();
  bool NextIsNone();
  Reader Tuple() { return Reader(Next()); }

 private:
  PyObject* tuple_;
  ptrdiff_t size_;
  ptrdiff_t next_ = 0;
};

}  // namespace flagos::python

#endif  // FLAGOS_NATIVE_PYTHON_H_
