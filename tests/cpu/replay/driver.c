// Stands for the CUDA driver library: streams are done at once, and the kernels of graphs take addresses and call back.
// Conditional nodes are captured and run as the driver does; what it forbids is an error here. The types are those of
// flagos_backend/native/cuda/driver.h. OLD_DRIVER: one before conditional nodes.
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Result;
enum { kError = 1, kWaitEvent = 6, kRecordEvent = 7, kConditional = 13, kWhile = 1, kActive = 1, kMaxStreams = 4096 };

// The same kernel for each capture of a plan; its number of parameters is what a driver knows of it.
typedef struct {
  int64_t id;
  size_t count;
} Function;

typedef struct Graph Graph;

typedef struct Node {
  struct Node *next, *previous;
  Graph* graph;
  Function* function;  // of a kernel
  uint64_t* addresses;
  void** values;
  int event;    // kWaitEvent or kRecordEvent
  int bridged;  // what comes before it comes before what follows it
  Graph* body;  // of a conditional node
  int repeats;
  struct Condition* condition;
} Node;

struct Graph {
  Node *first, *last;
  size_t count;
  int execs;
};

// What a handle stands for.
typedef struct Condition {
  Graph* graph;
  int holds, used;
} Condition;

typedef struct {
  Function* function;
  unsigned grid[3], block[3], shared_bytes;
  void **values, **extra;
  void *kernel, *context;
} KernelParams;

typedef struct {
  int type, reserved[3];
  Condition* condition;
  int kind;
  unsigned size;
  Graph** bodies;
  void* context;
  char rest[208];
} ConditionalParams;

// What a kernel holds in a graph that can be launched.
typedef struct Patched {
  struct Patched* next;
  Node* node;
  uint64_t addresses[];
} Patched;

typedef struct {
  Graph* graph;
  Patched* patched;
} Exec;

typedef void (*Launch)(int64_t id, const uint64_t* addresses, size_t count);

static Launch g_launch;
static int64_t g_refused = -1;
static int g_execs, g_launches;
static unsigned g_delay;
static int g_parallel;
static Graph* g_capturing[kMaxStreams];
static Node* g_last[kMaxStreams];  // after which a stream's next node comes
static Function g_set_condition = {-2, 2};

static Node* add(Graph* graph, Node* node) {
  node->graph = graph;
  node->previous = graph->last;
  if (graph->last != NULL) graph->last->next = node;
  if (graph->first == NULL) graph->first = node;
  graph->last = node;
  ++graph->count;
  return node;
}

static Node* add_kernel(Graph* graph, Function* function, const uint64_t* addresses) {
  Node* node = calloc(1, sizeof(Node));
  node->function = function;
  node->addresses = malloc((function->count + 1) * sizeof(uint64_t));
  node->values = malloc((function->count + 1) * sizeof(void*));
  memcpy(node->addresses, addresses, function->count * sizeof(uint64_t));
  for (size_t i = 0; i < function->count; ++i) node->values[i] = &node->addresses[i];
  return add(graph, node);
}

// A node that does not follow the last one of its stream would run at any time.
static Result capture_kernel(uintptr_t stream, Function* function, const uint64_t* addresses) {
  Graph* graph = stream < kMaxStreams ? g_capturing[stream] : NULL;
  if (graph == NULL || g_last[stream] != graph->last) return kError;
  g_last[stream] = add_kernel(graph, function, addresses);
  return 0;
}

// ---- For the tests

void driver_set_launch(Launch launch) { g_launch = launch; }
// Graphs of this function cannot be patched.
void driver_refuse(int64_t id) { g_refused = id; }
int driver_execs(void) { return g_execs; }
int driver_launches(void) { return g_launches; }
// How long launches take, in microseconds.
void driver_set_delay(unsigned delay) { g_delay = delay; }

// Whether the graphs of several devices run at one time.
void driver_set_parallel(int parallel) { g_parallel = parallel; }

void* driver_function(int64_t id, size_t count) {
  Function* function = malloc(sizeof(Function));
  function->id = id;
  function->count = count;
  return function;
}

void driver_begin(uintptr_t stream) {
  g_capturing[stream] = calloc(1, sizeof(Graph));
  g_last[stream] = NULL;
}

Result driver_kernel(uintptr_t stream, Function* function, const uint64_t* addresses) {
  return capture_kernel(stream, function, addresses);
}

Result driver_event(uintptr_t stream, int event) {
  if (g_capturing[stream] == NULL || g_last[stream] != g_capturing[stream]->last) return kError;
  Node* node = calloc(1, sizeof(Node));
  node->event = event;
  g_last[stream] = add(g_capturing[stream], node);
  return 0;
}

Result cuStreamEndCapture(uintptr_t stream, Graph** graph) {
  *graph = g_capturing[stream];
  g_capturing[stream] = NULL;
  return *graph != NULL && g_last[stream] == (*graph)->last ? 0 : kError;
}

