/* The flagos plugin ABI: the one contract between a host process and a backend library.
 *
 * A host (the PJRT adapter, the PyTorch front end, a plain C program) finds a backend through its manifest, checks it,
 * loads it and calls its only exported symbol, flagos_plugin_entry. Everything else is reached through the table of
 * function pointers that the call returns. Plain C99: nothing here needs C++, Python or any framework.
 *
 * Concepts, explained once
 *   Versions   FLAGOS_ABI_VERSION is major << 16 | minor. A major bump breaks; a minor bump only appends fields to structs
 *              and functions to the table. The host states the range it speaks, the plugin answers with the highest
 *              version in both ranges, and the host decides. A plugin never serves a version that was not asked for. If
 *              the ranges do not meet, the plugin returns FLAGOS_ENTRY_INCOMPATIBLE with its own range filled in, and the
 *              host refuses it; no other function of that plugin is ever called.
 *   Structs    Every struct begins with struct_size, set by whoever allocates it to sizeof its own declaration. The other
 *              side touches no field that lies beyond struct_size, and treats absent fields as zero. Fields marked "out"
 *              are written by the callee, all others by the caller. Unknown trailing fields are ignored.
 *   Errors     A function returns NULL, or an error that the host frees with error_destroy. No exception, abort or exit
 *              crosses this boundary. When an error is returned no "out" field is meaningful.
 *   Ownership  Who allocates frees: handles come from *_create, *_compile, ... and end in the matching *_destroy.
 *              Pointers inside a described object live as long as that object unless said otherwise. Inputs are borrowed
 *              for the duration of the call unless said otherwise. An error that is handed over is taken even when the
 *              call that takes it fails.
 *   Threads    Any function may be called from any thread at any time, several at once, also on the same handle. A
 *              handle must not be used after or during its own *_destroy. Callbacks may arrive on any thread, also before
 *              the function that registered them returns; they must not block on device work.
 *   Time       Functions that start device work return before it ends and hand out events. Buffers carry their own
 *              readiness: work that reads a buffer waits for it without the host's help.
 *   Bytes      Dense arrays are row major. Sub-byte integers (S1..U4, F4) take one byte an element, in the low bits.
 *
 * plugin_abi/CONTRACT.md numbers the duties of both sides and names the test that proves each one.
 */
#ifndef FLAGOS_PLUGIN_ABI_H_
#define FLAGOS_PLUGIN_ABI_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLAGOS_ABI_MAJOR 1
#define FLAGOS_ABI_MINOR 0
#define FLAGOS_ABI_MAKE_VERSION(major, minor) (((uint32_t)(major) << 16) | (uint32_t)(minor))
#define FLAGOS_ABI_VERSION FLAGOS_ABI_MAKE_VERSION(FLAGOS_ABI_MAJOR, FLAGOS_ABI_MINOR)
#define FLAGOS_ENTRY_SYMBOL "flagos_plugin_entry"

/* ---- Opaque handles ------------------------------------------------------------------------------------------------ */

typedef struct FlagosError FlagosError;
typedef struct FlagosContext FlagosContext;
typedef struct FlagosDevice FlagosDevice; /* owned by its context */
typedef struct FlagosMemory FlagosMemory; /* owned by its context */
typedef struct FlagosBuffer FlagosBuffer;
typedef struct FlagosEvent FlagosEvent;
typedef struct FlagosExecutable FlagosExecutable;

/* ---- Plain values -------------------------------------------------------------------------------------------------- */

/* Status codes: the numbers of absl::StatusCode. Fixed width in every struct: int32_t. */
enum {
  FLAGOS_OK = 0,
  FLAGOS_CANCELLED = 1,
  FLAGOS_UNKNOWN = 2,
  FLAGOS_INVALID_ARGUMENT = 3,
  FLAGOS_DEADLINE_EXCEEDED = 4,
  FLAGOS_NOT_FOUND = 5,
  FLAGOS_ALREADY_EXISTS = 6,
  FLAGOS_PERMISSION_DENIED = 7,
  FLAGOS_RESOURCE_EXHAUSTED = 8,
  FLAGOS_FAILED_PRECONDITION = 9,
  FLAGOS_ABORTED = 10,
  FLAGOS_OUT_OF_RANGE = 11,
  FLAGOS_UNIMPLEMENTED = 12,
  FLAGOS_INTERNAL = 13,
  FLAGOS_UNAVAILABLE = 14,
  FLAGOS_DATA_LOSS = 15,
  FLAGOS_UNAUTHENTICATED = 16
};

