/* A backend in a process of its own, behind the same entry and table as one in this process (docs/isolation.md).
 *
 * libflagos_isolation.so exports both functions. A host calls FlagosIsolate and then the entry that it gets, as it would
 * call a library's; the child that the entry starts loads a library, checked as the child sees fit, and calls FlagosServe.
 */
#ifndef FLAGOS_ISOLATION_H_
#define FLAGOS_ISOLATION_H_

#include "flagos/plugin_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct FlagosIsolateArgs {
  size_t struct_size;
  /* A program and its arguments, to which the number of the child's socket is added. */
  const char* const* command;
  size_t num_words;
  /* The variables that the child has of this process: names, or what names begin with and "*". NULL: all. */
  const char* const* environment;
  size_t num_environment;
  int32_t start_ms;   /* how long a child may take to greet its host */
  int32_t silence_ms; /* how long it may give no sign of life, which it gives each second; 0: for ever */
  int32_t hang_ms;    /* how long it may leave a call unanswered, or complete nothing of what it owes; 0: for ever */
} FlagosIsolateArgs;

/* The entry of a backend that a command serves. Each client (context_create) has a child of its own, of which the first is
 * started by the entry. What `args` points to is copied. NULL when this process has 64 of them already. */
FlagosPluginEntry FlagosIsolate(const FlagosIsolateArgs* args);

/* Serves a table to the host at the other end of `socket`, until it ends; never returns. `version` is that of the table.
 * With `refusal` not NULL there is no table: the host is told why. */
void FlagosServe(int32_t socket, const FlagosApi* api, uint32_t version, const FlagosPluginInfo* info,
                 const char* refusal);

#ifdef __cplusplus
}
#endif

#endif /* FLAGOS_ISOLATION_H_ */