void* driver_end(uintptr_t stream) {
  Graph* graph = NULL;
  return cuStreamEndCapture(stream, &graph) == 0 ? graph : NULL;
}

// ---- Conditional nodes under capture

Result cuModuleLoadData(void** module, const char* text) {
  *module = &g_set_condition;
  return strstr(text, "cudaGraphSetConditional") != NULL ? 0 : kError;
}

Result cuModuleGetFunction(Function** function, void* module, const char* name) {
  *function = module;
  return strcmp(name, "flagos_set_condition") == 0 ? 0 : kError;
}

Result cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, uintptr_t stream, void** values, void** extra) {
  if (function != &g_set_condition || gx * gy * gz * bx * by * bz != 1 || shared != 0 || extra != NULL) return kError;
  const uint64_t addresses[2] = {*(uint64_t*)values[0], *(uint64_t*)values[1]};
  return capture_kernel(stream, function, addresses);
}

Result cuStreamGetCaptureInfo_v2(uintptr_t stream, int* status, uint64_t* number, Graph** graph, Node*** last,
                                 size_t* count) {
  *number = stream;
  *graph = stream < kMaxStreams ? g_capturing[stream] : NULL;
  *status = *graph != NULL ? kActive : 0;
  *last = *graph != NULL ? &g_last[stream] : NULL;
  *count = *graph != NULL && g_last[stream] != NULL ? 1 : 0;
  return 0;
}

#ifndef OLD_DRIVER
Result cuGraphConditionalHandleCreate(Condition** handle, Graph* graph, void* context, unsigned value, unsigned flags) {
  if (graph == NULL || context == NULL || value != 0 || flags != 0) return kError;
  *handle = calloc(1, sizeof(Condition));
  (*handle)->graph = graph;
  return 0;
}
#endif

Result cuGraphAddNode(Node** made, Graph* graph, Node** after, size_t count, ConditionalParams* params) {
  Condition* condition = params->condition;
  // A handle is for one node, of the graph that it was made for.
  if (params->type != kConditional || params->size != 1 || condition->graph != graph || condition->used++)
    return kError;
  if (params->context == NULL || (count == 0 ? graph->last != NULL : after[0] != graph->last)) return kError;
  Node* node = calloc(1, sizeof(Node));
  node->condition = condition;
  node->repeats = params->kind == kWhile;
  node->body = calloc(1, sizeof(Graph));
  params->bodies = &node->body;
  *made = add(graph, node);
  return 0;
}

Result cuStreamUpdateCaptureDependencies(uintptr_t stream, Node** nodes, size_t count, unsigned flags) {
  if (count != 1 || flags != 1 || g_capturing[stream] == NULL) return kError;
  g_last[stream] = nodes[0];
  return 0;
}

Result cuStreamBeginCaptureToGraph(uintptr_t stream, Graph* graph, void* after, void* edges, size_t count, int mode) {
  if (stream >= kMaxStreams || g_capturing[stream] != NULL || after != NULL || edges != NULL || count != 0 || mode != 1)
    return kError;
  g_capturing[stream] = graph;
  g_last[stream] = NULL;
  return 0;
}

// ---- Graphs

Result cuGraphGetNodes(Graph* graph, Node** nodes, size_t* count) {
  *count = graph->count;
  if (nodes == NULL) return 0;
  for (Node* node = graph->first; node != NULL; node = node->next) *nodes++ = node;
  return 0;
}

Result cuGraphNodeGetType(Node* node, int* type) {
  *type = node->body != NULL ? kConditional : node->event;
  return 0;
}

// Each node follows the one before.
static Result neighbour(Node* node, Node** nodes, size_t* count) {
  *count = node != NULL;
  if (nodes != NULL && node != NULL) *nodes = node;
  return 0;
}

Result cuGraphNodeGetDependencies(Node* node, Node** nodes, size_t* count) {
  return neighbour(node->previous, nodes, count);
}

Result cuGraphNodeGetDependentNodes(Node* node, Node** nodes, size_t* count) {
  return neighbour(node->next, nodes, count);
}

// Before a node between the two is destroyed.
Result cuGraphAddDependencies(Graph* graph, Node** before, Node** after, size_t count) {
  (void)graph;
  if (count != 1 || before[0]->next == NULL || before[0]->next->next != after[0]) return kError;
  before[0]->next->bridged = 1;
  return 0;
}

Result cuGraphDestroyNode(Node* node) {
  if (node->previous != NULL && node->next != NULL && !node->bridged) return kError;
  *(node->previous != NULL ? &node->previous->next : &node->graph->first) = node->next;
  *(node->next != NULL ? &node->next->previous : &node->graph->last) = node->previous;
  --node->graph->count;
  free(node);
  return 0;
}

