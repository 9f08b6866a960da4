// __x86_get_cpuid_feature_leaf, behind <sys/platform/x86.h>, is from glibc 2.33. Where the system's glibc has it, it is
// asked, because it knows what GLIBC_TUNABLES switches off; elsewhere the processor is.

#if defined(__x86_64__)

#include <cpuid.h>
#include <dlfcn.h>
#include <sys/platform/x86.h>

namespace {

// What the system saves of a thread's registers (Intel SDM, volume 1, 13.3): XMM and YMM; opmask and ZMM as well.
constexpr unsigned int kYmmState = 0x6, kZmmState = 0xe6;

unsigned int SavedState() {
  unsigned int low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

struct Leaves {
  cpuid_feature leaf[CPUID_INDEX_80000001 + 1] = {};

  Leaves() {
    unsigned int a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const unsigned int saved = (c & bit_OSXSAVE) != 0 ? SavedState() : 0;
    const bool ymm = (saved & kYmmState) == kYmmState, zmm = (saved & kZmmState) == kZmmState;
    Set(CPUID_INDEX_1, a, b, ymm ? c : c & ~(bit_AVX | bit_FMA | bit_F16C), d);
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
      if (!ymm) b &= ~bit_AVX2;
      if (!zmm) b &= ~(bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL);
      if (!zmm) c &= ~bit_AVX512VNNI;
      Set(CPUID_INDEX_7, a, b, c, d);
    }
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) Set(CPUID_INDEX_80000001, a, b, c, d);
  }

  void Set(unsigned int index, unsigned int a, unsigned int b, unsigned int c, unsigned int d) {
    leaf[index] = {{a, b, c, d}, {a, b, c, d}};
  }
};

}  // namespace

extern "C" const cpuid_feature* __x86_get_cpuid_feature_leaf(unsigned int index) noexcept {
  using Ask = const cpuid_feature* (*)(unsigned int);
  static const Ask system = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "__x86_get_cpuid_feature_leaf"));
  if (system != nullptr) return system(index);
  static const Leaves leaves;
  static const cpuid_feature nothing = {};
  return index <= CPUID_INDEX_80000001 ? &leaves.leaf[index] : &nothing;
}

#endif
