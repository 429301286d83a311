/* Calls by a provider, compared with the same calls by Strata's own algorithms, in host memory or where SOFT_DEVICE says. Arguments: the provider's name, then what to do.
     all    every collective, type and operation, in place and not, lengths odd and none; what it does not take is refused by calls
            that force it, and made by Strata's own algorithms where they do not
     comms  several communicators, whose calls are made in opposite orders, and go on beside sends and receives
     once   one all-reduce by name, whose result, or error, is told
     much   blocks of different sizes that are too much together: an all-gather, of which all ranks know it, and a gather, of which only
            the root does, whose error is told
     idle   nothing, until the communicator has failed
     left   nothing: leaves the communicator in order, before the others' call
     differ FROM TO  for each seed a communicator and a call that one rank makes otherwise, which fails on all ranks
     sizes FROM TO   for each seed an all-to-all, gather or scatter of which two ranks know different sizes, or one rank another type, root or
                     collective: it fails on all ranks */
#include "places.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST 70001
#define RANKS 8

static int rank, size;
static char algorithm[64];
static _Alignas(8) unsigned char given[MOST * 8 * RANKS], mine[MOST * 8 * RANKS], theirs[MOST * 8 * RANKS];
/* Where calls are made. */
static unsigned char *there_in, *there_out;

enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER, KINDS };
static const char* const kinds[KINDS] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast",
                                         "reduce",     "all_to_all", "gather",         "scatter"};

static int reduces(int kind) { return kind == ALL_REDUCE || kind == REDUCE_SCATTER || kind == REDUCE; }

static ncclResult_t call(int kind, const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                         int root, ncclComm_t comm, strataStream_t stream, ncclCollConfig_t* config) {
  switch (kind) {
    case ALL_REDUCE: return ncclAllReduceConfig(send, recv, count, type, op, comm, stream, config);
    case ALL_GATHER: return ncclAllGatherConfig(send, recv, count, type, comm, stream, config);
    case REDUCE_SCATTER: return ncclReduceScatterConfig(send, recv, count, type, op, comm, stream, config);
    case BROADCAST: return ncclBroadcastConfig(send, recv, count, type, root, comm, stream, config);
    case REDUCE: return ncclReduceConfig(send, recv, count, type, op, root, comm, stream, config);
    case ALL_TO_ALL: return ncclAlltoAllConfig(send, recv, count, type, comm, stream, config);
    case GATHER: return ncclGatherConfig(send, recv, count, type, root, comm, stream, config);
    default: return ncclScatterConfig(send, recv, count, type, root, comm, stream, config);
  }
}

static const struct {
  ncclDataType_t type;
  int bytes, is_integer;
} types[] = {{ncclInt8, 1, 1},    {ncclUint8, 1, 1},   {ncclInt32, 4, 1},    {ncclUint32, 4, 1},  {ncclInt64, 8, 1},
             {ncclUint64, 8, 1},  {ncclFloat16, 2, 0}, {ncclFloat32, 4, 0},  {ncclFloat64, 8, 0}, {ncclBfloat16, 2, 0},
             {strataInt16, 2, 1}, {strataUint16, 2, 1}};
static const ncclRedOp_t ops[] = {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, strataBitAnd, strataBitOr, strataBitXor};

/* Small numbers, of which all sums and products are exact. */
static void fill(int type, size_t elements, int salt) {
  for (size_t i = 0; i < elements; i++) {
    int value = 1 + (int)((i + rank * rank + salt) % 3);
    unsigned char* at = given + i * types[type].bytes;
    switch (types[type].type) {
      case ncclFloat32: *(float*)at = value; break;
      case ncclFloat64: *(double*)at = value; break;
      case ncclFloat16: *(uint16_t*)at = value == 3 ? 0x4200 : 0x3800 + 0x400 * value; break;
      case ncclBfloat16: *(uint16_t*)at = value == 3 ? 0x4040 : 0x3f00 + 0x80 * value; break;
      default:
        memset(at, 0, types[type].bytes);
        *at = value;
    }
  }
}

