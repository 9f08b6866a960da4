// A class derived from c10::impl::DeviceGuardImplInterface would fix how many virtual functions that has, which differs
// between PyTorch's versions, and would need libc10 when it is linked. So the guard is an object whose table of functions
// is a copy of that of PyTorch's guard, with the functions that call Python replaced. They are among the first ten, whose
// order and types are those of the Functions below in all versions that the manifest accepts.
#define _GNU_SOURCE  // dl_iterate_phdr
#include "guard.h"

#include <dlfcn.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// c10::Device and c10::Stream. Both are trivially copyable, so that C passes them as C++ does.
typedef struct {
  int8_t type;
  int8_t index;
} Device;

typedef struct {
  Device device;
  int64_t id;
} Stream;

typedef struct Guard Guard;

// The first virtual functions of c10::impl::DeviceGuardImplInterface.
typedef struct {
  int8_t (*type)(const Guard*);
  Device (*exchange_device)(const Guard*, Device);
  Device (*get_device)(const Guard*);
  void (*set_device)(const Guard*, Device);
  void (*unchecked_set_device)(const Guard*, Device);
  Stream (*get_stream)(const Guard*, Device);
  Stream (*get_default_stream)(const Guard*, Device);
  Stream (*get_stream_from_global_pool)(const Guard*, Device, _Bool);
  Stream (*get_new_stream)(const Guard*, Device, int);
  Stream (*exchange_stream)(const Guard*, Stream);
} Functions;

// std::type_info.
typedef struct {
  const void* functions;
  const char* name;
} TypeInfo;

// A table of virtual functions as the Itanium C++ ABI lays it out. Objects point at its functions.
typedef struct {
  intptr_t offset_to_top;
  const TypeInfo* type_info;
  Functions functions;
  void* more_functions[54];  // at most; PyTorch 2.13 has 16
} Table;

struct Guard {
  const Functions* functions;
};

enum { kPrivateUse1 = 20 };

// There is one device, and one stream.
static const Device only_device = {kPrivateUse1, 0};
static const Stream only_stream = {{kPrivateUse1, 0}, 0};

static int8_t type(const Guard* guard) {
  (void)guard;
  return kPrivateUse1;
}

static Device exchange_device(const Guard* guard, Device device) {
  (void)guard;
  (void)device;
  return only_device;
}

static Device get_device(const Guard* guard) {
  (void)guard;
  return only_device;
}

static Stream get_stream(const Guard* guard, Device device) {
  (void)guard;
  (void)device;
  return only_stream;
}

// Callbacks of futures are given one.
static Stream get_stream_from_global_pool(const Guard* guard, Device device, _Bool is_high_priority) {
  (void)guard;
  (void)device;
  (void)is_high_priority;
  return only_stream;
}

static Stream get_new_stream(const Guard* guard, Device device, int priority) {
  (void)guard;
  (void)device;
  (void)priority;
  return only_stream;
}

static Stream exchange_stream(const Guard* guard, Stream stream) {
  (void)guard;
  (void)stream;
  return only_stream;
}

// ---- Installing ----------------------------------------------------------------------------------------------------

typedef struct {
  uintptr_t address;
  uintptr_t end;  // of the mapped memory around it
} Mapping;

static int find_mapping(struct dl_phdr_info* library, size_t size, void* found) {
  (void)size;
  Mapping* mapping = found;
  for (int i = 0; i < library->dlpi_phnum; i++) {
    uintptr_t begin = library->dlpi_addr + library->dlpi_phdr[i].p_vaddr;
    uintptr_t end = begin + library->dlpi_phdr[i].p_memsz;
    if (library->dlpi_phdr[i].p_type == PT_LOAD && begin <= mapping->address && mapping->address < end) {
      mapping->end = end;
      return 1;
    }
  }
  return 0;
}

// Copies what the table has, and whatever follows it, which is never called.
static void copy_table(Table* to, const Table* from) {
  Mapping mapping = {(uintptr_t)from, (uintptr_t)from};
  dl_iterate_phdr(find_mapping, &mapping);
  size_t mapped = mapping.end - mapping.address;
  memcpy(to, from, mapped < sizeof *to ? mapped : sizeof *to);
}

static int is_known(const Guard* guard, const Table* table) {
  return strcmp(table->type_info->name, "N5torch3acc17PythonDeviceGuardE") == 0 &&
         guard->functions->type(guard) == kPrivateUse1;
}

int guard_install(void) {
  static Table table;
  static const Guard ours = {&table.functions};
  // PyTorch has loaded it. Python opens libraries locally, so that it is not found without its name.
  void* c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  const Guard* const* registry = c10 ? dlsym(c10, "_ZN3c104impl26device_guard_impl_registryE") : NULL;
  void (*register_guard)(int8_t, const Guard*) = NULL;
  if (c10) {
    *(void**)&register_guard =
        dlsym(c10, "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE");
    dlclose(c10);
  }
  const Guard* theirs = registry ? __atomic_load_n(&registry[kPrivateUse1], __ATOMIC_ACQUIRE) : NULL;
  if (!register_guard || !theirs) {
    PyErr_SetString(PyExc_ImportError, "no guard is registered for the device, or not where this build looks for it");
    return -1;
  }
  if (theirs == &ours) return 0;
  const Table* known = (const Table*)((const char*)theirs->functions - offsetof(Table, functions));
  if (!is_known(theirs, known)) {
    PyErr_Format(PyExc_ImportError, "the device's guard is a %s, which this build does not know",
                 known->type_info->name);
    return -1;
  }
  copy_table(&table, known);
  table.functions.type = type;
  table.functions.exchange_device = exchange_device;
  table.functions.get_device = get_device;
  table.functions.get_stream = get_stream;
  table.functions.get_stream_from_global_pool = get_stream_from_global_pool;
  table.functions.get_new_stream = get_new_stream;
  table.functions.exchange_stream = exchange_stream;
  register_guard(kPrivateUse1, &ours);
  return 0;
}