/* Element types: the numbers of xla.PrimitiveType, so that graph and ABI agree. */
enum {
  FLAGOS_TYPE_INVALID = 0,
  FLAGOS_TYPE_PRED = 1, /* one byte, 0 or 1 */
  FLAGOS_TYPE_S8 = 2,
  FLAGOS_TYPE_S16 = 3,
  FLAGOS_TYPE_S32 = 4,
  FLAGOS_TYPE_S64 = 5,
  FLAGOS_TYPE_U8 = 6,
  FLAGOS_TYPE_U16 = 7,
  FLAGOS_TYPE_U32 = 8,
  FLAGOS_TYPE_U64 = 9,
  FLAGOS_TYPE_F16 = 10,
  FLAGOS_TYPE_F32 = 11,
  FLAGOS_TYPE_F64 = 12,
  FLAGOS_TYPE_C64 = 15,
  FLAGOS_TYPE_BF16 = 16,
  FLAGOS_TYPE_TOKEN = 17,
  FLAGOS_TYPE_C128 = 18,
  FLAGOS_TYPE_F8E5M2 = 19,
  FLAGOS_TYPE_F8E4M3FN = 20,
  FLAGOS_TYPE_S4 = 21,
  FLAGOS_TYPE_U4 = 22,
  FLAGOS_TYPE_F8E4M3B11FNUZ = 23,
  FLAGOS_TYPE_F8E5M2FNUZ = 24,
  FLAGOS_TYPE_F8E4M3FNUZ = 25,
  FLAGOS_TYPE_S2 = 26,
  FLAGOS_TYPE_U2 = 27,
  FLAGOS_TYPE_F8E4M3 = 28,
  FLAGOS_TYPE_F8E3M4 = 29,
  FLAGOS_TYPE_S1 = 30,
  FLAGOS_TYPE_U1 = 31,
  FLAGOS_TYPE_F4E2M1FN = 32,
  FLAGOS_TYPE_F8E8M0FNU = 33
};

enum { FLAGOS_LOG_ERROR = 0, FLAGOS_LOG_WARNING = 1, FLAGOS_LOG_INFO = 2, FLAGOS_LOG_DEBUG = 3, FLAGOS_LOG_TRACE = 4 };

/* A name with a typed value. Exactly the member that kind names is meaningful. */
enum {
  FLAGOS_VALUE_STRING = 0,
  FLAGOS_VALUE_INT64 = 1,
  FLAGOS_VALUE_INT64_LIST = 2,
  FLAGOS_VALUE_DOUBLE = 3,
  FLAGOS_VALUE_BOOL = 4
};
typedef struct FlagosNamedValue {
  size_t struct_size;
  const char* name;
  size_t name_size;
  int32_t kind;
  int32_t bool_value;
  const char* string_value;
  const int64_t* int64_list;
  int64_t int64_value;
  double double_value;
  size_t value_size; /* characters of a string, elements of a list, 1 otherwise */
} FlagosNamedValue;

/* A borrowed run of bytes. */
typedef struct FlagosBytes {
  const void* data;
  size_t size;
} FlagosBytes;

/* A dense array in host memory, as host callbacks see it. */
typedef struct FlagosHostArray {
  size_t struct_size;
  void* data;
  size_t size_bytes;
  const int64_t* dims;
  size_t rank;
  int32_t element_type;
  int32_t reserved;
} FlagosHostArray;

/* ---- Callbacks that a host gives ----------------------------------------------------------------------------------- */

/* One complete line without newline; the text is borrowed for the call. */
typedef void (*FlagosLogCallback)(void* user_data, int32_t level, const char* message, size_t message_size);