/* Makes a call on a fresh copy of the input; the bytes of the result are in `out`. */
static ncclResult_t make(int kind, int type, ncclRedOp_t op, size_t count, int root, int in_place, ncclComm_t comm,
                         ncclCollConfig_t* config, unsigned char* out, size_t* length) {
  static _Alignas(8) unsigned char input[MOST * 8 * RANKS];
  size_t block = count * types[type].bytes;
  size_t sent = (kind == REDUCE_SCATTER || kind == ALL_TO_ALL || (kind == SCATTER && rank == root)) ? size : 1;
  size_t got = (kind == ALL_GATHER || kind == ALL_TO_ALL || (kind == GATHER && rank == root)) ? size : 1;
  memcpy(input, given, sent * block);
  memset(out, 0xee, got * block);
  const void* send = input;
  void* recv = out;
  if (in_place) {
    switch (kind) {
      case ALL_GATHER:
      case GATHER:
        if (kind == GATHER && rank != root) break;
        memcpy(out + rank * block, given, block);
        send = out + rank * block;
        break;
      case REDUCE_SCATTER:
      case SCATTER:
        if (kind == SCATTER && rank != root) break;
        recv = input + rank * block;
        break;
      case ALL_TO_ALL: break;
      default:
        if ((kind == BROADCAST || kind == REDUCE) && rank != root) break;
        memcpy(out, given, block);
        send = out;
    }
  }
  put(there_in, input, sent * block);
  put(there_out, out, got * block);
  const void* from = send == input ? (void*)there_in : there_out + ((unsigned char*)send - out);
  void* to = recv == out ? there_out : there_in + ((unsigned char*)recv - input);
  ncclResult_t result =
      ended(comm, NULL, call(kind, from, to, count, types[type].type, op, root, comm, NULL, config));
  take(out, recv == out ? there_out : to, recv == out ? got * block : block);
  *length = (kind == REDUCE || kind == GATHER) && rank != root ? 0 : got * block;
  return result;
}

static void compare(ncclComm_t comm, int kind, int type, ncclRedOp_t op, size_t count, int root, int in_place,
                    int is_taken) {
  ncclCollConfig_t named = NCCL_COLLCONFIG_INITIALIZER, own = NCCL_COLLCONFIG_INITIALIZER;
  size_t length = 0, other = 0;
  named.algSelection = algorithm;
  named.forceAlgSelection = is_taken;
  int varied[] = {ALL_TO_ALL, REDUCE_SCATTER, SCATTER};
  size_t blocks = 1;
  for (int i = 0; i < 3; i++)
    if (varied[i] == kind) blocks = size;
  fill(type, blocks * count, kind + (int)count);
  OK(make(kind, type, op, count, root, in_place, comm, &own, theirs, &other));
  ncclResult_t result = make(kind, type, op, count, root, in_place, comm, &named, mine, &length);
  if (result != ncclSuccess || length != other || memcmp(mine, theirs, length)) {
    fprintf(stderr, "rank %d: %s of %zu, type %d, op %d, root %d, in place %d: %s\n", rank, kinds[kind], count,
            (int)types[type].type, (int)op, root, in_place, result == ncclSuccess ? "wrong" : strataGetLastError());
    exit(1);
  }
  if (!is_taken) {
    named.forceAlgSelection = 1;
    result = make(kind, type, op, count, root, in_place, comm, &named, mine, &length);
    CHECK(result == ncclInvalidUsage);
  }
}

