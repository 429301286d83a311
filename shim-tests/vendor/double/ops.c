/* Operations of one communicator: the checks of their arguments, and what they do.
 *
 * A collective takes one turn: every rank posts what it wants and where its input is; when all have, each reads what it
 * needs out of the others' memory; when all have read, each may write its output. Posts that do not match are an error,
 * where NCCL would hang or give garbage. */
#include "double.h"
#include <stdlib.h>
#include <string.h>

int func_reduces(enum func func) { return func == ALL_REDUCE || func == REDUCE || func == REDUCE_SCATTER; }

int func_has_root(enum func func) { return func == REDUCE || func == BROADCAST || func == GATHER || func == SCATTER; }

/* Elements in the input and the output of this rank. */
static size_t input_count(const struct op* op) {
  size_t n = (size_t)op->comm->nranks, count = op->count;
  int is_root = op->comm->rank == op->root;
  switch (op->func) {
    case REDUCE_SCATTER: case ALL_TO_ALL: return n * count;
    case BROADCAST: return is_root ? count : 0;
    case SCATTER: return is_root ? n * count : 0;
    case RECV: return 0;
    default: return count;
  }
}

static size_t output_count(const struct op* op) {
  size_t n = (size_t)op->comm->nranks, count = op->count;
  int is_root = op->comm->rank == op->root;
  switch (op->func) {
    case ALL_GATHER: case ALL_TO_ALL: return n * count;
    case REDUCE: return is_root ? count : 0;
    case GATHER: return is_root ? n * count : 0;
    case SEND: return 0;
    default: return count;
  }
}

int op_in_place(const struct op* op) {
  if (!op->comm || op->comm->start_magic != COMM_MAGIC || (unsigned)op->type >= 12) return 0;
  const char* send = op->send;
  char* recv = op->recv;
  size_t block = op->count * type_size(op->type), rank = (size_t)op->comm->rank;
  switch (op->func) {
    case ALL_GATHER: return send == recv + rank * block;
    case GATHER: return op->comm->rank == op->root && send == recv + rank * block;
    case REDUCE_SCATTER: return recv == send + rank * block;
    case SCATTER: return op->comm->rank == op->root && recv == send + rank * block;
    default: return send == recv;
  }
}

static ncclResult_t check_reduction(struct op* op) {
  REFUSE((int)op->op < 0 || (int)op->op == 0x7fffffff, ncclInvalidArgument, "%s : invalid reduction operation %d",
         op->name, (int)op->op);
  if (op->op < ncclNumOps) return ncclSuccess;
  int index = ((int)op->op & 0xfff) - ncclNumOps;
  int owner = (int)op->op >> 12;
  REFUSE(owner != op->comm->number || index < 0 || index >= op->comm->redop_count || !op->comm->redops[index].used,
         ncclInvalidArgument, "%s : reduction operation %d unknown to this communicator", op->name, (int)op->op);
  op->redop = op->comm->redops[index];
  REFUSE(op->redop.type != op->type, ncclInvalidArgument,
         "%s : reduction type provided by user mismatches the type of the operation", op->name);
  return ncclSuccess;
}

ncclResult_t op_check(struct op* op) {
  REFUSE(!op->comm, ncclInvalidArgument, "%s : comm argument is NULL", op->name);
  TRY(comm_ready(op->comm));
  REFUSE(is_named_by(op->comm, "DOUBLE_FAIL_CALLS"), ncclInternalError, "%s : fails as a test wants it", op->name);
  int n = op->comm->nranks;
  int has_peer = op->func == SEND || op->func == RECV || func_has_root(op->func);
  REFUSE(has_peer && (op->root < 0 || op->root >= n), ncclInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)",
         op->name, op->root, n);
  REFUSE((int)op->type < 0 || (int)op->type >= TYPES, ncclInvalidArgument, "%s : invalid type %d", op->name,
         (int)op->type);
  if (func_reduces(op->func)) TRY(check_reduction(op));
  size_t most = (size_t)1 << 46;
  REFUSE(op->count > most, ncclInvalidArgument, "%s : %zu elements", op->name, op->count);
  REFUSE(input_count(op) && !op->send, ncclInvalidArgument, "%s : sendbuff argument is NULL", op->name);
  REFUSE(output_count(op) && !op->recv, ncclInvalidArgument, "%s : recvbuff argument is NULL", op->name);
  return ncclSuccess;
}

static uint64_t scalar_of(const struct op* op) {
  uint64_t scalar = op->redop.scalar;
  if (op->redop.residence == ncclScalarDevice) memcpy(&scalar, op->redop.pointer, type_size(op->type));
  return scalar;
}

static int kind_of(const struct op* op) { return op->op < ncclNumOps ? (int)op->op : OP_PRE_MUL_SUM; }

