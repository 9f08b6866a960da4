// Looking for something for a moment before sleeping: a thread that sleeps takes some tens of microseconds to wake.
#ifndef FLAGOS_NATIVE_SPIN_H_
#define FLAGOS_NATIVE_SPIN_H_

#include <chrono>

namespace flagos {

// Tells the processor that this thread waits in a loop.
inline void Pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `condition` came true within `patience`.
template <class Condition>
bool ComesSoon(const Condition& condition, std::chrono::microseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  do {
    for (int i = 0; i < 16; ++i) {
      if (condition()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace flagos

#endif  // FLAGOS_NATIVE_SPIN_H_
