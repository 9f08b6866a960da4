// The module flagos_backend.kernels.triton._cuda: launches of Triton's kernels with arguments of any signature. Triton 3.6
// has a C compiler write a module for each; cuda_launcher.py puts this in their place.
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

#include "cuda.h"

namespace flagos::triton {
namespace {

// What a parameter of a kernel is, and how Python's object is read: by PyArg_Parse's format of that letter.
enum class Kind : char {
  kTuple = '(',
  kConstant = '-',  // no parameter
  kPointer = '*',
  kHalf = 'e',
  kBrainFloat = 'f',
  kFloat = 'F',
  kDouble = 'd',
  kInt8 = 'b',
  kInt16 = 'h',
  kInt32 = 'i',
  kInt64 = 'L',
  kUInt8 = 'B',
  kUInt16 = 'H',
  kUInt32 = 'I',
  kUInt64 = 'K'
};

struct Field {
  Kind kind;
  std::vector<Field> fields;  // of a tuple
};

struct Name {
  std::string_view type;
  Kind kind;
};
constexpr Name kNames[] = {
    {"constexpr", Kind::kConstant}, {"i1", Kind::kInt8},    {"i8", Kind::kInt8},    {"i16", Kind::kInt16},
    {"i32", Kind::kInt32},          {"i64", Kind::kInt64},  {"u1", Kind::kUInt8},   {"u8", Kind::kUInt8},
    {"u16", Kind::kUInt16},         {"u32", Kind::kUInt32}, {"u64", Kind::kUInt64}, {"fp16", Kind::kHalf},
    {"bf16", Kind::kBrainFloat},    {"fp32", Kind::kFloat}, {"f32", Kind::kFloat},  {"fp64", Kind::kDouble}};

struct Launcher {
  PyObject_HEAD std::vector<Field> fields;
  size_t num_parameters;
};

PyObject* g_data_ptr;  // the name of the method

// A launch's arguments from here on are the kernel's.
constexpr Py_ssize_t kNumLeading = 13;

// ---- Signatures

// Reads a tuple of Triton's types; false with an exception.
bool ReadSignature(PyObject* types, std::vector<Field>* fields, size_t* num_parameters) {
  const Py_ssize_t size = PyTuple_Size(types);
  if (size < 0) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* type = PyTuple_GetItem(types, i);
    Field field{Kind::kTuple, {}};
    if (PyTuple_Check(type)) {
      if (!ReadSignature(type, &field.fields, num_parameters)) return false;
    } else {
      Py_ssize_t length = 0;
      const char* text = PyUnicode_AsUTF8AndSize(type, &length);
      if (text == nullptr) return false;
      const std::string_view name(text, static_cast<size_t>(length));
      const Name* found = std::begin(kNames);
      while (found != std::end(kNames) && found->type != name) ++found;
      if (!name.empty() && name.front() == '*') {
        field.kind = Kind::kPointer;
      } else if (found != std::end(kNames)) {
        field.kind = found->kind;
      } else {
        PyErr_Format(PyExc_ValueError, "no launch with an argument of type %U", type);
        return false;
      }
      if (field.kind != Kind::kConstant) ++*num_parameters;
    }
    fields->push_back(std::move(field));
  }
  return true;
}

// ---- Values

// The address of `object`: a number, None or what has `data_ptr`. Whether there is one; else an exception.
bool ReadPointer(const Driver& driver, PyObject* object, Py_ssize_t position, DevicePointer* address) {
  *address = 0;
  if (object == Py_None) return true;
  if (PyLong_Check(object)) {
    *address = PyLong_AsUnsignedLongLong(object);
    return PyErr_Occurred() == nullptr;
  }
  PyObject* number = PyObject_CallMethodObjArgs(object, g_data_ptr, nullptr);
  if (number == nullptr || !PyLong_Check(number)) {
    PyErr_SetString(PyExc_TypeError, number == nullptr
                                         ? "Pointer argument must be either uint64 or have data_ptr method"
                                         : "data_ptr method of Pointer object must return 64-bit int");
    Py_XDECREF(number);
    return false;
  }
  const DevicePointer given = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  if (PyErr_Occurred() != nullptr) return false;
  if (given == 0) return true;
  const Result result = driver.PointerGetAttribute(address, kPointerDevicePointer, given);
  if (result != kInvalidValue) return Check(driver, result);
  PyErr_Format(PyExc_ValueError, "Pointer argument (at %zd) cannot be accessed from Triton (cpu tensor?)", position);
  return false;
}

template <class From, class To>
To BitCast(From from) {
  static_assert(sizeof(From) == sizeof(To));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// The half that is next to `value`, to even where two are: false where it is beyond the largest.
bool ToHalf(double value, uint16_t* half) {
  const uint64_t bits = BitCast<double, uint64_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 48) & 0x8000);
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) {
    *half = sign | 0x7E00;
  } else if (std::isinf(value)) {
    *half = sign | 0x7C00;
  } else {
    // Halves are multiples of 2^-24, and of 2^(exponent - 10) where they are normal.
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // 2^(exponent - 1) <= magnitude < 2^exponent, unless it is 0
    const int unit = magnitude == 0 || exponent < -13 ? -24 : exponent - 11;
    const double scaled = std::ldexp(magnitude, -unit);  // exact, below 2^11
    double units = std::floor(scaled);
    const double rest = scaled - units;
    if (rest > 0.5 || (rest == 0.5 && std::fmod(units, 2.0) != 0.0)) units += 1;
    // 2^10 units begin a normal number, so that a carry moves the exponent by itself.
    const auto count = static_cast<int64_t>(units);
    const int64_t encoded = (static_cast<int64_t>(unit) + 24) * 1024 + count;
    if (encoded >= 0x7C00) return false;
    *half = sign | static_cast<uint16_t>(encoded);
  }
  return true;
}