static int make_result(struct op* op) {
  op->result_bytes = output_count(op) * type_size(op->type);
  op->result = malloc(op->result_bytes + 1);
  return op->result != NULL;
}

void op_deliver(struct op* op) {
  if (op->result) memcpy(op->recv, op->result, op->result_bytes);
}

/* On a communicator of one rank: done at once, also in a group. */
ncclResult_t op_alone(struct op* op) {
  if (!make_result(op)) return ncclSystemError;
  record_launch(&op, 1);
  struct told* told = profile_ops(&op, 1);
  memcpy(op->result, op->send, op->result_bytes);
  if (func_reduces(op->func) && kind_of(op) == OP_PRE_MUL_SUM)
    reduce_premultiply(op->result, op->count, op->type, scalar_of(op));
  if (op->bias) reduce_combine(op->result, op->bias, op->count, op->type, ncclSum);
  op_deliver(op);
  free(op->result);
  profile_done(told);
  return ncclSuccess;
}

/* Elements of a rank's input, from the `first` on. */
static ncclResult_t pull(struct op* op, int rank, size_t first, void* into) {
  size_t size = type_size(op->type);
  uint64_t address = op->comm->board->seats[rank].post[DATA].send + first * size;
  return read_peer(op->comm, rank, address, into, op->count * size);
}

static ncclResult_t reduce_all(struct op* op, size_t first) {
  size_t bytes = op->count * type_size(op->type);
  void* other = malloc(bytes + 1);
  ncclResult_t result = other ? ncclSuccess : ncclSystemError;
  for (int rank = 0; rank < op->comm->nranks && result == ncclSuccess; rank++) {
    void* into = rank == 0 ? op->result : other;
    result = pull(op, rank, first, into);
    if (result != ncclSuccess) break;
    if (kind_of(op) == OP_PRE_MUL_SUM)
      reduce_premultiply(into, op->count, op->type, op->comm->board->seats[rank].post[DATA].scalar);
    if (rank > 0) reduce_combine(op->result, other, op->count, op->type, kind_of(op));
  }
  free(other);
  if (result == ncclSuccess && op->op == ncclAvg) reduce_divide(op->result, op->count, op->type, op->comm->nranks);
  if (result == ncclSuccess && op->bias) reduce_combine(op->result, op->bias, op->count, op->type, ncclSum);
  return result;
}

static ncclResult_t gather_all(struct op* op, size_t first) {
  char* into = op->result;
  for (int rank = 0; rank < op->comm->nranks; rank++) {
    TRY(pull(op, rank, first, into));
    into += op->count * type_size(op->type);
  }
  return ncclSuccess;
}

static ncclResult_t read_inputs(struct op* op) {
  size_t mine = (size_t)op->comm->rank * op->count;
  int is_root = op->comm->rank == op->root;
  switch (op->func) {
    case ALL_REDUCE: return reduce_all(op, 0);
    case REDUCE: return is_root ? reduce_all(op, 0) : ncclSuccess;
    case REDUCE_SCATTER: return reduce_all(op, mine);
    case BROADCAST: return pull(op, op->root, 0, op->result);
    case SCATTER: return pull(op, op->root, mine, op->result);
    case ALL_GATHER: return gather_all(op, 0);
    case ALL_TO_ALL: return gather_all(op, mine);
    default: return is_root ? gather_all(op, 0) : ncclSuccess; /* GATHER */
  }
}

static ncclResult_t posts_match(struct op* op, const struct post* mine) {
  for (int rank = 0; rank < op->comm->nranks; rank++) {
    const struct post* post = &op->comm->board->seats[rank].post[DATA];
    int same = post->func == mine->func && post->type == mine->type && post->op == mine->op &&
               post->root == mine->root && post->count == mine->count;
    if (same) continue;
    complain("communicator %s: rank %d calls %s (%llu of type %u, operation %u, root %u), rank %d function %u (%llu of "
             "type %u, operation %u, root %u)", op->comm->name, op->comm->rank, op->name,
             (unsigned long long)mine->count, mine->type, mine->op, mine->root, rank, post->func,
             (unsigned long long)post->count, post->type, post->op, post->root);
    return broke(op->comm, ncclInvalidUsage);
  }
  return ncclSuccess;
}

static ncclResult_t run_collective(struct op* op) {
  int reduces = func_reduces(op->func);
  struct post post = {.func = op->func, .type = op->type, .op = reduces ? (uint32_t)kind_of(op) : 0,
                      .root = func_has_root(op->func) ? (uint32_t)op->root : 0, .count = op->count,
                      .send = (uint64_t)(uintptr_t)op->send};
  if (reduces && post.op == OP_PRE_MUL_SUM) post.scalar = scalar_of(op);
  if (!make_result(op)) return broke(op->comm, ncclSystemError);
  TRY(turn_post(op->comm, DATA, &post));
  TRY(posts_match(op, &post));
  TRY(read_inputs(op));
  return turn_finish(op->comm, DATA);
}

