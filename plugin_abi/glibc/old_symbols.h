// Included before everything else in every native source: binds functions to the versions that glibc 2.28 has of them
// (manylinux_2_28), so that a library built on a newer system loads on an older one. A linker takes the newest version
// otherwise. What a newer libc or libstdc++ put into headers is in new_symbols.cc. tests/unit/packaging names a symbol
// that is too new.
#ifndef FLAGOS_GLIBC_OLD_SYMBOLS_H_
#define FLAGOS_GLIBC_OLD_SYMBOLS_H_

#ifdef __cplusplus
#include <bits/c++config.h>
#endif

#if defined(__x86_64__)

// Moved from libpthread and libdl into libc by glibc 2.34.
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
__asm__(".symver dlclose,dlclose@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver pthread_getcpuclockid,pthread_getcpuclockid@GLIBC_2.2.5");
__asm__(".symver pthread_getname_np,pthread_getname_np@GLIBC_2.12");
__asm__(".symver pthread_mutex_trylock,pthread_mutex_trylock@GLIBC_2.2.5");
__asm__(".symver pthread_once,pthread_once@GLIBC_2.2.5");
__asm__(".symver pthread_setaffinity_np,pthread_setaffinity_np@GLIBC_2.3.4");
__asm__(".symver pthread_sigmask,pthread_sigmask@GLIBC_2.2.5");
__asm__(".symver pthread_setname_np,pthread_setname_np@GLIBC_2.12");
// glibc 2.29 made versions of these that do not call a program's own `matherr`. The values are the same.
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver log2,log2@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");

// libstdc++ waits with pthread_cond_clockwait where it may, which is from glibc 2.30.
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT

#endif

#endif
