/* What is read of a program: of flagos.Program (proto/flagos.proto) and the HLO in it (proto/xla.proto). A backend in C++ or
 * with protobuf's C library compiles those files instead. */
#ifndef PROGRAM_H_
#define PROGRAM_H_

#include <stddef.h>
#include <stdint.h>

#include "sample.h"

typedef struct Shape {
  int32_t element_type; /* FLAGOS_TYPE_..., or FLAGOS_TYPE_TUPLE, whose elements the instructions say */
  int64_t dims[MAX_RANK];
  size_t rank;
} Shape;

typedef struct Instruction {
  int64_t id;
  char opcode[32];
  Shape shape;
  int64_t parameter_number;
  int64_t tuple_index;
  int64_t* operands; /* ids */
  size_t num_operands;
  int64_t* dimensions; /* of a broadcast: where each of the operand's dimensions goes */
  size_t num_dimensions;
  int64_t lhs_contracting, rhs_contracting; /* of a dot; -1 without */
  int has_batch_dimensions;
  int64_t called; /* the computation of a call, or -1 */
  float* literal; /* of a constant */
  size_t literal_size;
} Instruction;

typedef struct Computation {
  int64_t id;
  int64_t root; /* an instruction's id */
  Instruction* instructions;
  size_t num_instructions;
} Computation;

typedef struct Program {
  char name[64];
  Computation* computations;
  size_t num_computations;
  int64_t entry; /* a computation's id */
} Program;

/* Reads a serialized flagos.Program. INVALID_ARGUMENT for bytes that are none. *out is what program_destroy frees. */
FlagosError* program_read(const void* bytes, size_t size, Program** out);
void program_destroy(Program* program);

/* NULL where there is none of that id. */
const Computation* program_computation(const Program* program, int64_t id);
const Instruction* computation_instruction(const Computation* computation, int64_t id);

#endif /* PROGRAM_H_ */
