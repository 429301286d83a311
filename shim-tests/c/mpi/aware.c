/* Makes an MPI one that takes addresses in the soft GPU's memory, by standing in front of it: MPI_Isend and MPI_Irecv find
 * what is at such an address where the soft GPU keeps it. AWARE_SEEN is a file to which a line is added for each. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int MPIX_Query_cuda_support(void) { return 1; }
int MPIX_Query_rocm_support(void) { return 1; }

static void* found(const void* address, const char* what) {
  static void* (*host_address)(unsigned long long);
  if (!host_address) host_address = (void* (*)(unsigned long long))dlsym(RTLD_DEFAULT, "softgpuHostAddress");
  void* there = host_address ? host_address((unsigned long long)address) : NULL;
  if (!there) return (void*)address;
  FILE* seen = getenv("AWARE_SEEN") ? fopen(getenv("AWARE_SEEN"), "a") : NULL;
  if (seen) {
    fprintf(seen, "%s\n", what);
    fclose(seen);
  }
  return there;
}

int MPI_Isend(const void* buffer, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  return PMPI_Isend(found(buffer, "send"), count, type, to, tag, comm, request);
}

int MPI_Irecv(void* buffer, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request* request) {
  return PMPI_Irecv(found(buffer, "receive"), count, type, from, tag, comm, request);
}