/* What MPI, and what the example does. */
static int takes(int kind, int type, ncclRedOp_t op) {
  ncclDataType_t of = types[type].type;
  /* Sums and products of short integers may be saturated. */
  int is_narrow = types[type].is_integer && types[type].bytes <= 2, may_overflow = op == ncclSum || op == ncclProd || op == ncclAvg;
  if (!strcmp(algorithm, "provider:mpi"))
    return !reduces(kind) || (of != ncclFloat16 && of != ncclBfloat16 && !(is_narrow && may_overflow));
  if (!reduces(kind)) return 1;
  return kind != REDUCE && (of == ncclInt32 || of == ncclInt64 || of == ncclFloat32 || of == ncclFloat64) &&
         (op <= ncclMin || op == ncclAvg);
}

/* A sum of which each rank gets another number of elements, and the first one none; its input is scaled by a half before. */
static void scaled_uneven(ncclRedOp_t scaled, ncclComm_t comm, ncclCollConfig_t* named) {
  size_t counts[RANKS], all = 0, own = 0;
  float *in = (float*)given, *out = (float*)mine;
  for (int i = 0; i < size; all += counts[i++]) counts[i] = i * (MOST / 2);
  for (int i = 0; i < rank; i++) own += counts[i];
  for (size_t i = 0; i < all; i++) in[i] = i % 5 + rank;
  put(there_in, in, all * sizeof(float));
  OK(ended(comm, NULL,
           strataReduceScatterVConfig(there_in, there_out, counts, NULL, ncclFloat32, scaled, comm, NULL, named)));
  take(out, there_out, counts[rank] * sizeof(float));
  for (size_t i = 0; i < counts[rank]; i++) CHECK(out[i] == (size * ((own + i) % 5) + size * (size - 1) / 2) * 0.5f);
}

static void all(ncclComm_t comm) {
  static const size_t counts[] = {1, 3, 1000, MOST};
  int made = 0;
  /* Of Strata's own types and operations devices have none. */
  int last_type = sizeof types / sizeof *types - (is_on_device ? 2 : 0), last_op = is_on_device ? 5 : 8;
  for (int kind = 0; kind < KINDS; kind++)
    for (int type = 0; type < last_type; type++)
      for (int which = 0; which < last_op; which++) {
        if (!reduces(kind) && which > 0) break;
        if (which >= 5 && !types[type].is_integer) break;
        /* The longest, and every place, with one operation of each. */
        int is_first = which == 0 && (type == 2 || type == 7);
        for (int length = 0; length < (is_first ? 4 : 3); length++)
          /* None, all, and of the longer ones every other rank. */
          for (int places = 0; places < (length < 2 ? 2 : 3); places++, made++) {
            int root = made % size, in_place = places == 2 ? (rank + made) % 2 : places;
            compare(comm, kind, type, ops[which], counts[length], root, in_place, takes(kind, type, ops[which]));
          }
      }
  /* Nothing is asked of anybody. */
  ncclCollConfig_t named = NCCL_COLLCONFIG_INITIALIZER;
  named.algSelection = algorithm;
  OK(ncclAllReduceConfig(given, mine, 0, ncclFloat32, ncclSum, comm, NULL, &named));
  /* A sum whose input is scaled: by the plan, before the provider has it. */
  ncclRedOp_t scaled;
  float half = 0.5f;
  OK(ncclRedOpCreatePreMulSum(&scaled, &half, ncclFloat32, ncclScalarHostImmediate, comm));
  compare(comm, ALL_REDUCE, 7, scaled, 1001, 0, 0, 1);
  compare(comm, ALL_REDUCE, 7, scaled, 1001, 0, 1, 1);
  scaled_uneven(scaled, comm, &named);
  OK(ncclRedOpDestroy(scaled, comm));
  /* Calls of a group, of which Strata may make one. */
  static float in[3][100], out[3][100];
  OK(ncclGroupStart());
  for (int i = 0; i < 3; i++) {
    for (int j = 0; j < 100; j++) in[i][j] = i + j + rank;
    put(there_in + 1000 * i, in[i], sizeof in[i]);
    OK(ncclAllReduceConfig(there_in + 1000 * i, there_out + 600 * i, 100, ncclFloat32, ncclSum, comm, NULL, &named));
  }
  OK(ended(comm, NULL, ncclGroupEnd()));
  for (int i = 0; i < 3; i++) take(out[i], there_out + 600 * i, sizeof out[i]);
  for (int i = 0; i < 3; i++)
    for (int j = 0; j < 100; j++) CHECK(out[i][j] == size * (i + j) + size * (size - 1) / 2);
  if (rank == 0) printf("%d calls by %s went well\n", made, algorithm);
}