Result cuGraphKernelNodeGetParams_v2(Node* node, KernelParams* params) {
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

static void instantiate(Exec* exec, Graph* graph) {
  for (Node* node = graph->first; node != NULL; node = node->next) {
    if (node->body != NULL) {
      instantiate(exec, node->body);
      continue;
    }
    const size_t bytes = node->function->count * sizeof(uint64_t);
    Patched* patched = malloc(sizeof(Patched) + bytes);
    patched->node = node;
    memcpy(patched->addresses, node->addresses, bytes);
    patched->next = exec->patched;
    exec->patched = patched;
  }
}

static Patched* patched_of(Exec* exec, const Node* node) {
  for (Patched* patched = exec->patched; patched != NULL; patched = patched->next) {
    if (patched->node == node) return patched;
  }
  return NULL;
}

Result cuGraphInstantiateWithFlags(Exec** exec, Graph* graph, unsigned long long flags) {
  (void)flags;
  for (Node* node = graph->first; node != NULL; node = node->next) {
    if (node->event != 0) return kError;  // a graph with such nodes is launched in pieces
  }
  if (graph->execs != 0) return kError;  // conditions belong to one graph that is launched
  *exec = calloc(1, sizeof(Exec));
  (*exec)->graph = graph;
  instantiate(*exec, graph);
  ++graph->execs;
  ++g_execs;
  return 0;
}

Result cuGraphExecDestroy(Exec* exec) {
  for (Patched *next, *patched = exec->patched; patched != NULL; patched = next) {
    next = patched->next;
    free(patched);
  }
  --exec->graph->execs;
  free(exec);
  --g_execs;
  return 0;
}

Result cuGraphExecKernelNodeSetParams_v2(Exec* exec, Node* node, const KernelParams* params) {
  Patched* patched = patched_of(exec, node);
  if (patched == NULL || node->function != params->function || node->function->id == g_refused) return kError;
  for (size_t i = 0; i < node->function->count; ++i) {
    memcpy(&patched->addresses[i], params->values[i], sizeof(uint64_t));
  }
  return 0;
}

static void run(Exec* exec, Graph* graph) {
  for (Node* node = graph->first; node != NULL; node = node->next) {
    if (node->body != NULL) {
      while (node->condition->holds) {
        if (!node->repeats) node->condition->holds = 0;
        run(exec, node->body);
      }
      continue;
    }
    const uint64_t* addresses = patched_of(exec, node)->addresses;
    if (node->function == &g_set_condition) {
      ((Condition*)addresses[0])->holds = *(const unsigned char*)addresses[1] != 0;
    } else {
      g_launch(node->function->id, addresses, node->function->count);
    }
  }
}

// A stream runs one graph after another.
Result cuGraphLaunch(Exec* exec, void* stream) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  (void)stream;
  pthread_mutex_lock(&mutex);
  usleep(g_delay);
  ++g_launches;
  if (g_parallel) pthread_mutex_unlock(&mutex);
  run(exec, exec->graph);
  if (!g_parallel) pthread_mutex_unlock(&mutex);
  return 0;
}

// ---- What has nothing to do

Result cuGraphUpload(Exec* exec, void* stream) { return (void)exec, (void)stream, 0; }
Result cuGraphMemcpyNodeGetParams(Node* node, void* params) { return (void)node, (void)params, kError; }
Result cuGraphMemsetNodeGetParams(Node* node, void* params) { return (void)node, (void)params, kError; }
Result cuGraphExecMemcpyNodeSetParams(Exec* e, Node* n, void* p, void* c) {
  return (void)e, (void)n, (void)p, (void)c, kError;
}
Result cuGraphExecMemsetNodeSetParams(Exec* e, Node* n, void* p, void* c) {
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

// ---- Streams and events

// Streams that somebody makes; those below are the tests' and the device's.
Result cuStreamCreate(uintptr_t* stream, unsigned flags) {
  static uintptr_t made = kMaxStreams / 2;
  *stream = made++;
  return flags == 1 && *stream < kMaxStreams ? 0 : kError;
}

static int is_captured(uintptr_t stream) { return stream < kMaxStreams && g_capturing[stream] != NULL; }

// An event that was recorded in what is captured is reached never, and not asked for.
typedef struct {
  int captured;
} Event;

Result cuEventCreate(Event** event, unsigned flags) {
  (void)flags;
  *event = calloc(1, sizeof(Event));
  return 0;
}
Result cuEventRecord(Event* event, uintptr_t stream) {
  event->captured = is_captured(stream);
  return 0;
}
Result cuEventQuery(Event* event) { return event->captured ? kError : 0; }
Result cuEventSynchronize(Event* event) { return cuEventQuery(event); }
Result cuStreamWaitEvent(uintptr_t stream, Event* event, unsigned flags) {
  return (void)stream, (void)flags, cuEventQuery(event);
}
// What is copied on a stream that is captured is copied when the graph is launched, if ever.
Result cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, uintptr_t stream) {
  if (!is_captured(stream)) memcpy((void*)to, (const void*)from, bytes);
  return 0;
}
