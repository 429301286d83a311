/* Random collectives of blocks of different sizes on device memory and streams of a GPU. Nothing waits on the host between
 * the copies in, the collectives and the copies out: their order is the streams'. Every result is checked at the end, and
 * that what lies between blocks is as it was.
 *
 * vectors GRID SEED CALLS [MOST]: each rank is a process with a device; MOST is about the number of bytes of all blocks. */
#include "ranks.h"
#include "values.h"
#include <dlfcn.h>
#include <strata.h>
#include "../../soft/driver.h"

enum { STREAMS = 2, WAVE = 4, GAP = 0x5a, LIMIT_S = 120 };
enum kind { ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, PLAIN_SUM, KINDS };

/* The program is linked with NCCL, which does not have these. */
#define STRATA(name) static __typeof__(&name) p_##name
#define FIND(name) CHECK((p_##name = (__typeof__(&name))dlsym(RTLD_DEFAULT, #name)) != NULL)
STRATA(strataAllGatherV);
STRATA(strataReduceScatterV);
STRATA(strataAllToAllV);
STRATA(strataGatherV);
STRATA(strataScatterV);

/* Blocks of one buffer. */
struct blocks {
  int many, has_places; /* `many`: one for each rank, else the own one */
  size_t count[MAX_RANKS], at[MAX_RANKS], end;
};

/* One call with its memory. */
struct call {
  enum kind kind;
  int number, op, root, sends, receives, in_place;
  ncclDataType_t type;
  ncclRedOp_t given_op;
  struct blocks in, out;
  char *device, *send, *recv; /* on the device; `send` and `recv` lie in `device` */
  char *host_in, *host_out;
  gpu_stream stream;
};

static int n, me, ntypes = 10;
static uint64_t seed;

/* A random number; all ranks draw the same ones of one state. */
static uint64_t draw(uint64_t* state, uint64_t below) {
  *state += 0x9e3779b97f4a7c15ull;
  return below ? mix(*state) % below : 0;
}

static uint64_t values_of(const struct call* call) { return mix(seed * 1000 + (uint64_t)call->number); }
static uint64_t place_of(int block, size_t i) { return (uint64_t)block * 1000003u + i; }

/* What rank `from` has for block `block`. */
static void fill(const struct call* call, char* to, int from, int block, size_t count) {
  size_t size = size_of(call->type);
  if (call->kind == REDUCE_SCATTER || call->kind == PLAIN_SUM)
    for (size_t i = 0; i < count; i++)
      put(to, i, call->type, element(values_of(call), from, place_of(block, i), call->type, call->op));
  else fill_bytes(to, count * size, values_of(call), from * MAX_RANKS + block, 0);
}

/* The same of what this rank gets as its block `block`. */
static void fill_wanted(const struct call* call, char* to, int block, size_t count) {
  if (call->kind == REDUCE_SCATTER || call->kind == PLAIN_SUM) {
    int of = call->kind == REDUCE_SCATTER ? me : 0;
    for (size_t i = 0; i < count; i++)
      put(to, i, call->type, reduced(values_of(call), n, place_of(of, i), call->type, call->op));
  } else if (call->kind == ALL_GATHER || call->kind == GATHER) fill(call, to, block, 0, count);
  else fill(call, to, call->kind == SCATTER ? call->root : block, me, count);
}

/* None at all; mostly none; one rank with nine tenths; as Zipf has it; even; any. */
static void draw_counts(uint64_t* state, int blocks, size_t total, size_t* counts) {
  int shape = (int)draw(state, 6), big = (int)draw(state, blocks), turn = (int)draw(state, blocks);
  for (int i = 0; i < blocks; i++) {
    size_t any = draw(state, 1 + 2 * total / blocks), mostly = any % 4 ? 0 : any, zipf = total / (i + 1);
    size_t nine_tenths = i == big ? total * 9 / 10 : total / 10 / blocks;
    counts[(i + turn) % blocks] = (size_t[]){0, mostly, nine_tenths, zipf, total / blocks, any}[shape];
  }
}

/* Places with gaps, in an order that begins anywhere. */
static void draw_places(uint64_t* state, struct blocks* blocks) {
  int nblocks = blocks->many ? n : 1, first = (int)draw(state, nblocks);
  blocks->has_places = blocks->many && draw(state, 2);
  blocks->end = blocks->has_places ? draw(state, 3) : 0;
  for (int i = 0; i < nblocks; i++) {
    int block = blocks->has_places ? (first + i) % n : i;
    blocks->at[block] = blocks->end;
    blocks->end += blocks->count[block] + (blocks->has_places ? draw(state, 4) : 0);
  }
}

