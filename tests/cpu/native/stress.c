/* Threads that create, run, donate, copy, hold, promise and delete buffers at once, and check every value they get.
 * Usage: stress LIBRARY PROGRAM THREADS ITERATIONS ELEMENTS [NAME=VALUE context options...]
 * PROGRAM is a file with a program that gives up its argument: x + 1 on f32[ELEMENTS]. */
#include <pthread.h>

#include "client.h"

#define MAX_THREADS 64
#define MAX_OPTIONS 8

static FlagosContext* context;
static FlagosExecutable* executable;
static FlagosMemory* memories[64];
static size_t num_memories;
static int64_t elements;
static long iterations;
static long callbacks_run;

static unsigned next_random(unsigned* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

static void count_callback(void* user_data, FlagosError* error) {
  (void)user_data;
  api->error_destroy(error);
  __atomic_fetch_add(&callbacks_run, 1, __ATOMIC_RELAXED);
}

static void expect_all(FlagosBuffer* buffer, float* scratch, float value) {
  int64_t i;
  to_host(buffer, scratch, (size_t)elements * sizeof(float));
  for (i = 0; i < elements; ++i) EXPECT(scratch[i] == value);
}

static FlagosBuffer* copy(FlagosBuffer* buffer, FlagosMemory* memory) {
  FlagosBufferCopyArgs args = {.struct_size = sizeof(args)};
  args.buffer = buffer;
  args.memory = memory;
  CHECK(api->buffer_copy(&args));
  return args.copy;
}

static void hold(FlagosBuffer* buffer, int32_t delta) {
  FlagosBufferHoldArgs args = {.struct_size = sizeof(args)};
  args.buffer = buffer;
  args.delta = delta;
  CHECK(api->buffer_hold(&args));
}

static void delete_buffer(FlagosBuffer* buffer) {
  FlagosBufferDeleteArgs args = {.struct_size = sizeof(args)};
  args.buffer = buffer;
  CHECK(api->buffer_delete(&args));
}

/* A program on a promise that is kept only later, or never when the source is NULL. */
static FlagosBuffer* run_promised(FlagosBuffer* source) {
  FlagosBufferPromiseArgs promise = {.struct_size = sizeof(promise)};
  FlagosBufferFulfillArgs fulfill = {.struct_size = sizeof(fulfill)};
  FlagosBuffer* output;
  promise.context = context;
  promise.memory = memories[0];
  promise.dims = &elements;
  promise.rank = 1;
  promise.element_type = FLAGOS_TYPE_F32;
  CHECK(api->buffer_promise(&promise));
  CHECK(run(executable, promise.buffer, &output, NULL));
  fulfill.promise = promise.buffer;
  fulfill.source = source;
  if (source != NULL) CHECK(api->buffer_fulfill(&fulfill));
  api->buffer_destroy(promise.buffer);
  return output;
}

/* Waits for a device's work through a buffer that is not ready before an event of the host. */
static FlagosBuffer* donate_later(FlagosBuffer* buffer) {
  FlagosEventCreateArgs event = {.struct_size = sizeof(event)};
  FlagosBufferDonateArgs donate = {.struct_size = sizeof(donate)};
  FlagosEventSetArgs set = {.struct_size = sizeof(set)};
  FlagosBuffer* output;
  event.context = context;
  CHECK(api->event_create(&event));
  donate.buffer = buffer;
  donate.dependency = event.event;
  CHECK(api->buffer_donate(&donate));
  CHECK(run(executable, donate.donated, &output, NULL));
  set.event = event.event;
  CHECK(api->event_set(&set));
  api->event_destroy(event.event);
  api->buffer_destroy(donate.donated);
  return output;
}

static void iterate(unsigned* random, float* data, float* scratch) {
  const float start = (float)(next_random(random) % 1000);
  const int32_t semantics = (int32_t)(next_random(random) % 4);
  FlagosEventOnReadyArgs on_ready = {.struct_size = sizeof(on_ready)};
  FlagosEvent *sent, *done;
  FlagosBuffer *first, *second, *other, *third;
  float value = start;
  int64_t i;
  for (i = 0; i < elements; ++i) data[i] = start;
  first = from_host(context, memories[0], data, &elements, 1, semantics, &sent);
  other = copy(first, memories[next_random(random) % num_memories]);
  if (next_random(random) % 4 == 0) {
    hold(first, 1);
    CHECK(run(executable, first, &second, &done));
    expect_all(other, scratch, start);
    hold(first, -1);
  } else {
    CHECK(run(executable, first, &second, &done));
  }
  value += 1;
  on_ready.event = done;
  on_ready.callback = count_callback;
  CHECK(api->event_on_ready(&on_ready));
  api->event_destroy(done);
  /* Given up whatever the program made of it. */
  EXPECT_CODE(FLAGOS_INVALID_ARGUMENT, run(executable, first, &third, NULL));
  switch (next_random(random) % 4) {
    case 0:
      third = donate_later(second);
      value += 1;
      break;
    case 1:
      api->buffer_destroy(run_promised(NULL)); /* cancelled */
      third = run_promised(second);
      value += 1;
      break;
    case 2:
      CHECK(run(executable, second, &third, NULL));
      value += 1;
      break;
    default:
      third = copy(second, memories[next_random(random) % num_memories]);
      delete_buffer(second);
      break;
  }
  expect_all(third, scratch, value);
  expect_all(other, scratch, start);
  api->buffer_destroy(first);
  api->buffer_destroy(second);
  api->buffer_destroy(third);
  api->buffer_destroy(other);
  CHECK(await(sent)); /* from here on `data` is ours again */
  api->event_destroy(sent);
}

static void* work(void* argument) {
  unsigned random = (unsigned)(size_t)argument * 2654435761u + 1;
  const size_t size = (size_t)elements * sizeof(float);
  /* Aligned, so that zero-copy really happens. */
  void* data = NULL;
  float* scratch = malloc(size);
  long i;
  EXPECT(posix_memalign(&data, 64, size) == 0 && scratch != NULL);
  for (i = 0; i < iterations; ++i) iterate(&random, data, scratch);
  free(data);
  free(scratch);
  return NULL;
}

static void setup(int count, char** texts) {
  FlagosNamedValue options[MAX_OPTIONS + 1];
  FlagosContextCreateArgs create = {.struct_size = sizeof(create)};
  FlagosContextDescribeArgs describe = {.struct_size = sizeof(describe)};
  int i;
  EXPECT(count <= MAX_OPTIONS);
  options[0] = string_option("num_cpu_devices", "2");
  for (i = 0; i < count; ++i) {
    char* equals = strchr(texts[i], '=');
    EXPECT(equals != NULL);
    *equals = '\0';
    options[i + 1] = string_option(texts[i], equals + 1);
  }
  create.options = options;
  create.num_options = (size_t)count + 1;
  CHECK(api->context_create(&create));
  context = describe.context = create.context;
  CHECK(api->context_describe(&describe));
  num_memories = describe.num_memories;
  EXPECT(num_memories <= 64);
  memcpy(memories, describe.memories, num_memories * sizeof(FlagosMemory*));
}

static void expect_nothing_left(void) {
  FlagosContextDescribeArgs describe = {.struct_size = sizeof(describe)};
  size_t i;
  describe.context = context;
  CHECK(api->context_describe(&describe));
  for (i = 0; i < describe.num_devices; ++i) {
    FlagosDeviceSynchronizeArgs synchronize = {.struct_size = sizeof(synchronize)};
    FlagosDeviceMemoryStatsArgs stats = {.struct_size = sizeof(stats)};
    synchronize.device = stats.device = describe.devices[i];
    CHECK(api->device_synchronize(&synchronize));
    CHECK(api->device_memory_stats(&stats));
    EXPECT(stats.bytes_in_use == 0 && stats.num_allocations == 0);
  }
}

int main(int argc, char** argv) {
  pthread_t threads[MAX_THREADS];
  int count, i;
  EXPECT(argc >= 6);
  count = atoi(argv[3]);
  iterations = atol(argv[4]);
  elements = atol(argv[5]);
  EXPECT(count > 0 && count <= MAX_THREADS && iterations > 0 && elements > 0);
  load_backend(argv[1]);
  setup(argc - 6, argv + 6);
  executable = compile_file(context, argv[2]);
  for (i = 0; i < count; ++i) EXPECT(pthread_create(&threads[i], NULL, work, (void*)(size_t)i) == 0);
  for (i = 0; i < count; ++i) EXPECT(pthread_join(threads[i], NULL) == 0);
  expect_nothing_left();
  EXPECT(callbacks_run == count * iterations);
  api->executable_destroy(executable);
  api->context_destroy(context);
  puts("ok");
  return 0;
}
