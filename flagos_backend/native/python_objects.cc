// Objects of the process's CPython: made of plain values, read as such, and exceptions as statuses. All with the GIL, which
// python.cc hands out.
#include <string>
#include <utility>
#include <vector>

#include "python.h"

namespace flagos::python {
namespace {

PyObject* g_describe = nullptr;

}  // namespace

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
