// Compares the same bytes of a graph's node in three captures, each with temporaries in memory of its own: which words are
// addresses of arrays, and whether anything else depends on where the arrays lay.
#ifndef FLAGOS_NATIVE_CUDA_COMPARISON_H_
#define FLAGOS_NATIVE_CUDA_COMPARISON_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "replay.h"

namespace flagos::cuda {

// What a word of a node is in every capture of its plan. `number`, `offset`: of an array, the bytes into it; of a
// condition, which conditional node it sets.
struct Known {
  enum class Kind : uint8_t { kEqual, kArray, kOwned, kCondition, kLeftOver };
  Kind kind;
  uint64_t first;  // what it was in the first capture
  size_t number = 0;
  uint64_t offset = 0;
};

// The same eight bytes of a node in each capture.
struct Word {
  uint64_t first = 0, second = 0, third = 0;
};

// The same bytes of a node in each capture.
struct Bytes {
  const unsigned char *first, *second, *third;
  size_t size;

  // Zeros past the end.
  Word At(size_t begin) const noexcept;
};

// The addresses of this process.
class AddressSpace {
 public:
  AddressSpace();
  // Whether the host reads and writes there: on a stack or a heap.
  bool HasOfHost(uint64_t address) const noexcept;
  // Whether there are addresses with this upper half, among those that a device's memory has too; zero counts.
  bool HasUpper(uint64_t half) const noexcept;

 private:
  std::vector<Captures::Range> mapped_, written_;
};

// How the arrays moved between the first and the second capture.
struct Moves {
  explicit Moves(const std::vector<Captures::Array>& arrays) noexcept;
  // Whether the address of an array, or the distance of two, changes by so much, in bytes or in elements.
  bool Has(int64_t change) const noexcept;
  // Whether no change of a number below `bound` is that of a distance of arrays, in elements of any size, or of what is
  // left of an address after a division by a power of two.
  bool AreBeyond(int64_t bound) const noexcept;

  int64_t divisor = 0, largest = 0;
};

// What may stand where the captures differ.
class Comparison {
 public:
  // `captures` outlives this object; each has as many conditional nodes.
  explicit Comparison(const Captures& captures) : moves_(captures.arrays), captures_(captures) {}

  // Adds what is known of each word. Throws Failure(UNIMPLEMENTED) that names `what` of which node, and the word, for
  // what cannot be patched.
  void Compare(const Bytes& bytes, const char* what, size_t node, std::vector<Known>& known) const;

 private:
  bool IsInArray(const Word& word, size_t* number, uint64_t* offset) const noexcept;
  bool IsOwned(const Word& word) const noexcept;
  // What one conditional node is set by, which is another one in each capture. Where two captures had the same, a word
  // that follows the arrays could not be told from it.
  bool IsCondition(const Word& word, size_t* number) const noexcept;
  // Structures are handed over with what the stack held where nobody wrote: padding, dimensions that are not there. Such
  // words change though nothing moved, are addresses of the host's memory, or have halves that do not follow from where
  // the arrays are. `straddling`: the bytes from the middle of the word on.
  bool IsLeftOver(const Word& word, const Word& straddling) const noexcept;
  // Whether memory of the captures' own moved by so much between the first and the third, in bytes or in elements: then
  // the word may be a distance from it to an array.
  bool IsShift(uint64_t change) const noexcept;
  // An address of which the highest bytes, which are zero in all addresses, were written with something else.
  bool IsOverwrittenAddress(const Word& word) const noexcept;
  // A half that does not follow from where the arrays are: equal, half of an address, or changed by something else, if
  // one of them is at least `least`.
  bool IsLeftOverHalf(uint64_t first, uint64_t second, uint64_t least) const noexcept;
  // Half of an address inside memory of the first capture's own, and of `other`'s: the lower, or the upper.
  bool IsEqualOrOwnedHalf(const Captures::Graph& other, uint64_t first, uint64_t half) const noexcept;
  // Half of an address inside an array.
  bool IsHalfInArray(uint64_t first, uint64_t second) const noexcept;

  const AddressSpace space_;
  const Moves moves_;
  const Captures& captures_;
};

}  // namespace flagos::cuda

#endif  // FLAGOS_NATIVE_CUDA_COMPARISON_H_