/* Called exactly once when an event completes. error is NULL or owned by the callee, who must error_destroy it. */
typedef void (*FlagosEventCallback)(void* user_data, FlagosError* error);

/* Called exactly once when the plugin will never touch the memory again. */
typedef void (*FlagosReleaseCallback)(void* user_data);

/* A program's call back into the host ("flagos.host_callback" custom call). id is the call's number in its backend
 * config. Results are allocated by the plugin and filled by the host. Returns NULL or an error from error_create. May
 * block; the plugin holds no lock and no interpreter lock while it waits. */
typedef FlagosError* (*FlagosHostCallback)(void* user_data, int64_t id, const FlagosHostArray* arguments,
                                           size_t num_arguments, FlagosHostArray* results, size_t num_results);

/* A distributed key-value store. get blocks up to timeout_ms (0: does not wait) and returns a status code; on FLAGOS_OK
 * the value is handed to sink before get returns. put returns a status code. Both may be called from any thread as long as
 * the context lives. */
typedef void (*FlagosBytesSink)(void* sink_data, const void* bytes, size_t size);
typedef int32_t (*FlagosKeyValueGet)(void* user_data, const char* key, size_t key_size, int64_t timeout_ms,
                                     FlagosBytesSink sink, void* sink_data);
typedef int32_t (*FlagosKeyValuePut)(void* user_data, const char* key, size_t key_size, const void* value,
                                     size_t value_size);

/* ---- Entry --------------------------------------------------------------------------------------------------------- */

/* What the library says of itself. The host compares it with the manifest; a difference is a refusal. */
typedef struct FlagosPluginInfo {
  size_t struct_size;
  const char* name;         /* the manifest's name */
  const char* platform;     /* the manifest's platform: "flagos" */
  const char* version;      /* the backend's own version, "0.1.0" */
  const char* git_revision; /* 40 hex digits of the backend's own source, or "" for an untracked tree */
  const char* compiler;     /* "gcc 12.2.0", "clang 18.1.3": the manifest's built_with.compiler */
  const char* glibc;        /* the glibc it was built with, "2.36" */
  const char* build_id;     /* free text that tells two builds apart */
  int32_t cxx11_abi;        /* 1, 0, or -1: no C++ in the interface or inside */
  int32_t python_abi;       /* 0: none; 1: the stable ABI of the CPython in the process */
} FlagosPluginInfo;

typedef struct FlagosApi FlagosApi;

enum { FLAGOS_ENTRY_OK = 0, FLAGOS_ENTRY_INCOMPATIBLE = 1, FLAGOS_ENTRY_FAILED = 2 };

typedef struct FlagosEntryArgs {
  size_t struct_size;
  uint32_t host_version_min;
  uint32_t host_version_max;
  const char* host_name; /* for messages: "flagos loader 0.1.0"; borrowed */
  FlagosLogCallback log; /* may be NULL; the latest call's is used until the process ends, NULL ends all logging */
  void* log_user_data;
  int32_t log_level;            /* most verbose level that the host wants */
  uint32_t version;             /* out: the version that api speaks */
  uint32_t plugin_version_min;  /* out, also when incompatible */
  uint32_t plugin_version_max;  /* out, also when incompatible */
  const FlagosApi* api;         /* out: lives until the process ends */
  const FlagosPluginInfo* info; /* out: lives until the process ends, also when incompatible */
  const char* message;          /* out: why, unless FLAGOS_ENTRY_OK; static text */
} FlagosEntryArgs;

/* The only exported symbol. Does no work beyond negotiation: no thread, no file, no interpreter. May be called again,
 * also with another range. */
typedef int32_t (*FlagosPluginEntry)(FlagosEntryArgs* args);

/* ---- Errors -------------------------------------------------------------------------------------------------------- */

typedef struct FlagosErrorCreateArgs {
  size_t struct_size;
  const char* message;
  size_t message_size;
  int32_t code;
  int32_t reserved;
  FlagosError* error; /* out */
} FlagosErrorCreateArgs;

