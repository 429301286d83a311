/* Providers of whole collectives: what a library has to export for Strata to have it carry calls out.
 *
 * STRATA_PROVIDERS=/path/libfoo.so loads the library on all ranks. It is chosen by the algorithm provider:NAME, wherever algorithms
 * are named: STRATA_ALLREDUCE_ALGO, algSelection, a tuning table. All ranks of a communicator have a provider or none has it.
 * examples/provider has one.
 *
 * Order. For each communicator Strata calls open, then connect until that is done, then most_bytes for each kind of call, then start
 * and test as often as it likes, then close. All ranks make the same calls in the same order. One call is under way at a time. Functions are called by
 * one thread at a time for one handle, not always by the same one; for different handles at once.
 *
 * Waiting. No function waits for other ranks: connect and test are called again and again.
 *
 * Errors. Functions that return an int return 0 for success; any other number is an error, and they may write why, a text that ends
 * with a zero byte, into STRATA_PROVIDER_TEXT_BYTES bytes at `why`. An error of open or connect leaves the provider out on all ranks.
 * An error of start or test fails the communicator on all ranks; abort and close follow.
 *
 * Copyright and license: as of Strata. */
#ifndef STRATA_PLUGIN_H
#define STRATA_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the table. It changes whenever anything changes but for what is added at the end of a structure. */
#define STRATA_PROVIDER_VERSION 2
/* The longest blob that open may write. */
#define STRATA_PROVIDER_BLOB_BYTES 4096
/* The room at `why`. */
#define STRATA_PROVIDER_TEXT_BYTES 256

/* Collectives. Types are ncclDataType_t's numbers, and strataInt16 and strataUint16 of strata.h. Operations are ncclRedOp_t's
 * ncclSum, ncclProd, ncclMax and ncclMin, and strataBitAnd, strataBitOr and strataBitXor; -1 where data only moves. An average is a
 * sum, which Strata divides. */
enum {
  STRATA_ALL_REDUCE = 0,
  STRATA_ALL_GATHER = 1,
  STRATA_REDUCE_SCATTER = 2,
  STRATA_BROADCAST = 3,
  STRATA_REDUCE = 4,
  STRATA_ALL_TO_ALL = 5,
  STRATA_GATHER = 6,
  STRATA_SCATTER = 7
};

/* A rank of a communicator that is being made. */
typedef struct strata_provider_site {
  uint32_t size;        /* bytes of this structure */
  int32_t rank;         /* this rank */
  int32_t nranks;       /* how many there are */
  int32_t nnodes;       /* on how many nodes */
  const int32_t *nodes; /* the node of each rank; valid until open returns */
} strata_provider_site;

/* One rank's part of a call. Memory is the host's.
 *
 * send: what NCCL's function of that name sends: one block (all-gather, gather, all-reduce, reduce), nranks blocks (reduce-scatter,
 * all-to-all, a scatter's root). recv likewise. NULL where the rank has none. A broadcast has one buffer, recv, which the root has
 * filled; send is recv there and NULL elsewhere.
 *
 * in_place is 1 where the two overlap as NCCL has it: send is recv (all-reduce, a reduce's root), send is block `rank` of recv
 * (all-gather, a gather's root), recv is block `rank` of send (reduce-scatter, a scatter's root). It may differ from rank to rank.
 *
 * Even and uneven calls. In an even call all blocks have `count` elements and follow one another, and all lists are NULL. In an uneven
 * call (strataAllGatherV and its like: all-gather, reduce-scatter, all-to-all, gather, scatter) blocks differ in size: send_counts[i] is
 * how many elements block i of send has, which may be none, and send_places[i] where it begins, in elements from send; recv_counts
 * and recv_places likewise. Such lists have an entry for each block of the buffer, so nranks or one, and are NULL where the rank has
 * no such buffer; count is 0. At least one list is there on each rank, so all ranks know which of the two a call is. Places are each
 * rank's own: there may be gaps between blocks, and their order may be any. Of an all-gather and a reduce-scatter all ranks have the
 * same counts. Of the others each rank has its own only: a block has as many elements where it is sent as where it is received. */
typedef struct strata_provider_call {
  uint32_t size; /* bytes of this structure */
  int32_t collective;
  int32_t dtype;
  int32_t op;
  int32_t root;
  int32_t in_place;
  const void *send;
  void *recv;
  uint64_t count;
  uint64_t elem_bytes; /* bytes of an element */
  const uint64_t *send_counts;
  const uint64_t *send_places;
  const uint64_t *recv_counts;
  const uint64_t *recv_places;
} strata_provider_call;

typedef struct strata_provider {
  uint32_t version; /* STRATA_PROVIDER_VERSION */
  uint32_t size;    /* sizeof(strata_provider) */
  /* Up to 32 letters, digits and _; the same on all ranks; not mpi. */
  const char *name;

  /* Makes the handle of a rank. Writes what the others have to know of it, an address say, to blob, which has *blob_bytes bytes, and
   * how many it wrote to *blob_bytes. After an error there is no handle. */
  int (*open)(const strata_provider_site *site, void **handle, void *blob, size_t *blob_bytes, char *why);

  /* Has what each rank wrote, in rank order, each time. Sets *done to 1 when this rank can carry calls out; else it is called again,
   * until STRATA_BOOTSTRAP_TIMEOUT_MS is over or another rank has failed. All ranks call it, or none does. */
  int (*connect)(void *handle, const void *const *blobs, const size_t *blob_bytes, int *done, char *why);

  /* How much this rank can carry out of such calls, in bytes; 0 for none. Of even calls the longest block; of uneven ones the most
   * that all blocks of a buffer may have together. The least of all ranks counts. Calls that are not taken go by Strata's own
   * algorithms, or are refused where they name the provider themselves. Where no rank knows all blocks, in an uneven all-to-all, gather
   * or scatter, a rank with more than that fails the communicator. */
  uint64_t (*most_bytes)(void *handle, int collective, int dtype, int op, int uneven);

  /* Begins a call. The structure is valid until start returns, buffers and lists until test has told the end or abort has returned.
   * *request is what test gets. An error means that nothing was begun. */
  int (*start)(void *handle, const strata_provider_call *call, void **request, char *why);

  /* Makes progress. Sets *done to 1 when recv has the result and send may be written; the request is over then, as it is after an
   * error. */
  int (*test)(void *handle, void *request, int *done, char *why);

  /* Gives up what is under way: no buffer is touched any more when it returns. Nothing but close follows. */
  void (*abort)(void *handle);

  /* Frees the handle. Other ranks may still need what this one has sent. */
  void (*close)(void *handle);
} strata_provider;

/* The one function that a library exports. The table stays valid. */
const strata_provider *strata_provider_plugin(void);

#ifdef __cplusplus
}
#endif
#endif
