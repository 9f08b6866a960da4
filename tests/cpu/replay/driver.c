// Stands for the CUDA driver library: streams are done at once, and a graph has one kernel, which takes the addresses of
// arrays and calls back. The types are those of flagos_backend/native/cuda/driver.h.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Result;
enum { kError = 1 };

// The same kernel for each capture of a plan; its number of parameters is what a driver knows of it.
typedef struct {
  int64_t id;
  size_t count;
} Function;

typedef struct {
  Function* function;
  uint64_t* addresses;
  void** values;
} Graph;

typedef struct {
  Function* function;
  unsigned grid[3], block[3], shared_bytes;
  void **values, **extra;
  void *kernel, *context;
} KernelParams;

typedef struct {
  Function* function;
  uint64_t addresses[];
} Exec;

typedef void (*Launch)(int64_t id, const uint64_t* addresses, size_t count);

static Launch g_launch;
static int64_t g_refused = -1;
static int g_execs;
static unsigned g_delay;

// ---- For the tests

void driver_set_launch(Launch launch) { g_launch = launch; }
// Graphs of this function cannot be patched.
void driver_refuse(int64_t id) { g_refused = id; }
int driver_execs(void) { return g_execs; }
// How long launches take, in microseconds.
void driver_set_delay(unsigned delay) { g_delay = delay; }

void* driver_function(int64_t id, size_t count) {
  Function* function = malloc(sizeof(Function));
  function->id = id;
  function->count = count;
  return function;
}

void* driver_graph(Function* function, const uint64_t* addresses) {
  Graph* graph = malloc(sizeof(Graph));
  graph->function = function;
  graph->addresses = malloc((function->count + 1) * sizeof(uint64_t));
  graph->values = malloc((function->count + 1) * sizeof(void*));
  memcpy(graph->addresses, addresses, function->count * sizeof(uint64_t));
  for (size_t i = 0; i < function->count; ++i) graph->values[i] = &graph->addresses[i];
  return graph;
}

// ---- Graphs

Result cuGraphGetNodes(Graph* graph, Graph** nodes, size_t* count) {
  if (nodes != NULL) nodes[0] = graph;
  *count = 1;
  return 0;
}

Result cuGraphNodeGetType(Graph* node, int* type) {
  (void)node;
  *type = 0;
  return 0;
}

Result cuGraphKernelNodeGetParams_v2(Graph* node, KernelParams* params) {
  memset(params, 0, sizeof(*params));
  params->function = node->function;
  params->grid[0] = params->block[0] = 1;
  params->values = node->values;
  return 0;
}

Result cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size) {
  if (index >= function->count) return kError;
  *offset = index * sizeof(uint64_t);
  *size = sizeof(uint64_t);
  return 0;
}

Result cuGraphInstantiateWithFlags(Exec** exec, Graph* graph, unsigned long long flags) {
  (void)flags;
  *exec = malloc(sizeof(Exec) + graph->function->count * sizeof(uint64_t));
  (*exec)->function = graph->function;
  memcpy((*exec)->addresses, graph->addresses, graph->function->count * sizeof(uint64_t));
  ++g_execs;
  return 0;
}

Result cuGraphExecDestroy(Exec* exec) {
  free(exec);
  --g_execs;
  return 0;
}

Result cuGraphExecKernelNodeSetParams_v2(Exec* exec, Graph* node, const KernelParams* params) {
  (void)node;
  if (exec->function->id == g_refused) return kError;
  for (size_t i = 0; i < exec->function->count; ++i) memcpy(&exec->addresses[i], params->values[i], sizeof(uint64_t));
  return 0;
}

Result cuGraphLaunch(Exec* exec, void* stream) {
  (void)stream;
  usleep(g_delay);
  g_launch(exec->function->id, exec->addresses, exec->function->count);
  return 0;
}

// ---- What has nothing to do

Result cuGraphUpload(Exec* exec, void* stream) { return (void)exec, (void)stream, 0; }
Result cuGraphMemcpyNodeGetParams(Graph* node, void* params) { return (void)node, (void)params, kError; }
Result cuGraphMemsetNodeGetParams(Graph* node, void* params) { return (void)node, (void)params, kError; }
Result cuGraphExecMemcpyNodeSetParams(Exec* e, Graph* n, void* p, void* c) {
  return (void)e, (void)n, (void)p, (void)c, kError;
}
Result cuGraphExecMemsetNodeSetParams(Exec* e, Graph* n, void* p, void* c) {
  return (void)e, (void)n, (void)p, (void)c, kError;
}
Result cuKernelGetFunction(void** function, void* kernel) { return (void)function, (void)kernel, kError; }

Result cuInit(unsigned flags) { return (void)flags, 0; }
Result cuGetErrorString(Result result, const char** text) {
  (void)result;
  *text = "an error of the driver of the tests";
  return 0;
}
Result cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) {
  (void)device;
  *context = &g_launch;
  return 0;
}
Result cuCtxPushCurrent_v2(void* context) { return (void)context, 0; }
Result cuCtxPopCurrent_v2(void** context) {
  *context = NULL;
  return 0;
}
Result cuEventCreate(void** event, unsigned flags) {
  (void)flags;
  *event = &g_launch;
  return 0;
}
Result cuEventRecord(void* event, void* stream) { return (void)event, (void)stream, 0; }
Result cuEventQuery(void* event) { return (void)event, 0; }
Result cuEventSynchronize(void* event) { return (void)event, 0; }
Result cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return (void)stream, (void)event, (void)flags, 0;
}
Result cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  (void)stream;
  memcpy((void*)to, (const void*)from, bytes);
  return 0;
}