/* A message states fact, place and cure. Payloads are named byte strings (e.g. "flagos.instruction"). */
typedef struct FlagosErrorDescribeArgs {
  size_t struct_size;
  const FlagosError* error;
  const char* message; /* out: not zero-terminated */
  size_t message_size; /* out */
  int32_t code;        /* out */
  int32_t reserved;
  const FlagosNamedValue* payloads; /* out: FLAGOS_VALUE_STRING, bytes allowed */
  size_t num_payloads;              /* out */
} FlagosErrorDescribeArgs;

/* ---- Context, devices, memories ------------------------------------------------------------------------------------ */

typedef struct FlagosContextCreateArgs {
  size_t struct_size;
  const FlagosNamedValue* options; /* the manifest's options, then the host's own; later ones win */
  size_t num_options;
  int32_t process_index; /* this host's rank */
  int32_t num_processes; /* 1: alone, and the store may be NULL */
  FlagosKeyValueGet key_value_get;
  FlagosKeyValuePut key_value_put;
  void* key_value_user_data;
  FlagosHostCallback host_callback; /* NULL: programs with host callbacks are refused at compile time */
  void* host_callback_user_data;
  FlagosContext* context; /* out */
} FlagosContextCreateArgs;

typedef struct FlagosContextDescribeArgs {
  size_t struct_size;
  FlagosContext* context;
  const char* platform_name;                /* out: that of FlagosPluginInfo */
  const char* platform_version;             /* out: backend, versions of what it runs on */
  FlagosDevice* const* devices;             /* out: all, ordered by id */
  size_t num_devices;                       /* out */
  FlagosDevice* const* addressable_devices; /* out: this process's */
  size_t num_addressable_devices;           /* out */
  FlagosMemory* const* memories;            /* out: this process's */
  size_t num_memories;                      /* out */
} FlagosContextDescribeArgs;

typedef struct FlagosDeviceDescribeArgs {
  size_t struct_size;
  FlagosDevice* device;
  int64_t id;                         /* out: unique among all processes */
  int32_t process_index;              /* out */
  int32_t local_hardware_id;          /* out: -1 when not addressable */
  int32_t is_addressable;             /* out */
  int32_t is_host_memory;             /* out: 1 when device memory is ordinary host memory */
  const char* kind;                   /* out: "cpu", "NVIDIA H200", ... */
  const char* debug_string;           /* out */
  const char* to_string;              /* out */
  const FlagosNamedValue* attributes; /* out: CONTRACT.md names those that hosts ask for */
  size_t num_attributes;              /* out */
  FlagosMemory* const* memories;      /* out */
  size_t num_memories;                /* out */
  FlagosMemory* default_memory;       /* out */
} FlagosDeviceDescribeArgs;

typedef struct FlagosMemoryDescribeArgs {
  size_t struct_size;
  FlagosMemory* memory;
  int64_t id;       /* out */
  const char* kind; /* out: "device", "pinned_host", "unpinned_host" */
  int32_t kind_id;  /* out */
  int32_t reserved;
  const char* debug_string;     /* out */
  const char* to_string;        /* out */
  FlagosDevice* const* devices; /* out: those that can address it */
  size_t num_devices;           /* out */
} FlagosMemoryDescribeArgs;

/* Counters in bytes unless named num_*; -1: the device does not know. */
typedef struct FlagosDeviceMemoryStatsArgs {
  size_t struct_size;
  FlagosDevice* device;
  int32_t clear_peaks; /* 1: reset the peaks after reading */
  int32_t reserved;
  int64_t bytes_in_use;       /* out */
  int64_t peak_bytes_in_use;  /* out */
  int64_t num_allocations;    /* out: live now */
  int64_t largest_allocation; /* out */
  int64_t bytes_limit;        /* out */
} FlagosDeviceMemoryStatsArgs;

/* Blocks until all work enqueued on the device before this call is done. */
typedef struct FlagosDeviceSynchronizeArgs {
  size_t struct_size;
  FlagosDevice* device;
} FlagosDeviceSynchronizeArgs;