// Converts `object` to C's type as PyArg_Parse does, and puts it into `slot`.
template <class T>
bool ReadNumber(PyObject* object, const char* format, uint64_t* slot) {
  T value{};
  if (!PyArg_Parse(object, format, &value)) return false;
  std::memcpy(slot, &value, sizeof value);
  return true;
}

bool ReadFloat(PyObject* object, Kind kind, uint64_t* slot) {
  double value = 0;
  if (!PyArg_Parse(object, "d", &value)) return false;
  if (kind == Kind::kHalf) {
    uint16_t half = 0;
    if (!ToHalf(value, &half)) {
      PyErr_SetString(PyExc_OverflowError, "float too large to pack with e format");
      return false;
    }
    *slot = half;
  } else if (kind == Kind::kDouble) {
    *slot = BitCast<double, uint64_t>(value);
  } else {
    const auto bits = BitCast<float, uint32_t>(static_cast<float>(value));
    *slot = kind == Kind::kFloat ? bits : bits >> 16;  // Triton cuts what does not fit into 16 bits off
  }
  return true;
}

bool ReadValue(const Driver& driver, PyObject* object, Kind kind, Py_ssize_t position, uint64_t* slot) {
  *slot = 0;
  switch (kind) {
    case Kind::kPointer:
      return ReadPointer(driver, object, position, slot);
    case Kind::kHalf:
    case Kind::kBrainFloat:
    case Kind::kFloat:
    case Kind::kDouble:
      return ReadFloat(object, kind, slot);
    case Kind::kInt8:
      return ReadNumber<unsigned char>(object, "b", slot);
    case Kind::kInt16:
      return ReadNumber<short>(object, "h", slot);
    case Kind::kInt32:
      return ReadNumber<int>(object, "i", slot);
    case Kind::kInt64:
      return ReadNumber<long long>(object, "L", slot);
    case Kind::kUInt8:
      return ReadNumber<unsigned char>(object, "B", slot);
    case Kind::kUInt16:
      return ReadNumber<unsigned short>(object, "H", slot);
    case Kind::kUInt32:
      return ReadNumber<unsigned>(object, "I", slot);
    case Kind::kUInt64:
      return ReadNumber<unsigned long long>(object, "K", slot);
    case Kind::kTuple:
    case Kind::kConstant:
      break;
  }
  return true;
}

