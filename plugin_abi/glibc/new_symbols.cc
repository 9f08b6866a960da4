// What headers of a newer glibc or libstdc++ refer to and those of manylinux_2_28 (glibc 2.28, GCC 8) do not have. Each
// library has its own copy and exports none.

#include <dlfcn.h>
#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <new>

#if defined(__x86_64__)

// glibc 2.32. libstdc++ counts references without atomic instructions where it is not 0.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}

#if defined(__GLIBCXX__)
namespace std {

#if _GLIBCXX_RELEASE >= 11
// GLIBCXX_3.4.29
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
#endif

#if _GLIBCXX_RELEASE >= 12
// GLIBCXX_3.4.30, which lets a cancelled thread leave.
void condition_variable::wait(unique_lock<mutex>& lock) {
  pthread_cond_wait(native_handle(), lock.mutex()->native_handle());
}
#endif

}  // namespace std
#endif

#endif