/* ---- Events -------------------------------------------------------------------------------------------------------- */

typedef struct FlagosEventCreateArgs { /* an event that the host completes with event_set */
  size_t struct_size;
  FlagosContext* context;
  FlagosEvent* event; /* out */
} FlagosEventCreateArgs;

typedef struct FlagosEventSetArgs { /* at most once an event; a second call is FAILED_PRECONDITION */
  size_t struct_size;
  FlagosEvent* event;
  FlagosError* error; /* NULL, or taken over by the plugin */
} FlagosEventSetArgs;

typedef struct FlagosEventQueryArgs {
  size_t struct_size;
  FlagosEvent* event;
  int32_t is_ready; /* out: 1 also when it failed */
  int32_t reserved;
  FlagosError* error; /* out: NULL, or why it failed; the host's to destroy */
} FlagosEventQueryArgs;

typedef struct FlagosEventAwaitArgs { /* returns the event's error */
  size_t struct_size;
  FlagosEvent* event;
  int64_t timeout_ns; /* < 0: for ever; when it runs out: DEADLINE_EXCEEDED */
} FlagosEventAwaitArgs;

typedef struct FlagosEventOnReadyArgs {
  size_t struct_size;
  FlagosEvent* event; /* may be destroyed before the callback runs */
  FlagosEventCallback callback;
  void* user_data;
} FlagosEventOnReadyArgs;

/* ---- Buffers ------------------------------------------------------------------------------------------------------- */

/* How long host memory may be used. The numbers order the promises of the host from weakest to strongest. */
enum {
  FLAGOS_HOST_IMMUTABLE_ONLY_DURING_CALL = 0, /* copied before the call returns */
  FLAGOS_HOST_IMMUTABLE_UNTIL_TRANSFER = 1,   /* may be read until done_with_host completes */
  FLAGOS_HOST_IMMUTABLE_ZERO_COPY = 2,        /* may be aliased, never written; done_with_host completes at the end */
  FLAGOS_HOST_MUTABLE_ZERO_COPY = 3           /* may be aliased and written */
};

typedef struct FlagosBufferFromHostArgs {
  size_t struct_size;
  FlagosContext* context;
  FlagosMemory* memory;
  const void* data;
  const int64_t* dims;
  const int64_t* byte_strides; /* NULL: dense row major; may be 0 or negative */
  size_t rank;
  int32_t element_type;
  int32_t semantics;
  FlagosEvent* done_with_host; /* out */
  FlagosBuffer* buffer;        /* out */
} FlagosBufferFromHostArgs;

typedef struct FlagosBufferAllocateArgs { /* contents undefined, ready at once */
  size_t struct_size;
  FlagosContext* context;
  FlagosMemory* memory;
  const int64_t* dims;
  size_t rank;
  int32_t element_type;
  int32_t reserved;
  FlagosBuffer* buffer; /* out */
} FlagosBufferAllocateArgs;

typedef struct FlagosBufferViewArgs { /* memory that somebody else owns, dense row major, never copied */
  size_t struct_size;
  FlagosContext* context;
  FlagosMemory* memory;
  void* data;
  const int64_t* dims;
  size_t rank;
  int32_t element_type;
  int32_t writable; /* 1: an execution to which the buffer is donated may write its result there; 0: nobody writes */
  FlagosReleaseCallback release; /* may be NULL */
  void* release_user_data;
  FlagosBuffer* buffer; /* out */
} FlagosBufferViewArgs;

/* A buffer whose contents come later (buffer_fulfill) or never: error != NULL makes it failed from the start. */
typedef struct FlagosBufferPromiseArgs {
  size_t struct_size;
  FlagosContext* context;
  FlagosMemory* memory;
  const int64_t* dims;
  size_t rank;
  int32_t element_type;
  int32_t reserved;
  FlagosError* error;   /* NULL, or taken over by the plugin */
  FlagosBuffer* buffer; /* out */
} FlagosBufferPromiseArgs;

