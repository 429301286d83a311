/* A stand-in for a vendor's NCCL, for tests on machines without GPUs: every function, on host memory, as simply as can
 * be, or on the streams and memory of the soft GPU where the program uses that. Ranks may be processes or share one. What a test needs to see it writes down (record.c).
 *
 * DOUBLE_VERSION is the release it plays, as NCCL_VERSION_CODE; with DOUBLE_RCCL it plays RCCL of that level.
 * The environment: DOUBLE_RECORD (prefix of the files to write down calls in), DOUBLE_TIMEOUT_S (how long a rank waits
 * for its peers, 60), DOUBLE_DELAY_MS (how long making a communicator in the background takes at least). */
#ifndef DOUBLE_H
#define DOUBLE_H

#ifndef DOUBLE_VERSION
#define DOUBLE_VERSION 23203
#endif

#pragma GCC visibility push(default)
#include <nccl.h>
#pragma GCC visibility pop
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* A public function: as in NVIDIA's build the body is pncclX and ncclX a weak alias; RCCL's has no pncclX. Calls of
 * ncclX go through the PLT either way, so a library in front of this one sees them. */
#define EXPORT __attribute__((visibility("default")))
#ifdef DOUBLE_RCCL
#define API(type, name, ...) EXPORT type name(__VA_ARGS__)
#else
#define API(type, name, ...)                                                  \
  EXPORT extern __typeof__(name) name __attribute__((weak, alias("p" #name))); \
  EXPORT type p##name(__VA_ARGS__)
#endif

#define MAX_RANKS 64
#define TYPES (DOUBLE_VERSION >= 22403 ? 12 : 10)

/* ---- boards (board.c): memory that all ranks of a communicator share ---- */

enum { DATA, CONTROL, TRACKS }; /* Operations take turns on one track, making communicators on the other. */

/* What a rank tells the others at its turn. */
struct post {
  uint32_t func, type, op, root;
  uint64_t count, send, scalar;
  int color, key;
  int has_id;
  ncclUniqueId id;
};

struct seat {
  _Atomic uint32_t claimed, gone;
  _Atomic int pid;
  _Atomic uint64_t turn[TRACKS]; /* Odd: posted; even: has read all posts of the turn. */
  struct post post[TRACKS];
};

#define LETTERS 8
struct letter {
  uint64_t address, bytes;
};

/* Messages from one rank to another. */
struct mail {
  _Atomic uint64_t posted, taken;
  struct letter letters[LETTERS];
};

struct board {
  _Atomic uint32_t bell, waiters, attached, nranks;
  _Atomic uint32_t broken; /* 1 + the rank that gave up. */
  struct seat seats[MAX_RANKS];
  struct mail mail[MAX_RANKS][MAX_RANKS]; /* [from][to] */
};

/* A wait in progress. */
struct waiting {
  uint32_t bell;
  unsigned spins;
  double since, looked;
};

struct board* board_open(uint64_t id);
void board_close(struct board* board);
void board_forget(uint64_t id);
void board_ring(struct board* board);
ncclResult_t board_take_seat(ncclComm_t comm);
void wait_begin(ncclComm_t comm, struct waiting* waiting);
void wait_look(ncclComm_t comm, struct waiting* waiting);
ncclResult_t wait_step(ncclComm_t comm, struct waiting* waiting, int missing);
ncclResult_t turn_post(ncclComm_t comm, int track, const struct post* post);
ncclResult_t turn_finish(ncclComm_t comm, int track);
ncclResult_t read_peer(ncclComm_t comm, int rank, uint64_t address, void* into, size_t bytes);
ncclResult_t broke(ncclComm_t comm, ncclResult_t result);

/* ---- communicators (comm.c, jobs.c) ---- */

#define COMM_MAGIC 0x0d0b1e0c0de0aa55ull

struct redop {
  int used;
  ncclDataType_t type;
  ncclScalarResidence_t residence;
  uint64_t scalar;     /* ncclScalarHostImmediate */
  const void* pointer; /* ncclScalarDevice */
};

/* A registration or a window. */
struct entry {
  struct entry* next;
  void* buffer;
  size_t bytes;
  int is_window;
};

#define SHRINKS 16

struct ncclComm {
  uint64_t start_magic;
  struct board* board;
  uint64_t id;
  int nranks, rank, device, number;
  int blocking;
  char name[48];
  const struct ncclComm* maker; /* What it is being made out of; whoever aborts that gives this up, too. */
  uint64_t turn[TRACKS];
  struct {
    uint64_t list;
    unsigned times;
  } shrinks[SHRINKS];
  _Atomic int state; /* an ncclResult_t */
  _Atomic int aborted, revoked, suspended, finalized;
  _Atomic int users;   /* operations and jobs that still need this */
  _Atomic int running; /* operations that a stream of the soft GPU has begun: they go on when its context ends */
  struct redop* redops;
  int redop_count;
  struct entry* entries;
  void* last; /* on the soft GPU: an event behind the last operation, whatever its stream */
  void* profiled; /* what the profiler plugin knows it by */
  void* context; /* in which that was, of CUDA's */
  uint64_t end_magic;
};

enum job_kind { JOB_INIT, JOB_SPLIT, JOB_GROW };

/* A communicator in the making. */
struct job {
  struct ncclComm* comm; /* the new one */
  struct ncclComm* parent;
  enum job_kind kind;
  struct post post; /* what JOB_SPLIT and JOB_GROW tell the other ranks of the parent */
  int background;
  ncclComm_t* out;
  int late; /* *out is written when all is done, as ncclCommSplit does */
  ncclResult_t result;
};

ncclResult_t comm_check(ncclComm_t comm);
ncclResult_t comm_ready(ncclComm_t comm);
int is_named_by(const struct ncclComm* comm, const char* variable);
ncclResult_t config_check(const ncclConfig_t* config);
struct ncclComm* comm_new(const ncclConfig_t* config, const struct ncclComm* parent);
void comm_free(struct ncclComm* comm);
uint64_t id_of(const ncclUniqueId* id);
ncclResult_t make_id(ncclUniqueId* id);
ncclResult_t shrunk_id(struct ncclComm* parent, uint64_t list, uint64_t* id);
ncclResult_t job_submit(const struct job* job);
ncclResult_t job_launch(const struct job* job);
void job_run(struct job* job);
void job_drop(const struct job* job);

/* ---- operations (ops.c, reduce.c) and groups (group.c) ---- */

enum func {
  ALL_REDUCE = 1, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV
};

enum { OP_PRE_MUL_SUM = 5 }; /* All operations that a program made are this one, each with its scalar. */

struct op {
  const char* name;
  enum func func;
  const void* send;
  void* recv;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int root; /* or the peer */
  ncclComm_t comm;
  cudaStream_t stream;
  const void* bias; /* what ncclAllReduceWithBias adds */
  struct redop redop;
  void* result; /* what goes to recv when the whole group has read its inputs */
  size_t result_bytes;
  uint64_t letter; /* a message's number among those to or from the peer */
  int stage;
  uint64_t tag; /* what the call's configuration says for profilers */
};

size_t type_size(ncclDataType_t type);
const char* type_name(ncclDataType_t type);
void reduce_premultiply(void* data, size_t count, ncclDataType_t type, uint64_t scalar);
void reduce_combine(void* into, const void* from, size_t count, ncclDataType_t type, int op);
void reduce_divide(void* data, size_t count, ncclDataType_t type, int by);

int func_reduces(enum func func);
int func_has_root(enum func func);
int op_in_place(const struct op* op);
ncclResult_t op_check(struct op* op);
ncclResult_t op_alone(struct op* op);
ncclResult_t ops_run(struct op** ops, size_t count);
void op_deliver(struct op* op);
ncclResult_t submit_op(const char* name, struct op op);

ncclResult_t group_start(void);
ncclResult_t group_end(void);
ncclResult_t group_drop(void);
int group_simulate(void);
ncclResult_t group_add_op(struct op* op);
ncclResult_t group_take_job(const struct job* job);
void group_fail(ncclResult_t result);
int group_depth(void);
int group_uses(ncclComm_t comm);

/* ---- the soft GPU (gpu.c) ---- */

int gpu_present(void);
void* gpu_memory(const void* address);
int gpu_device(void);
int gpu_allocate(void** memory, size_t bytes);
int gpu_free(void* memory);
int gpu_enqueue(const struct op* ops, size_t count, void (*function)(void*), void* argument);
void gpu_forget(struct ncclComm* comm);
int gpu_is_captured(cudaStream_t stream);
int gpu_is_gone(const struct ncclComm* comm);

/* ---- the profiler plugin (profile.c) ---- */

struct told;
void profile_begin(struct ncclComm* comm);
void profile_end(struct ncclComm* comm);
struct told* profile_ops(struct op* const* ops, size_t count);
void profile_done(struct told* told);

/* ---- what is written down (record.c) ---- */

/* A public call. */
struct call {
  int recorded;
  int depth;
  size_t len;
  char text[700];
};

void call_begin(struct call* call, const char* name);
void call_note(struct call* call, const char* format, ...) __attribute__((format(printf, 2, 3)));
void call_comm(struct call* call, ncclComm_t comm);
void call_stream(struct call* call, cudaStream_t stream);
void call_op(struct call* call, const struct op* op);
ncclResult_t call_end(struct call* call, ncclResult_t result);
void call_leave(struct call* call);
void inside_enter(void);
void inside_leave(void);
void record_launch(struct op* const* ops, size_t count);
void expect_own_group_end(void);
void complain(const char* format, ...) __attribute__((format(printf, 1, 2)));
const char* last_complaint(void);
extern _Atomic long live_comms, made_comms, live_bytes, live_redops, live_registrations, live_windows;

/* Fails the surrounding call when an argument is wrong. */
#define REFUSE(condition, code, ...)  \
  do {                                \
    if (condition) {                  \
      complain(__VA_ARGS__);          \
      return code;                    \
    }                                 \
  } while (0)
#define TRY(call)                                     \
  do {                                                \
    ncclResult_t tried = (call);                      \
    if (tried != ncclSuccess) return tried;           \
  } while (0)

#endif
