#ifndef FLAGOS_NATIVE_CPU_RUN_LOOP_H_
#define FLAGOS_NATIVE_CPU_RUN_LOOP_H_

#include "cpu/native_program.h"

namespace flagos::cpu {

// slots: base address of every buffer of the program.
void RunLoop(const Loop& loop, char* const* slots);
void RunBoxLoop(const Loop& loop, char* const* slots);
void RunColumnLoop(const Loop& loop, char* const* slots);
void RunRowLoop(const RowLoop& loop, char* const* slots);
void RunRowBlockLoop(const RowLoop& loop, char* const* slots);
void RunScalarLoop(const ScalarLoop& loop, char* const* slots);
void RunGather(const GatherWindows& gather, char* const* slots);
void RunArgMinMax(const ArgMinMax& step, char* const* slots);
void RunScatter(const ScatterWindows& scatter, char* const* slots);
void RunTopK(const TopK& top_k, char* const* slots);
void RunComplexArithmetic(const ComplexArithmetic& step, char* const* slots);
void RunMatrixProduct(const MatrixProduct& product, char* const* slots);

// Makes tiles boxes where that is better for a loop over points. elements: what a tile holds at most; streams: some
// output is written around the caches if they are not.
void ChooseBox(Loop& loop, int64_t elements, bool streams);

// Cuts a loop that reduces columns, of so many points, into blocks and segments.
void PlanColumns(Loop& loop, int64_t points);

// Chooses the blocks of a loop that is in blocks, of at most so many elements if a row has no more.
void ChooseBlock(RowLoop& loop, int64_t elements);

// Whether a loop is one that MakeScalarLoop takes: over a single point, without reductions.
bool IsScalar(const Loop& loop);
ScalarLoop MakeScalarLoop(const Loop& loop);

// An index of an integer type, as which anything else is read as s64; a u64 beyond s64 is the greatest s64.
int64_t ReadIndex(const char* from, Type type);

// How to find the top k of a type; nullptr for a number that is no type.
TopKFunction TopKFunctionOf(Type type);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_RUN_LOOP_H_
