/* How the PJRT adapter asks its host to turn a framework's program into a serialized flagos.Program.
 *
 * The host passes the function's address as the integer client option "flagos_converter". */
#ifndef FLAGOS_PJRT_CONVERTER_H_
#define FLAGOS_PJRT_CONVERTER_H_

#include "flagos/plugin_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* format is "mlir" (a StableHLO portable artifact, or StableHLO text) or "hlo" (a serialized xla.HloModuleProto);
 * compile_options is a serialized xla.CompileOptionsProto. Returns FLAGOS_OK after giving sink the serialized
 * flagos.Program, or another status code after giving it a UTF-8 message. Calls sink at least once before it returns; the
 * last call counts, as what ends a conversion may come when it has given its answer. May be called from any thread,
 * several at once. user_data is NULL. */
typedef int32_t (*FlagosGraphConverter)(void* user_data, const char* format, size_t format_size, const void* code,
                                        size_t code_size, const void* compile_options, size_t compile_options_size,
                                        FlagosBytesSink sink, void* sink_data);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLAGOS_PJRT_CONVERTER_H_ */
