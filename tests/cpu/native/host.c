/* A host that is not Python and knows the backend through its header only: negotiates, describes, moves bytes, compiles
 * the program in a file (x + 1 on f32[2,3]), runs it and compares.
 * Usage: host LIBRARY PROGRAM [NAME=VALUE context options...] */
#include "client.h"

#define MAX_OPTIONS 8

static FlagosContext* create_context(int count, char** texts) {
  FlagosNamedValue options[MAX_OPTIONS];
  FlagosContextCreateArgs args = {.struct_size = sizeof(args)};
  int i;
  EXPECT(count <= MAX_OPTIONS);
  for (i = 0; i < count; ++i) {
    char* equals = strchr(texts[i], '=');
    EXPECT(equals != NULL);
    *equals = '\0';
    options[i] = string_option(texts[i], equals + 1);
  }
  args.options = options;
  args.num_options = (size_t)count;
  args.num_processes = 1;
  CHECK(api->context_create(&args));
  return args.context;
}

static FlagosMemory* default_memory(FlagosContext* context) {
  FlagosContextDescribeArgs args = {.struct_size = sizeof(args)};
  FlagosDeviceDescribeArgs device = {.struct_size = sizeof(device)};
  args.context = context;
  CHECK(api->context_describe(&args));
  EXPECT(args.num_devices >= 1 && args.num_addressable_devices == args.num_devices);
  EXPECT(strcmp(args.platform_name, "flagos") == 0);
  device.device = args.devices[0];
  CHECK(api->device_describe(&device));
  EXPECT(device.is_addressable == 1 && device.default_memory != NULL);
  printf("%s: %zu devices of kind %s\n", args.platform_version, args.num_devices, device.kind);
  return device.default_memory;
}

static void describe(FlagosExecutable* executable) {
  FlagosExecutableDescribeArgs args = {.struct_size = sizeof(args)};
  args.executable = executable;
  CHECK(api->executable_describe(&args));
  EXPECT(args.num_arguments == 1 && args.num_outputs == 1 && args.num_devices == 1);
  EXPECT(args.output_types[0] == FLAGOS_TYPE_F32 && args.output_ranks[0] == 2);
  EXPECT(args.output_dims[0] == 2 && args.output_dims[1] == 3);
  printf("compiled %s\n", args.name);
}

int main(int argc, char** argv) {
  const int64_t dims[2] = {2, 3};
  const float input[6] = {0.0f, 1.5f, -2.0f, 1e30f, -0.0f, 41.0f};
  float result[6];
  FlagosContext* context;
  FlagosExecutable* executable;
  FlagosBuffer *argument, *output;
  FlagosEvent *sent, *done;
  int i;
  EXPECT(argc >= 3);
  load_backend(argv[1]);
  context = create_context(argc - 3, argv + 3);
  argument = from_host(context, default_memory(context), input, dims, 2, FLAGOS_HOST_IMMUTABLE_ONLY_DURING_CALL, &sent);
  CHECK(await(sent));
  api->event_destroy(sent);

  executable = compile_file(context, argv[2]);
  describe(executable);
  CHECK(run(executable, argument, &output, &done));
  CHECK(await(done));
  to_host(output, result, sizeof(result));
  for (i = 0; i < 6; ++i) EXPECT(result[i] == input[i] + 1.0f);
  EXPECT_CODE(FLAGOS_INVALID_ARGUMENT, run(executable, NULL, &output, &done));

  api->event_destroy(done);
  api->buffer_destroy(output);
  api->buffer_destroy(argument);
  api->executable_destroy(executable);
  api->context_destroy(context);
  puts("ok");
  return 0;
}