typedef struct FlagosBufferFulfillArgs { /* source's contents become promise's; same shape, type and memory; no copy */
  size_t struct_size;
  FlagosBuffer* promise;
  FlagosBuffer* source; /* NULL when error is set; usable as before */
  FlagosError* error;   /* NULL, or taken over by the plugin */
} FlagosBufferFulfillArgs;

typedef struct FlagosBufferDescribeArgs {
  size_t struct_size;
  FlagosBuffer* buffer;
  const int64_t* dims;  /* out: lives as long as the buffer */
  size_t rank;          /* out */
  size_t size_bytes;    /* out */
  FlagosDevice* device; /* out */
  FlagosMemory* memory; /* out */
  int32_t element_type; /* out */
  int32_t is_deleted;   /* out */
} FlagosBufferDescribeArgs;

typedef struct FlagosBufferReadyEventArgs {
  size_t struct_size;
  FlagosBuffer* buffer;
  FlagosEvent* event; /* out: the host destroys it */
} FlagosBufferReadyEventArgs;

/* Dense row-major copy to the host, or laid out by byte_strides. */
typedef struct FlagosBufferToHostArgs {
  size_t struct_size;
  FlagosBuffer* buffer;
  void* data; /* at least size bytes, valid until done */
  size_t size;
  const int64_t* byte_strides; /* NULL: dense row major */
  FlagosEvent* done;           /* out */
} FlagosBufferToHostArgs;

/* Raw bytes of [offset, offset + size). Writing is for buffers that the host itself allocated and nobody reads yet. */
typedef struct FlagosBufferReadRawArgs {
  size_t struct_size;
  FlagosBuffer* buffer;
  void* data;
  int64_t offset;
  int64_t size;
  FlagosEvent* done; /* out */
} FlagosBufferReadRawArgs;

typedef struct FlagosBufferWriteRawArgs {
  size_t struct_size;
  FlagosBuffer* buffer;
  const void* data; /* valid until done */
  int64_t offset;
  int64_t size;
  FlagosEvent* done; /* out */
} FlagosBufferWriteRawArgs;

typedef struct FlagosBufferCopyArgs { /* to any memory of the same context */
  size_t struct_size;
  FlagosBuffer* buffer;
  FlagosMemory* memory;
  FlagosBuffer* copy; /* out */
} FlagosBufferCopyArgs;

typedef struct FlagosBufferBitcastArgs { /* the same storage under another type and shape of equal byte size */
  size_t struct_size;
  FlagosBuffer* buffer;
  const int64_t* dims;
  size_t rank;
  int32_t element_type;
  int32_t reserved;
  FlagosBuffer* view; /* out */
} FlagosBufferBitcastArgs;

typedef struct FlagosBufferDeleteArgs { /* gives up the contents; enqueued work still sees them; idempotent */
  size_t struct_size;
  FlagosBuffer* buffer;
} FlagosBufferDeleteArgs;

/* Pins the storage for someone outside: while the count is not zero it is neither freed nor donated. */
typedef struct FlagosBufferHoldArgs {
  size_t struct_size;
  FlagosBuffer* buffer;
  int32_t delta; /* +1 or -1; below zero: INVALID_ARGUMENT */
  int32_t reserved;
} FlagosBufferHoldArgs;

typedef struct FlagosBufferPointerArgs {
  size_t struct_size;
  FlagosBuffer* buffer;
  void* pointer; /* out: device address */
  /* 0: waits until the contents are there. Else only until the work that makes them is in the device's order: for a host
     that puts its own work after it there. The same where the device has no such order, as host memory has none. */
  int32_t issued;
  int32_t reserved;
} FlagosBufferPointerArgs;

/* Moves the contents into a new buffer that is not ready before dependency; the old one is deleted. */
typedef struct FlagosBufferDonateArgs {
  size_t struct_size;
  FlagosBuffer* buffer;
  FlagosEvent* dependency; /* borrowed */
  FlagosBuffer* donated;   /* out */
} FlagosBufferDonateArgs;

/* ---- Executables --------------------------------------------------------------------------------------------------- */

