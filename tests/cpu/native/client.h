/* What the C hosts of these tests share: load a backend through the header alone, and stop at the first thing that is
 * not as expected. */
#ifndef FLAGOS_TESTS_CPU_NATIVE_CLIENT_H_
#define FLAGOS_TESTS_CPU_NATIVE_CLIENT_H_

#include <dlfcn.h>
#include <flagos/plugin_abi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const FlagosApi* api;

#define EXPECT(condition)                                                      \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

/* The code of an error, which it destroys; 0 for NULL. Prints an error that is not the expected one. */
static int32_t code_of(FlagosError* error, int32_t expected, const char* file, int line) {
  FlagosErrorDescribeArgs args = {.struct_size = sizeof(args)};
  if (error == NULL) return FLAGOS_OK;
  args.error = error;
  api->error_describe(&args);
  if (args.code != expected) {
    fprintf(stderr, "%s:%d: code %d: %.*s\n", file, line, args.code, (int)args.message_size, args.message);
  }
  api->error_destroy(error);
  return args.code;
}

#define EXPECT_CODE(code, call)                                                                \
  do {                                                                                         \
    if (code_of((call), (code), __FILE__, __LINE__) != (code)) {                               \
      fprintf(stderr, "%s:%d: expected code %d from %s\n", __FILE__, __LINE__, (code), #call); \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)
#define CHECK(call) EXPECT_CODE(FLAGOS_OK, call)

static void print_log(void* user_data, int32_t level, const char* message, size_t size) {
  (void)user_data;
  fprintf(stderr, "log %d: %.*s\n", level, (int)size, message);
}

static void load_backend(const char* path) {
  FlagosEntryArgs args = {.struct_size = sizeof(args)};
  FlagosPluginEntry entry;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* symbol;
  if (library == NULL) fprintf(stderr, "%s\n", dlerror());
  EXPECT(library != NULL);
  symbol = dlsym(library, FLAGOS_ENTRY_SYMBOL);
  EXPECT(symbol != NULL);
  memcpy(&entry, &symbol, sizeof(entry));
  args.host_version_min = args.host_version_max = FLAGOS_ABI_VERSION;
  args.host_name = "a test host";
  args.log = print_log;
  args.log_level = FLAGOS_LOG_WARNING;
  EXPECT(entry(&args) == FLAGOS_ENTRY_OK);
  api = args.api;
}

static FlagosNamedValue string_option(const char* name, const char* value) {
  FlagosNamedValue option = {.struct_size = sizeof(option)};
  option.name = name;
  option.name_size = strlen(name);
  option.kind = FLAGOS_VALUE_STRING;
  option.string_value = value;
  option.value_size = strlen(value);
  return option;
}

/* Reads a whole file; the caller frees it. */
static void* read_file(const char* path, size_t* size) {
  FILE* file = fopen(path, "rb");
  long length;
  void* data;
  EXPECT(file != NULL);
  EXPECT(fseek(file, 0, SEEK_END) == 0);
  length = ftell(file);
  EXPECT(length >= 0 && fseek(file, 0, SEEK_SET) == 0);
  data = malloc((size_t)length + 1);
  EXPECT(data != NULL && fread(data, 1, (size_t)length, file) == (size_t)length);
  fclose(file);
  *size = (size_t)length;
  return data;
}

static FlagosExecutable* compile_file(FlagosContext* context, const char* path) {
  FlagosCompileArgs args = {.struct_size = sizeof(args)};
  void* program = read_file(path, &args.program_size);
  args.context = context;
  args.program = program;
  CHECK(api->compile(&args));
  free(program);
  return args.executable;
}

static FlagosBuffer* from_host(FlagosContext* context, FlagosMemory* memory, const void* data, const int64_t* dims,
                               size_t rank, int32_t semantics, FlagosEvent** done) {
  FlagosBufferFromHostArgs args = {.struct_size = sizeof(args)};
  args.context = context;
  args.memory = memory;
  args.data = data;
  args.dims = dims;
  args.rank = rank;
  args.element_type = FLAGOS_TYPE_F32;
  args.semantics = semantics;
  CHECK(api->buffer_from_host(&args));
  *done = args.done_with_host;
  return args.buffer;
}

static FlagosError* await(FlagosEvent* event) {
  FlagosEventAwaitArgs args = {.struct_size = sizeof(args)};
  args.event = event;
  args.timeout_ns = -1;
  return api->event_await(&args);
}

static void to_host(FlagosBuffer* buffer, void* data, size_t size) {
  FlagosBufferToHostArgs args = {.struct_size = sizeof(args)};
  args.buffer = buffer;
  args.data = data;
  args.size = size;
  CHECK(api->buffer_to_host(&args));
  CHECK(await(args.done));
  api->event_destroy(args.done);
}

/* Runs a program of one argument and one output on its one device; outputs and done are the caller's to destroy. */
static FlagosError* run(FlagosExecutable* executable, FlagosBuffer* argument, FlagosBuffer** output,
                        FlagosEvent** done) {
  FlagosBuffer* const row[1] = {argument};
  FlagosBuffer* const* const arguments[1] = {row};
  FlagosBuffer** const outputs[1] = {output};
  FlagosExecuteArgs args = {.struct_size = sizeof(args)};
  args.executable = executable;
  args.num_devices = 1;
  args.num_arguments = 1;
  args.arguments = arguments;
  args.outputs = outputs;
  args.done = done;
  return api->execute(&args);
}

#endif /* FLAGOS_TESTS_CPU_NATIVE_CLIENT_H_ */