static void set_blocks(struct blocks* blocks, int many, const size_t* counts, size_t stride) {
  blocks->many = many;
  for (int i = 0; i < (many ? n : 1); i++) blocks->count[i] = counts[(size_t)i * stride];
}

static void draw_call(struct call* call, int number, size_t most, uint64_t* shared_state, const gpu_stream* streams) {
  size_t all[MAX_RANKS * MAX_RANKS];
  *call = (struct call){.kind = (enum kind)draw(shared_state, KINDS), .number = number};
  call->type = (ncclDataType_t)draw(shared_state, (uint64_t)ntypes);
  call->op = exact_op((int)draw(shared_state, 6), call->type, n);
  call->root = (int)draw(shared_state, (uint64_t)n);
  call->stream = streams[draw(shared_state, STREAMS)];
  int pairs = call->kind == ALL_TO_ALL, is_root = me == call->root;
  size_t total = 1 + draw(shared_state, most / size_of(call->type));
  draw_counts(shared_state, pairs ? n * n : n, total, all);
  if (call->kind == PLAIN_SUM) call->op = exact_op(ncclSum, call->type, n), all[me] = all[0];
  call->sends = call->kind != SCATTER || is_root, call->receives = call->kind != GATHER || is_root;
  int many_in = call->sends && (call->kind == REDUCE_SCATTER || pairs || call->kind == SCATTER);
  int many_out = call->receives && (call->kind == ALL_GATHER || pairs || call->kind == GATHER);
  set_blocks(&call->in, many_in, pairs ? all + me * n : many_in ? all : all + me, 1);
  set_blocks(&call->out, many_out, pairs || !many_out ? all + me : all, pairs ? (size_t)n : 1);
  if (!call->sends) call->in.count[0] = 0;
  if (!call->receives) call->out.count[0] = 0;
  uint64_t own_state = mix(seed * 64 + (uint64_t)me) + (uint64_t)number * 977;
  draw_places(&own_state, &call->in);
  draw_places(&own_state, &call->out);
  call->in_place = !pairs && many_in + many_out == 1 && draw(&own_state, 2);
}

/* Its memory, with what it sends in it, `GAP` elsewhere, at a place that is a multiple of an element's size and no more. */
static void begin(struct call* call, ncclComm_t comm, uint64_t* shared_state) {
  size_t size = size_of(call->type), in = call->in.end * size, out = call->out.end * size, shift = draw(shared_state, 5) * size;
  call->device = gpu_memory(in + out + 2 * shift + 1);
  call->host_in = gpu_pinned(in + 1), call->host_out = gpu_pinned(out + 1);
  call->send = call->device + shift, call->recv = call->device + in + 2 * shift;
  memset(call->host_in, GAP, in), memset(call->host_out, GAP, out);
  for (int block = 0; block < (call->in.many ? n : 1); block++)
    fill(call, call->host_in + call->in.at[block] * size, me, call->in.many ? block : 0, call->in.count[block]);
  if (call->in_place && call->out.many) {
    call->send = call->recv + call->out.at[me] * size;
    memcpy(call->host_out + call->out.at[me] * size, call->host_in, in);
  } else if (in > 0) gpu_to(call->send, call->host_in, in, call->stream);
  if (call->in_place && call->in.many) call->recv = call->send + call->in.at[me] * size;
  else if (out > 0) gpu_to(call->recv, call->host_out, out, call->stream);
  call->given_op = (ncclRedOp_t)call->op;
  if (call->kind == REDUCE_SCATTER && call->op == PRE_MUL_SUM) {
    char scalar[8];
    put(scalar, 0, call->type, factor(me, call->type));
    OK(ncclRedOpCreatePreMulSum(&call->given_op, scalar, call->type, ncclScalarHostImmediate, comm));
  }
}