typedef struct FlagosCompileArgs {
  size_t struct_size;
  FlagosContext* context;
  const void* program; /* serialized flagos.Program (proto/flagos.proto) */
  size_t program_size;
  FlagosExecutable* executable; /* out */
} FlagosCompileArgs;

typedef struct FlagosExecutableDescribeArgs {
  size_t struct_size;
  FlagosExecutable* executable;
  const char* name;                         /* out */
  const char* fingerprint;                  /* out: hex digest of program, options and backend */
  int64_t num_replicas;                     /* out */
  int64_t num_partitions;                   /* out */
  FlagosDevice* const* devices;             /* out: addressable, in order of execution arguments */
  size_t num_devices;                       /* out */
  const int64_t* device_assignment;         /* out: ids, [num_replicas][num_partitions] */
  size_t num_arguments;                     /* out */
  size_t num_outputs;                       /* out */
  const int32_t* output_types;              /* out: [num_outputs] */
  const int64_t* output_dims;               /* out: all outputs' dims one after another */
  const size_t* output_ranks;               /* out: [num_outputs] */
  const char* const* output_memory_kinds;   /* out: [num_outputs] */
  const char* const* argument_memory_kinds; /* out: [num_arguments] */
  const FlagosBytes* output_shardings;      /* out: serialized OpSharding each, or NULL: not sharded */
  const FlagosBytes* argument_shardings;    /* out: the same for arguments */
  const int64_t* argument_aliases;          /* out: [num_arguments], the output that may take over its storage, or -1 */
  size_t generated_code_bytes;              /* out */
  size_t argument_bytes;                    /* out: of one device */
  size_t output_bytes;                      /* out */
  size_t alias_bytes;                       /* out */
  size_t temporary_bytes;                   /* out */
  size_t peak_bytes;                        /* out */
  const FlagosNamedValue* cost_analysis;    /* out: "flops", "bytes accessed", ... */
  size_t num_cost_analysis;                 /* out */
} FlagosExecutableDescribeArgs;

/* Texts and bytes that are made on demand; handed to sink before the call returns. */
enum {
  FLAGOS_ARTIFACT_SERIALIZED = 0,        /* for executable_load, in the same backend build on the same kind of device */
  FLAGOS_ARTIFACT_OPTIMIZED_PROGRAM = 1, /* serialized flagos.Program after the passes */
  FLAGOS_ARTIFACT_EXPLANATION = 2,       /* UTF-8: what the program became, step by step */
  FLAGOS_ARTIFACT_COMPILE_OPTIONS = 3    /* the CompileOptionsProto it was compiled with */
};
typedef struct FlagosExecutableArtifactArgs {
  size_t struct_size;
  FlagosExecutable* executable;
  int32_t kind;
  int32_t reserved;
  FlagosBytesSink sink;
  void* sink_data;
} FlagosExecutableArtifactArgs;

typedef struct FlagosExecutableLoadArgs {
  size_t struct_size;
  FlagosContext* context;
  const void* serialized;
  size_t serialized_size;
  const int64_t* device_assignment; /* NULL: as serialized; else ids, [num_replicas][num_partitions] */
  size_t num_assigned;
  FlagosExecutable* executable; /* out */
} FlagosExecutableLoadArgs;

typedef struct FlagosExecuteArgs {
  size_t struct_size;
  FlagosExecutable* executable;
  size_t num_devices;
  size_t num_arguments;
  FlagosBuffer* const* const* arguments; /* [num_devices][num_arguments] */
  const int64_t* non_donatable;          /* arguments that must survive although the program may alias them */
  size_t num_non_donatable;
  FlagosDevice* device;          /* NULL: as compiled; else run a one-device program here */
  int64_t launch_id;             /* equal on all processes of one logical launch */
  FlagosBuffer** const* outputs; /* out: [num_devices][num_outputs] */
  FlagosEvent** done;            /* out: [num_devices], or NULL: not wanted */
} FlagosExecuteArgs;

/* ---- Profiler ------------------------------------------------------------------------------------------------------ */

typedef struct FlagosProfilerStartArgs {
  size_t struct_size;
  FlagosContext* context;
} FlagosProfilerStartArgs;