// Puts the values of `arguments`, a tuple, from `first` on, into `*slot` and what follows. `position` counts arguments and
// the elements of tuples, as Triton's messages do.
bool ReadValues(const Driver& driver, const std::vector<Field>& fields, PyObject* arguments, Py_ssize_t first,
                Py_ssize_t* position, uint64_t** slot) {
  const auto expected = static_cast<Py_ssize_t>(fields.size());
  const Py_ssize_t given = PyTuple_Check(arguments) ? PyTuple_Size(arguments) - first : -1;
  if (given != expected) {
    PyErr_Format(PyExc_TypeError,
                 given < 0 ? "no tuple where the signature has one of %zd"
                           : "the signature has %zd arguments, or elements of a tuple, and not %zd",
                 expected, given);
    return false;
  }
  for (const Field& field : fields) {
    PyObject* argument = PyTuple_GetItem(arguments, first++);
    if (field.kind == Kind::kTuple) {
      if (!ReadValues(driver, field.fields, argument, 0, position, slot)) return false;
      continue;
    }
    if (field.kind != Kind::kConstant) {
      if (!ReadValue(driver, argument, field.kind, *position, *slot)) return false;
      ++*slot;
    }
    ++*position;
  }
  return true;
}

// ---- Launches

// The arguments of a launch before the kernel's, as Triton's launchers take them.
struct Leading {
  int grid[3];
  unsigned long long stream, function;
  int cooperative, programmatic;
  PyObject *global_scratch, *profile_scratch, *kernel_metadata, *launch_metadata, *enter_hook, *exit_hook;
  int num_warps, num_ctas, shared_bytes;  // the kernel's metadata
};

bool ReadLeading(PyObject* arguments, Leading* leading) {
  PyObject* first = PyTuple_GetSlice(arguments, 0, kNumLeading);
  if (first == nullptr) return false;
  const bool read =
      PyArg_ParseTuple(first, "iiiKKppOOOOOO", &leading->grid[0], &leading->grid[1], &leading->grid[2],
                       &leading->stream, &leading->function, &leading->cooperative, &leading->programmatic,
                       &leading->global_scratch, &leading->profile_scratch, &leading->kernel_metadata,
                       &leading->launch_metadata, &leading->enter_hook, &leading->exit_hook) &&
      PyArg_ParseTuple(leading->kernel_metadata, "iii", &leading->num_warps, &leading->num_ctas,
                       &leading->shared_bytes);
  Py_DECREF(first);  // `arguments` keeps what it held
  return read;
}

bool CallHook(PyObject* hook, PyObject* metadata) {
  if (hook == Py_None) return true;
  PyObject* result = PyObject_CallFunctionObjArgs(hook, metadata, nullptr);
  Py_XDECREF(result);
  return result != nullptr;
}

// Enqueues the kernel, without the GIL.
Result Enqueue(const Driver& driver, const Leading& leading, void** values) {
  std::array<Attribute, 4> attributes{};
  unsigned count = 0;
  if (leading.programmatic != 0) attributes[count++] = {AttributeKind::kProgrammaticSerialization, 0, {1}};
  if (leading.cooperative != 0) attributes[count++] = {AttributeKind::kCooperative, 0, {1}};
  const auto num_ctas = static_cast<unsigned>(leading.num_ctas);
  if (num_ctas != 1) {
    attributes[count++] = {AttributeKind::kClusterDimension, 0, {num_ctas, 1, 1}};
    attributes[count++] = {AttributeKind::kClusterScheduling, 0, {kClusterSchedulingSpread}};
  }
  Configuration configuration{};
  for (int i = 0; i < 3; ++i) configuration.grid[i] = static_cast<unsigned>(leading.grid[i]);
  configuration.grid[0] *= num_ctas;
  configuration.block[0] = 32 * static_cast<unsigned>(leading.num_warps);
  configuration.block[1] = configuration.block[2] = 1;
  configuration.shared_bytes = static_cast<unsigned>(leading.shared_bytes);
  configuration.stream = reinterpret_cast<Stream>(leading.stream);
  configuration.attributes = attributes.data();
  configuration.num_attributes = count;
  auto* function = reinterpret_cast<Function>(leading.function);
  if (num_ctas == 16) {  // more than is portable; H100 and B200 have it
    const Result result = driver.FunctionSetAttribute(function, kFunctionNonPortableClusters, 1);
    if (result != 0) return result;
  }
  return driver.LaunchKernel(&configuration, function, values, nullptr);
}