static void comms(ncclComm_t comm) {
  enum { COMMS = 3, CALLS = 20, LENGTH = 5000 };
  static int32_t in[COMMS][CALLS][LENGTH], out[COMMS][CALLS][LENGTH];
  ncclComm_t all[COMMS];
  strataStream_t streams[COMMS];
  ncclCollConfig_t named = NCCL_COLLCONFIG_INITIALIZER;
  named.algSelection = algorithm;
  int32_t *sent = place_for(sizeof in), *received = place_for(sizeof out);
  for (int i = 0; i < COMMS; i++) {
    OK(ncclCommSplit(comm, 0, rank, &all[i], NULL));
    streams[i] = place_stream();
  }
  for (int at = 0; at < CALLS; at++)
    for (int i = 0; i < COMMS; i++) {
      /* Odd ranks the other way round. */
      int which = rank % 2 ? COMMS - 1 - i : i;
      for (int j = 0; j < LENGTH; j++) in[which][at][j] = rank + which + at + j;
      size_t place = (which * CALLS + at) * LENGTH;
      put(sent + place, in[which][at], sizeof in[which][at]);
      OK(ncclAllReduceConfig(sent + place, received + place, 1 + (at * 997) % LENGTH, ncclInt32, ncclSum, all[which],
                             streams[which], at % 3 ? &named : NULL));
    }
  int32_t token = rank, came = -1;
  put(there_in, &token, sizeof token);
  OK(ncclGroupStart());
  OK(ncclSend(there_in, 1, ncclInt32, (rank + 1) % size, comm, NULL));
  OK(ncclRecv(there_out, 1, ncclInt32, (rank + size - 1) % size, comm, NULL));
  OK(ended(comm, NULL, ncclGroupEnd()));
  take(&came, there_out, sizeof came);
  CHECK(came == (rank + size - 1) % size);
  for (int i = 0; i < COMMS; i++) {
    int which = rank % 2 ? i : COMMS - 1 - i;
    if (is_on_device)
      OK(ended(all[which], streams[which], ncclSuccess));
    else
      OK(strataStreamSynchronize(streams[which]));
  }
  take(out, received, sizeof out);
  for (int which = 0; which < COMMS; which++)
    for (int at = 0; at < CALLS; at++)
      for (int j = 0; j < 1 + (at * 997) % LENGTH; j++)
        CHECK(out[which][at][j] == size * (which + at + j) + size * (size - 1) / 2);
  for (int i = 0; i < COMMS; i++) {
    int which = rank % 2 ? COMMS - 1 - i : i;
    if (!is_on_device) OK(strataStreamDestroy(streams[which]));
    OK(ncclCommDestroy(all[which]));
  }
  if (rank == 0) printf("%d communicators in opposite orders went well\n", COMMS);
}

/* What ranks meet by when their communicator has failed: a launcher ends all when the first one leaves. */
static ncclComm_t beside_of(ncclComm_t comm) {
  ncclComm_t beside;
  OK(ncclCommSplit(comm, 0, rank, &beside, NULL));
  return beside;
}

static void leave_together(ncclComm_t failed, ncclComm_t beside) {
  if (failed) ncclCommAbort(failed);
  int32_t ones = 1, all = 0;
  put(there_in, &ones, sizeof ones);
  OK(ended(beside, NULL, ncclAllReduce(there_in, there_out, 1, ncclInt32, ncclSum, beside, NULL)));
  take(&all, there_out, sizeof all);
  CHECK(all == size);
  exit(0);
}