/* Chrome trace-event JSON of what ran since profiler_start; times are microseconds of the monotonic clock. */
typedef struct FlagosProfilerStopArgs {
  size_t struct_size;
  FlagosContext* context;
  FlagosBytesSink sink;
  void* sink_data;
} FlagosProfilerStopArgs;

/* ---- The table ----------------------------------------------------------------------------------------------------- */

/* Appended to, never reordered. Every slot within struct_size is callable. */
struct FlagosApi {
  size_t struct_size;
  uint32_t version;
  uint32_t reserved;

  FlagosError* (*error_create)(FlagosErrorCreateArgs* args);
  void (*error_destroy)(FlagosError* error);
  void (*error_describe)(FlagosErrorDescribeArgs* args);

  FlagosError* (*context_create)(FlagosContextCreateArgs* args);
  void (*context_destroy)(FlagosContext* context); /* after every buffer, event and executable of it */
  FlagosError* (*context_describe)(FlagosContextDescribeArgs* args);
  FlagosError* (*device_describe)(FlagosDeviceDescribeArgs* args);
  FlagosError* (*device_memory_stats)(FlagosDeviceMemoryStatsArgs* args);
  FlagosError* (*device_synchronize)(FlagosDeviceSynchronizeArgs* args);
  FlagosError* (*memory_describe)(FlagosMemoryDescribeArgs* args);

  FlagosError* (*event_create)(FlagosEventCreateArgs* args);
  void (*event_destroy)(FlagosEvent* event);
  FlagosError* (*event_set)(FlagosEventSetArgs* args);
  FlagosError* (*event_query)(FlagosEventQueryArgs* args);
  FlagosError* (*event_await)(FlagosEventAwaitArgs* args);
  FlagosError* (*event_on_ready)(FlagosEventOnReadyArgs* args);

  FlagosError* (*buffer_from_host)(FlagosBufferFromHostArgs* args);
  FlagosError* (*buffer_allocate)(FlagosBufferAllocateArgs* args);
  FlagosError* (*buffer_view)(FlagosBufferViewArgs* args);
  FlagosError* (*buffer_promise)(FlagosBufferPromiseArgs* args);
  FlagosError* (*buffer_fulfill)(FlagosBufferFulfillArgs* args);
  void (*buffer_destroy)(FlagosBuffer* buffer); /* enqueued work that reads it still completes */
  FlagosError* (*buffer_describe)(FlagosBufferDescribeArgs* args);
  FlagosError* (*buffer_ready_event)(FlagosBufferReadyEventArgs* args);
  FlagosError* (*buffer_to_host)(FlagosBufferToHostArgs* args);
  FlagosError* (*buffer_read_raw)(FlagosBufferReadRawArgs* args);
  FlagosError* (*buffer_write_raw)(FlagosBufferWriteRawArgs* args);
  FlagosError* (*buffer_copy)(FlagosBufferCopyArgs* args);
  FlagosError* (*buffer_bitcast)(FlagosBufferBitcastArgs* args);
  FlagosError* (*buffer_delete)(FlagosBufferDeleteArgs* args);
  FlagosError* (*buffer_hold)(FlagosBufferHoldArgs* args);
  FlagosError* (*buffer_pointer)(FlagosBufferPointerArgs* args);
  FlagosError* (*buffer_donate)(FlagosBufferDonateArgs* args);

  FlagosError* (*compile)(FlagosCompileArgs* args);
  FlagosError* (*executable_load)(FlagosExecutableLoadArgs* args);
  void (*executable_destroy)(FlagosExecutable* executable); /* launches in flight still complete */
  FlagosError* (*executable_describe)(FlagosExecutableDescribeArgs* args);
  FlagosError* (*executable_artifact)(FlagosExecutableArtifactArgs* args);
  FlagosError* (*execute)(FlagosExecuteArgs* args);

  FlagosError* (*profiler_start)(FlagosProfilerStartArgs* args);
  FlagosError* (*profiler_stop)(FlagosProfilerStopArgs* args);
};

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLAGOS_PLUGIN_ABI_H_ */