// Memory of `size` elements: on the stack where they are few.
template <class T>
class Row {
 public:
  explicit Row(size_t size) : more_(size > few_.size() ? new T[size] : nullptr) {}
  T* data() { return more_ ? more_.get() : few_.data(); }

 private:
  std::array<T, 48> few_;
  std::unique_ptr<T[]> more_;
};

bool Launch(const Launcher& self, PyObject* arguments) {
  const Driver* driver = TheDriver();
  Leading leading{};
  if (driver == nullptr || !EnsureContext(*driver) || !ReadLeading(arguments, &leading)) return false;
  if (!CallHook(leading.enter_hook, leading.launch_metadata)) return false;
  const size_t size = self.num_parameters + 2;
  Row<uint64_t> slots(size);
  uint64_t* slot = slots.data();
  Py_ssize_t position = 0;
  if (!ReadValues(*driver, self.fields, arguments, kNumLeading, &position, &slot)) return false;
  if (!ReadPointer(*driver, leading.global_scratch, -1, slot++)) return false;
  if (!ReadPointer(*driver, leading.profile_scratch, -1, slot++)) return false;
  Row<void*> values(size);
  for (size_t i = 0; i < size; ++i) values.data()[i] = &slots.data()[i];
  if (leading.grid[0] > 0 && leading.grid[1] > 0 && leading.grid[2] > 0) {
    Result result = 0;
    Py_BEGIN_ALLOW_THREADS;
    result = Enqueue(*driver, leading, values.data());
    Py_END_ALLOW_THREADS;
    if (!Check(*driver, result)) return false;
  }
  return CallHook(leading.exit_hook, leading.launch_metadata);
}

PyObject* Call(PyObject* object, PyObject* arguments, PyObject* /*names*/) {
  try {
    if (!Launch(*reinterpret_cast<Launcher*>(object), arguments)) return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

PyObject* New(PyTypeObject* type, PyObject* arguments, PyObject* /*names*/) {
  PyObject* types = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!:Launcher", &PyTuple_Type, &types)) return nullptr;
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* object = allocate(type, 0);
  if (object == nullptr) return nullptr;
  auto* self = reinterpret_cast<Launcher*>(object);
  new (&self->fields) std::vector<Field>();
  try {
    if (ReadSignature(types, &self->fields, &self->num_parameters)) return object;
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  Py_DECREF(object);
  return nullptr;
}

void Deallocate(PyObject* object) {
  std::destroy_at(&reinterpret_cast<Launcher*>(object)->fields);
  PyTypeObject* type = Py_TYPE(object);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

PyType_Slot g_slots[] = {{Py_tp_new, reinterpret_cast<void*>(New)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(Deallocate)},
                         {Py_tp_call, reinterpret_cast<void*>(Call)},
                         {0, nullptr}};
PyType_Spec g_type{"flagos_backend.kernels.triton._cuda.Launcher", sizeof(Launcher), 0, Py_TPFLAGS_DEFAULT, g_slots};
PyModuleDef g_module{PyModuleDef_HEAD_INIT,
                     "_cuda",
                     "Launches Triton's kernels on NVIDIA's devices.",
                     -1,
                     nullptr,
                     nullptr,
                     nullptr,
                     nullptr,
                     nullptr};

}  // namespace
}  // namespace flagos::triton

PyMODINIT_FUNC PyInit__cuda() {
  using namespace flagos::triton;
  if ((g_data_ptr = PyUnicode_InternFromString("data_ptr")) == nullptr) return nullptr;
  PyObject* module = PyModule_Create(&g_module);
  PyObject* type = module == nullptr ? nullptr : PyType_FromSpec(&g_type);
  if (type == nullptr || PyModule_AddObjectRef(module, "Launcher", type) != 0) Py_CLEAR(module);
  Py_XDECREF(type);
  return module;
}
