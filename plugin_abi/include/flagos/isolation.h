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

/* The entry of a backend that `command` serves: a program and its arguments, to which the number of the child's socket is
 * added. Each client (context_create) has a child of its own, of which the first is started by the entry; a child may take
 * `timeout_ms` to answer. The strings are copied. NULL when this process has 16 of them already. */
FlagosPluginEntry FlagosIsolate(const char* const* command, size_t num_words, int32_t timeout_ms);

/* Serves a table to the host at the other end of `socket`, until it ends; never returns. `version` is that of the table.
 * With `refusal` not NULL there is no table: the host is told why. */
void FlagosServe(int32_t socket, const FlagosApi* api, uint32_t version, const FlagosPluginInfo* info,
                 const char* refusal);

#ifdef __cplusplus
}
#endif

#endif /* FLAGOS_ISOLATION_H_ */