/* Whether an earlier message to or from the same peer is not as far. */
static int must_wait(struct op** ops, size_t index, int stage) {
  for (size_t i = 0; i < index; i++)
    if (ops[i]->func == ops[index]->func && ops[i]->root == ops[index]->root && ops[i]->stage < stage) return 1;
  return 0;
}

enum { FRESH, POSTED, DONE };

static int step_send(struct op* op) {
  struct mail* mail = &op->comm->board->mail[op->comm->rank][op->root];
  uint64_t taken = atomic_load(&mail->taken), posted = atomic_load(&mail->posted);
  if (op->stage == POSTED) {
    if (taken <= op->letter) return 0;
    op->stage = DONE;
    return 1;
  }
  if (posted - taken >= LETTERS) return 0;
  op->letter = posted;
  mail->letters[posted % LETTERS] =
      (struct letter){(uint64_t)(uintptr_t)op->send, op->count * type_size(op->type)};
  atomic_store(&mail->posted, posted + 1);
  board_ring(op->comm->board);
  op->stage = POSTED;
  return 1;
}

static int step_recv(struct op* op, ncclResult_t* result) {
  struct mail* mail = &op->comm->board->mail[op->root][op->comm->rank];
  uint64_t taken = atomic_load(&mail->taken);
  if (atomic_load(&mail->posted) == taken) return 0;
  struct letter letter = mail->letters[taken % LETTERS];
  if (!make_result(op)) {
    *result = broke(op->comm, ncclSystemError);
  } else if (letter.bytes != op->result_bytes) {
    complain("communicator %s: rank %d receives %zu bytes from rank %d, which sends %llu", op->comm->name,
             op->comm->rank, op->result_bytes, op->root, (unsigned long long)letter.bytes);
    *result = broke(op->comm, ncclInvalidUsage);
  } else {
    *result = read_peer(op->comm, op->root, letter.address, op->result, letter.bytes);
  }
  if (*result != ncclSuccess) return 0;
  op->stage = DONE;
  atomic_store(&mail->taken, taken + 1);
  board_ring(op->comm->board);
  return 1;
}

/* All messages of the group at once. Those between two ranks go in the order of the calls. */
static ncclResult_t run_messages(struct op** ops, size_t count) {
  struct waiting waiting;
  ncclResult_t result = ncclSuccess;
  if (count == 0) return ncclSuccess;
  ncclComm_t comm = ops[0]->comm;
  wait_begin(comm, &waiting);
  for (;;) {
    int moved = 0, missing = -1;
    wait_look(comm, &waiting);
    for (size_t i = 0; i < count; i++) {
      struct op* op = ops[i];
      if (op->stage == DONE) continue;
      if (op->stage == POSTED || !must_wait(ops, i, op->func == SEND ? POSTED : DONE))
        moved |= op->func == SEND ? step_send(op) : step_recv(op, &result);
      if (result != ncclSuccess) return result;
      if (op->stage != DONE) missing = op->root;
    }
    if (missing < 0) return ncclSuccess;
    REFUSE(atomic_load(&comm->revoked), ncclInvalidUsage, "the communicator was revoked");
    if (moved) continue;
    TRY(wait_step(comm, &waiting, missing));
  }
}

/* The operations of one communicator in a group: the collectives, the last one first, then the messages. */
/* A test wants a rank to stop in an operation of a communicator: the streams of all of its ranks go on without the result. */
static int stops_here(const struct op* op) {
  static _Atomic int run;
  const char* at = getenv("DOUBLE_STOP_AT");
  return at && is_named_by(op->comm, "DOUBLE_STOP") && atomic_fetch_add(&run, 1) + 1 == atoi(at);
}

ncclResult_t ops_run(struct op** ops, size_t count) {
  size_t messages = 0;
  struct op** letters = calloc(count, sizeof(struct op*));
  ncclResult_t result = letters ? ncclSuccess : ncclSystemError;
  struct told* told = profile_ops(ops, count);
  if (stops_here(ops[0])) result = broke(ops[0]->comm, ncclRemoteError);
  for (size_t i = count; i-- > 0 && result == ncclSuccess;)
    if (ops[i]->func != SEND && ops[i]->func != RECV) result = run_collective(ops[i]);
  for (size_t i = 0; i < count && letters; i++)
    if (ops[i]->func == SEND || ops[i]->func == RECV) letters[messages++] = ops[i];
  if (result == ncclSuccess) result = run_messages(letters, messages);
  free(letters);
  profile_done(told);
  return result;
}