static void once(ncclComm_t comm) {
  ncclComm_t beside = beside_of(comm);
  static float in[10000], out[10000];
  ncclCollConfig_t named = NCCL_COLLCONFIG_INITIALIZER;
  named.algSelection = algorithm;
  for (int i = 0; i < 10000; i++) in[i] = i + rank;
  put(there_in, in, sizeof in);
  ncclResult_t result = ncclAllReduceConfig(there_in, there_out, 10000, ncclFloat32, ncclSum, comm, NULL, &named);
  int is_refused = result != ncclSuccess;
  result = ended(comm, NULL, result);
  if (result != ncclSuccess) {
    printf("rank %d: error %d: %s\n", rank, result, is_refused ? strataGetLastError() : ncclGetLastError(comm));
    leave_together(comm, beside);
  }
  OK(ncclCommDestroy(beside));
  take(out, there_out, sizeof out);
  for (int i = 0; i < 10000; i++) CHECK(out[i] == size * i + size * (size - 1) / 2);
  printf("rank %d: the sum is right\n", rank);
}

/* Of MPI 3 GiB, which are never touched; of the others 1200 bytes. */
static void much(ncclComm_t comm) {
  int is_mpi = !strcmp(algorithm, "provider:mpi");
  size_t counts[RANKS], one = is_mpi ? (size_t)1 << 30 : 400;
  for (int i = 0; i < size; i++) counts[i] = one;
  ncclCollConfig_t named = NCCL_COLLCONFIG_INITIALIZER, wished = NCCL_COLLCONFIG_INITIALIZER;
  named.algSelection = wished.algSelection = algorithm;
  wished.forceAlgSelection = 0;
  unsigned char *in = there_in, *out = there_out;
  if (is_mpi) {
    out = mmap(NULL, (size + 1) * one, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(out != MAP_FAILED && !is_on_device);
    in = out + size * one;
  }
  CHECK(strataAllGatherVConfig(in, out, counts, NULL, ncclInt8, comm, NULL, &named) == ncclInvalidUsage);
  CHECK(strstr(strataGetLastError(), "takes no all_gather of blocks of different sizes"));
  memset(given, rank + 1, 400);
  put(in, given, 400);
  if (!is_mpi) {
    OK(ended(comm, NULL, strataAllGatherVConfig(in, out, counts, NULL, ncclInt8, comm, NULL, &wished)));
    take(mine, out, size * one);
    for (size_t i = 0; i < size * one; i++) CHECK(mine[i] == i / one + 1);
  }
  /* The same, less than it takes. */
  for (int i = 0; i < size; i++) counts[i] = i;
  OK(ended(comm, NULL, strataGatherVConfig(in, rank, out, counts, NULL, ncclInt8, 1, comm, NULL, &named)));
  take(mine, out, size * size);
  for (int i = 0, at = 0; rank == 1 && i < size; i++)
    for (int j = 0; j < i; j++, at++) CHECK(mine[at] == i + 1);
  ncclComm_t beside = beside_of(comm);
  for (int i = 0; i < size; i++) counts[i] = one;
  ncclResult_t result =
      ended(comm, NULL, strataGatherVConfig(in, one, out, counts, NULL, ncclInt8, 0, comm, NULL, &named));
  CHECK(rank != 0 || result != ncclSuccess);
  /* A rank whose part was over hears of it afterwards. */
  while (result == ncclSuccess) OK(ncclCommGetAsyncError(comm, &result));
  printf("rank %d: error %d: %s\n", rank, result, ncclGetLastError(comm));
  leave_together(comm, beside);
}

static unsigned next(unsigned* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

/* Of which all ranks know the sizes, or each its own. */
enum { ALL_GATHER_V = KINDS, REDUCE_SCATTER_V, ALL_TO_ALL_V, GATHER_V, SCATTER_V };

static void differ(ncclComm_t comm, unsigned from, unsigned to) {
  for (unsigned seed = from; seed < to; seed++) {
    unsigned state = seed * 2654435761u;
    size_t counts[RANKS], count = 1 + next(&state) % 5000;
    int kind = next(&state) % (KINDS + 2), root = next(&state) % size, odd = next(&state) % size, what = next(&state) % 6;
    int other_kind = (kind + 1 + next(&state) % (KINDS - 1)) % KINDS, varied = next(&state) % size;
    int has_root = kind == BROADCAST || kind == REDUCE || kind == GATHER || kind == SCATTER;
    ncclDataType_t type = ncclInt32;
    ncclRedOp_t op = ncclSum;
    ncclCollConfig_t named = NCCL_COLLCONFIG_INITIALIZER;
    named.algSelection = algorithm;
    ncclComm_t one;
    OK(ncclCommSplit(comm, 0, rank, &one, NULL));
    put(there_in, given, 5001 * sizeof(int32_t) * size);
    OK(ended(one, NULL, call(ALL_REDUCE, there_in, there_out, count, type, op, 0, one, NULL, &named)));
    for (int i = 0; i < size; i++) counts[i] = next(&state) % 2000;
    if (rank == odd) {
      if (kind >= KINDS) counts[varied]++;
      else if (what == 1) type = ncclFloat32;
      else if (what == 2 && reduces(kind)) op = ncclMax;
      else if (what == 2 && has_root) root = (root + 1) % size;
      else if (what == 3) kind = other_kind;
      else if (what == 4) named = (ncclCollConfig_t)NCCL_COLLCONFIG_INITIALIZER;
      else count++;
    }
    ncclResult_t result;
    if (kind == ALL_GATHER_V)
      result = strataAllGatherVConfig(there_in, there_out, counts, NULL, type, one, NULL, &named);
    else if (kind == REDUCE_SCATTER_V)
      result = strataReduceScatterVConfig(there_in, there_out, counts, NULL, type, op, one, NULL, &named);
    else
      result = call(kind, there_in, there_out, count, type, op, root, one, NULL, &named);
    result = ended(one, NULL, result);
    /* One that goes by Strata's own messages, and only sends, may be done with that. */
    int only_sends = rank == odd && what == 4 && has_root;
    if (result == ncclSuccess && !only_sends) printf("seed %u, rank %d: no error\n", seed, rank);
    CHECK(result != ncclSuccess || only_sends);
    /* Who aborts early is not to be what the others' errors are about. */
    OK(ended(comm, NULL, call(ALL_REDUCE, there_in, there_out, 1, ncclInt32, ncclSum, 0, comm, NULL, NULL)));
    ncclCommAbort(one);
  }
  if (rank == 0) printf("%u calls that differ failed on all ranks\n", to - from);
}

static ncclResult_t own_sizes(int kind, const size_t* sent, const size_t* received, ncclDataType_t type, int root, ncclComm_t comm,
                              ncclCollConfig_t* named) {
  if (kind == ALL_TO_ALL_V)
    return strataAllToAllVConfig(there_in, sent, NULL, there_out, received, NULL, type, comm, NULL, named);
  if (kind == GATHER_V) return strataGatherVConfig(there_in, sent[root], there_out, received, NULL, type, root, comm, NULL, named);
  return strataScatterVConfig(there_in, sent, NULL, there_out, received[root], type, root, comm, NULL, named);
}

static void sizes(ncclComm_t comm, unsigned from, unsigned to) {
  enum { LONGEST = 3000 };
  for (unsigned seed = from; seed < to; seed++) {
    unsigned state = seed * 2654435761u;
    size_t table[RANKS][RANKS], sent[RANKS], received[RANKS];
    for (int i = 0; i < size; i++)
      for (int j = 0; j < size; j++) table[i][j] = next(&state) % 4 ? next(&state) % LONGEST : 0;
    int kind = ALL_TO_ALL_V + next(&state) % 3, root = next(&state) % size, giver = next(&state) % size, taker = next(&state) % size;
    int odd = next(&state) % size, what = next(&state) % 6;
    if (kind == GATHER_V) taker = root;
    if (kind == SCATTER_V) giver = root;
    /* What a rank has for itself it knows alone. */
    if (giver == taker && kind == SCATTER_V) taker = (giver + 1) % size;
    else if (giver == taker) giver = (taker + 1) % size;
    for (int i = 0; i < size; i++) {
      sent[i] = table[rank][i];
      received[i] = table[i][rank];
    }
    ncclDataType_t type = ncclInt32;
    ncclCollConfig_t named = NCCL_COLLCONFIG_INITIALIZER;
    named.algSelection = algorithm;
    ncclComm_t one;
    OK(ncclCommSplit(comm, 0, rank, &one, NULL));
    put(there_in, given, sizeof given / 2);
    OK(ended(one, NULL, own_sizes(kind, sent, received, type, root, one, &named)));
    /* With fewer than are expected MPI has no error. */
    if (what < 2) sent[taker] += rank == giver;
    else if (what == 2) received[giver] += rank == taker;
    else if (rank != odd) ;
    else if (what == 3) type = ncclFloat32;
    else if (what == 4 && kind != ALL_TO_ALL_V) {
      root = (root + 1) % size;
      sent[rank] = received[rank];
    } else kind = ALL_TO_ALL_V + (kind - ALL_TO_ALL_V + 1) % 3, sent[rank] = received[rank];
    ncclResult_t result = ended(one, NULL, own_sizes(kind, sent, received, type, root, one, &named));
    if (result == ncclSuccess) printf("seed %u, rank %d: no error\n", seed, rank);
    CHECK(result != ncclSuccess);
    OK(ended(comm, NULL, call(ALL_REDUCE, there_in, there_out, 1, ncclInt32, ncclSum, 0, comm, NULL, NULL)));
    ncclCommAbort(one);
  }
  if (rank == 0) printf("%u calls of which ranks know different sizes failed on all ranks\n", to - from);
}

static void idle(ncclComm_t comm) {
  ncclComm_t beside = beside_of(comm);
  ncclResult_t failure = ncclSuccess;
  while (failure == ncclSuccess) OK(ncclCommGetAsyncError(comm, &failure));
  leave_together(comm, beside);
}

static void left(ncclComm_t comm) {
  ncclComm_t beside = beside_of(comm);
  OK(ncclCommDestroy(comm));
  leave_together(NULL, beside);
}

int main(int argc, char** argv) {
  ncclUniqueId id;
  ncclComm_t comm;
  CHECK(argc >= 3);
  setvbuf(stdout, NULL, _IOLBF, 0);
  alarm(150);
  snprintf(algorithm, sizeof algorithm, "provider:%s", argv[1]);
  OK(strataGetWorldId(&id, &size, &rank));
  CHECK(size <= RANKS);
  open_place();
  there_in = place_for(sizeof given);
  there_out = place_for(sizeof mine);
  ncclResult_t result = ncclCommInitRank(&comm, size, id, rank);
  if (result != ncclSuccess) {
    printf("rank %d: no communicator: %s\n", rank, strataGetLastError());
    return 0;
  }
  if (!strcmp(argv[2], "all")) all(comm);
  if (!strcmp(argv[2], "comms")) comms(comm);
  if (!strcmp(argv[2], "once")) once(comm);
  if (!strcmp(argv[2], "much")) much(comm);
  if (!strcmp(argv[2], "idle")) idle(comm);
  if (!strcmp(argv[2], "left")) left(comm);
  if (!strcmp(argv[2], "differ")) differ(comm, atoi(argv[3]), atoi(argv[4]));
  if (!strcmp(argv[2], "sizes")) sizes(comm, atoi(argv[3]), atoi(argv[4]));
  OK(ncclCommDestroy(comm));
  return 0;
}
