/* Every collective, on a communicator whose messages go as they are and on one that codes them without loss: the same bits.
 *
 * usage: lossless weights|noise always|zstd RANKS NODES LOGS
 *
 * LOGS names the file of each process, as NCCL_DEBUG_FILE does. With "weights" elements are small numbers, which shrink; with "noise" any bits.
 */
#include "seeded.h"

enum { COUNT = 260000, COMMS = 2 };

static ncclUniqueId coded_id;
static ncclComm_t comms[COMMS];
static const char *what, *setting;
static int rank;

/* Each call writes its result into `recv`, of the same bytes on both communicators. */
static void call(int which, int type, ncclRedOp_t op, size_t count, int root, const char *send, char *recv, ncclComm_t comm) {
  ncclDataType_t dtype = types[type];
  size_t block = count / (size_t)nranks, bytes = count * sizes[type];
  switch (which) {
    case 0: OK(ncclAllReduce(send, recv, count, dtype, op, comm, NULL)); break;
    case 1: OK(ncclAllGather(send, recv, block, dtype, comm, NULL)); break;
    case 2: OK(ncclReduceScatter(send, recv, block, dtype, op, comm, NULL)); break;
    case 3: OK(ncclBroadcast(send, recv, count, dtype, root, comm, NULL)); break;
    case 4: OK(ncclReduce(send, recv, count, dtype, op, root, comm, NULL)); break;
    case 5: OK(ncclAlltoAll(send, recv, block, dtype, comm, NULL)); break;
    case 6: OK(ncclGather(send, recv, block, dtype, root, comm, NULL)); break;
    case 7: OK(ncclScatter(send, recv, block, dtype, root, comm, NULL)); break;
    default:
      OK(ncclGroupStart());
      for (int peer = 0; peer < nranks; peer++) {
        OK(ncclSend(send + (size_t)peer, bytes / (size_t)nranks, ncclInt8, peer, comm, NULL));
        OK(ncclRecv(recv + (size_t)peer * (bytes / (size_t)nranks), bytes / (size_t)nranks, ncclInt8, peer, comm, NULL));
      }
      OK(ncclGroupEnd());
  }
}

static void *rank_main(void *argument) {
  rank = (int)(intptr_t)argument;
  char *send = malloc(COUNT * 8), *recv[COMMS];
  for (int i = 0; i < COMMS; i++) {
    setenv("STRATA_LOSSLESS", i ? setting : "off", 1);
    OK(ncclCommInitRank(&comms[i], nranks, i ? coded_id : id, rank));
    recv[i] = malloc(COUNT * 8);
  }
  for (int type = 0; type < TYPES; type++) {
    Random random = {(uint64_t)(rank * 100 + type)};
    for (size_t i = 0; i < COUNT; i++) put(type, send + i * sizes[type], (int)below(&random, 60) * (i % 5 ? 1 : -1));
    if (!strcmp(what, "noise"))
      for (size_t i = 0; i < COUNT; i++) memcpy(send + 8 * i, &(uint64_t){next(&random)}, 8);
    for (int which = 0; which <= 8; which++) {
      /* Sums of any bits may be NaN, of which neither sign nor payload is promised. */
      ncclRedOp_t op = strcmp(what, "noise") || type < 3 || type == 5 ? ncclSum : ncclMin;
      if (op == ncclMin && (which == 0 || which == 2 || which == 4)) continue;
      size_t count = COUNT - (size_t)(which * 1000 + type);
      for (int i = 0; i < COMMS; i++) {
        memset(recv[i], 0x5a, COUNT * 8);
        call(which, type, op, count, (which + type) % nranks, send, recv[i], comms[i]);
      }
      CHECK(!memcmp(recv[0], recv[1], COUNT * 8));
    }
  }
  for (int i = 0; i < COMMS; i++) {
    OK(ncclCommDestroy(comms[i]));
    free(recv[i]);
  }
  free(send);
  return NULL;
}

int main(int argc, char **argv) {
  alarm(100);
  CHECK(argc > 5);
  what = argv[1], setting = argv[2], nranks = atoi(argv[3]), nnodes = atoi(argv[4]);
  CHECK(nranks <= MOST_RANKS && nnodes > 1);
  setenv("NCCL_DEBUG", "INFO", 1), setenv("NCCL_DEBUG_FILE", argv[5], 1);
  OK(ncclGetUniqueId(&id));
  OK(ncclGetUniqueId(&coded_id));
  in_processes(rank_main);
  return 0;
}
