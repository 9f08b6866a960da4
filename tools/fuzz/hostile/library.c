/* A shared library with one of each thing that the reader of ELF files looks at: compiled in several ways. */
#include <stdio.h>

int flagos_plugin_entry(void* args) { return args != 0 && printf("%p\n", args) > 0; }

#ifdef CONSTRUCTOR
static int constructed;
__attribute__((constructor)) static void construct(void) { constructed = 1; }
#endif

#ifdef RESOLVER
static int direct(void) { return 7; }
static void* resolve(void) { return (void*)direct; }
int indirect(void) __attribute__((ifunc("resolve")));
int call_indirect(void) { return indirect(); }
#endif

#ifdef DEPENDS
extern int dependency(void);
int call_dependency(void) { return dependency(); }
#endif

#ifdef DEPENDENCY
int dependency(void) { return 7; }
#endif
