/* The table of functions by which the library calls a plugin for MPI: plugins/mpi/src/vtable.rs in C. */
#ifndef TABLE_H
#define TABLE_H

#include <stddef.h>
#include <stdint.h>

enum { TABLE_VERSION = 7 };

struct world { int32_t state, thread_level, rank, size, device_memory; };
struct ended { uint32_t index; int32_t error, source, cancelled; uint64_t bytes; };
struct collective {
  int32_t what, element, operation, root, in_place;
  const void* send;
  void* recv;
  uint64_t count;
  const int *send_counts, *send_places, *recv_counts, *recv_places;
};
struct table {
  uint32_t version, size;
  int (*describe)(char*, size_t);
  int (*look)(struct world*);
  int (*init)(void);
  int (*barrier)(void);
  int (*finalize)(void);
  int (*at_finalize)(void (*)(void));
  int (*comm_create)(const int*, int, int, uint64_t*);
  int (*comm_free)(uint64_t);
  int (*isend)(uint64_t, const void*, uint64_t, int, int, uint64_t*);
  int (*irecv)(uint64_t, void*, uint64_t, int, int, uint64_t*);
  int (*test_some)(uint64_t*, size_t, struct ended*, size_t*);
  int (*cancel)(uint64_t);
  int (*collective)(uint64_t, const struct collective*, uint64_t*);
  int (*error_text)(int, char*, size_t);
};

#endif