static void issue(const struct call* call, ncclComm_t comm) {
  cudaStream_t stream = (cudaStream_t)call->stream;
  const size_t *in_at = call->in.has_places ? call->in.at : NULL, *out_at = call->out.has_places ? call->out.at : NULL;
  const size_t *in = call->in.count, *out = call->out.count;
  int is_root = me == call->root;
  /* A buffer of no elements may be none. */
  char *send = call->in.end ? call->send : NULL, *recv = call->out.end ? call->recv : NULL;
  switch (call->kind) {
    case ALL_GATHER: OK(p_strataAllGatherV(send, recv, out, out_at, call->type, comm, stream)); break;
    case REDUCE_SCATTER:
      OK(p_strataReduceScatterV(send, recv, in, in_at, call->type, call->given_op, comm, stream));
      break;
    case ALL_TO_ALL: OK(p_strataAllToAllV(send, in, in_at, recv, out, out_at, call->type, comm, stream)); break;
    case GATHER:
      OK(p_strataGatherV(send, in[0], recv, is_root ? out : NULL, out_at, call->type, call->root, comm, stream));
      break;
    case SCATTER:
      OK(p_strataScatterV(send, is_root ? in : NULL, in_at, recv, out[0], call->type, call->root, comm, stream));
      break;
    default: OK(ncclAllReduce(send, recv, in[0], call->type, ncclSum, comm, stream));
  }
}

static void check(struct call* call, ncclComm_t comm) {
  size_t size = size_of(call->type), bytes = call->out.end * size;
  gpu_wait(call->stream);
  char* wanted = malloc(bytes + 1);
  memset(wanted, GAP, bytes);
  for (int block = 0; block < (call->out.many ? n : 1); block++)
    fill_wanted(call, wanted + call->out.at[block] * size, block, call->out.count[block]);
  for (size_t i = 0; i < bytes; i++) {
    if (call->host_out[i] == wanted[i]) continue;
    fprintf(stderr, "rank %d call %d kind %d type %d op %d root %d in place %d: byte %zu of %zu is %d, not %d\n", me,
            call->number, call->kind, call->type, call->op, call->root, call->in_place, i, bytes, call->host_out[i],
            wanted[i]);
    exit(3);
  }
  free(wanted);
  gpu_free(call->device);
  if (call->given_op != (ncclRedOp_t)call->op) OK(ncclRedOpDestroy(call->given_op, comm));
}

static int calls;
static size_t most = 40000;

static void rank_main(int rank, const struct grid* grid) {
  n = grid->nranks, me = rank;
  ncclComm_t comm;
  gpu_stream streams[STREAMS];
  int version;
  FIND(strataAllGatherV); FIND(strataReduceScatterV); FIND(strataAllToAllV); FIND(strataGatherV); FIND(strataScatterV);
  OK(ncclGetVersion(&version));
  ntypes = version >= 22403 ? 12 : 10;
  gpu_use(rank % 8);
  for (int i = 0; i < STREAMS; i++) streams[i] = gpu_new_stream();
  ncclUniqueId id = shared_id(0, rank);
  OK(ncclCommInitRank(&comm, n, id, rank));
  uint64_t shared_state = mix(seed);
  for (int first = 0; first < calls; first += WAVE) {
    struct call wave[WAVE];
    int grouped = (int)draw(&shared_state, 3) == 0;
    for (int i = 0; i < WAVE; i++) {
      draw_call(&wave[i], first + i, most, &shared_state, streams);
      begin(&wave[i], comm, &shared_state);
    }
    if (grouped) OK(ncclGroupStart());
    for (int i = 0; i < WAVE; i++) issue(&wave[i], comm);
    if (grouped) OK(ncclGroupEnd());
    for (int i = 0; i < WAVE; i++)
      if (wave[i].out.end > 0)
        gpu_from(wave[i].host_out, wave[i].recv, wave[i].out.end * size_of(wave[i].type), wave[i].stream);
    for (int i = 0; i < WAVE; i++) check(&wave[i], comm);
  }
  ncclResult_t state;
  OK(ncclCommGetAsyncError(comm, &state));
  CHECK(state == ncclSuccess);
  OK(ncclCommDestroy(comm));
}

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  struct grid grid = parse_grid(argv[1]);
  seed = strtoull(argv[2], NULL, 10);
  calls = atoi(argv[3]);
  if (argc > 4) most = strtoull(argv[4], NULL, 10);
  int failed = run_ranks(&grid, rank_main, LIMIT_S, NULL);
  if (failed == 0) printf("%d calls on %s are right\n", calls, argv[1]);
  return failed != 0;
}
