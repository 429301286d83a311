/* An allocator in the place of the C library's that knows whether a signal handler has used it, and whether it was interrupted
   by one. It can be made slow, so that it is interrupted often. */
#ifndef WATCHED_ALLOCATOR_H
#define WATCHED_ALLOCATOR_H
#include <stddef.h>

/* Of this thread: whether it is in the allocator, and in the handler; whether the handler has used the allocator; how long a
   use takes. The handler alone sets `uses`. */
#define OWN static __thread volatile int __attribute__((tls_model("initial-exec"), unused))
OWN in_allocator, in_handler, uses, slow;
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void*, size_t), *__libc_memalign(size_t, size_t);
void __libc_free(void*);

static void enter_allocator(void) {
  if (in_handler) uses = 1; /* Who is interrupted here writes nothing that the handler has written meanwhile. */
  in_allocator++;
  if (!in_handler)
    for (volatile int i = 0; i < slow; i++) continue;
}

#define ALLOCATED(call)                       \
  {                                           \
    enter_allocator();                        \
    void* memory = call;                      \
    in_allocator--;                           \
    return memory;                            \
  }
void* malloc(size_t bytes) ALLOCATED(__libc_malloc(bytes))
void* calloc(size_t count, size_t bytes) ALLOCATED(__libc_calloc(count, bytes))
void* realloc(void* old, size_t bytes) ALLOCATED(__libc_realloc(old, bytes))
void* aligned_alloc(size_t alignment, size_t bytes) ALLOCATED(__libc_memalign(alignment, bytes))

int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  *memory = aligned_alloc(alignment, bytes);
  return *memory == NULL ? 12 : 0;
}

void free(void* memory) {
  enter_allocator();
  __libc_free(memory);
  in_allocator--;
}
#endif
