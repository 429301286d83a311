/* A provider of collectives over TCP, each rank connected with each other one: all but reduce, with blocks of one size or of
 * different sizes.
 *
 *   cc -O2 -shared -fPIC -Iinclude -o libmesh.so examples/provider/mesh.c
 *   STRATA_PROVIDERS=$PWD/libmesh.so STRATA_ALLREDUCE_ALGO=provider:mesh strata launch -n 4 -- ./program
 *
 * A call is a message from each rank that has something to each rank that needs it, with a header that says which call it belongs
 * to. Whoever reduces folds all ranks' vectors in rank order, so that all ranks get the same bits. Nothing waits: connect,
 * start and test move what the sockets take. EXAMPLE_MESH_ADDRESS is the address at which the other ranks reach this one. */
#define _GNU_SOURCE
#include "strata_plugin.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

/* What precedes a message. */
struct header {
  uint64_t call;  /* the number of the call on this communicator */
  uint64_t bytes; /* of the message */
};

/* What a rank tells the others: where it listens, and what proves that who connects is one of them. */
struct card {
  struct sockaddr_in address;
  uint64_t cookie;
};

/* What a rank says when it has connected. */
struct hello {
  uint64_t cookie;
  int32_t rank;
  int32_t reserved;
};

/* Who has connected and not said hello yet. */
struct guest {
  int socket;
  size_t bytes; /* of the hello */
  struct hello hello;
};
enum { GUESTS = 64 };

/* The way to one rank, and its part of the call. */
struct peer {
  int socket, is_connected;
  struct header out, in;
  uint64_t expected;            /* bytes that it is to send */
  const char *send;             /* what goes there, or NULL */
  char *recv;                   /* where what it sends goes, or NULL */
  uint64_t sent, received;      /* bytes so far, headers included */
  int is_sending, is_receiving; /* whether there is a message each way */
};

struct mesh {
  int rank, nranks, listener;
  uint64_t calls, cookie, came;
  struct guest guests[GUESTS];
  struct peer *peers;
  strata_provider_call call;
  char *vectors; /* of a reduction: one for each rank */
  uint64_t room;
};

static int fail(char *why, const char *what) {
  snprintf(why, STRATA_PROVIDER_TEXT_BYTES, "%s: %s", what, strerror(errno));
  return 1;
}

/* Nobody connects any more. */
static void close_guests(struct mesh *mesh) {
  for (int at = 0; at < GUESTS; at++) {
    if (mesh->guests[at].socket >= 0) close(mesh->guests[at].socket);
    mesh->guests[at].socket = -1;
  }
  if (mesh->listener >= 0) close(mesh->listener);
  mesh->listener = -1;
}

static void close_all(void *handle) {
  struct mesh *mesh = handle;
  for (int rank = 0; mesh->peers && rank < mesh->nranks; rank++)
    if (mesh->peers[rank].socket >= 0) close(mesh->peers[rank].socket);
  close_guests(mesh);
  free(mesh->peers);
  free(mesh->vectors);
  free(mesh);
}

static int open_mesh(const strata_provider_site *site, void **handle, void *blob, size_t *blob_bytes, char *why) {
  struct mesh *mesh = calloc(1, sizeof *mesh);
  if (!mesh) return fail(why, "no memory");
  mesh->rank = site->rank, mesh->nranks = site->nranks, mesh->listener = -1;
  for (int at = 0; at < GUESTS; at++) mesh->guests[at].socket = -1;
  mesh->peers = calloc(site->nranks, sizeof *mesh->peers);
  for (int rank = 0; mesh->peers && rank < site->nranks; rank++) mesh->peers[rank].socket = -1;
  struct card card;
  memset(&card, 0, sizeof card);
  socklen_t length = sizeof card.address;
  const char *address = getenv("EXAMPLE_MESH_ADDRESS");
  card.address.sin_family = AF_INET;
  int failed = !mesh->peers || inet_pton(AF_INET, address ? address : "127.0.0.1", &card.address.sin_addr) != 1 ||
               getrandom(&mesh->cookie, sizeof mesh->cookie, 0) != sizeof mesh->cookie ||
               (mesh->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) < 0 ||
               bind(mesh->listener, (struct sockaddr *)&card.address, length) ||
               listen(mesh->listener, site->nranks) ||
               getsockname(mesh->listener, (struct sockaddr *)&card.address, &length);
  if (failed) {
    fail(why, "listening");
    close_all(mesh);
    return 1;
  }
  card.cookie = mesh->cookie;
  memcpy(blob, &card, sizeof card);
  *blob_bytes = sizeof card;
  *handle = mesh;
  return 0;
}

/* Whether a socket can be read or written now. */
static int is_ready(int socket, short events) {
  struct pollfd waits = {socket, events, 0};
  return poll(&waits, 1, 0) > 0;
}

/* Goes on connecting to a rank that listens; 1 when that is done. */
static int call_rank(struct mesh *mesh, int rank, const struct card *card) {
  struct hello hello = {card->cookie, mesh->rank, 0};
  struct peer *peer = &mesh->peers[rank];
  int error = 0;
  socklen_t length = sizeof error;
  if (peer->is_connected) return 1;
  if (peer->socket < 0) {
    peer->socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (peer->socket < 0) return -1;
    int made = connect(peer->socket, (const struct sockaddr *)&card->address, sizeof card->address);
    if (made && errno != EINPROGRESS) return -1;
  }
  if (!is_ready(peer->socket, POLLOUT)) return 0;
  if (getsockopt(peer->socket, SOL_SOCKET, SO_ERROR, &error, &length)) return -1;
  if (error) {
    errno = error;
    return -1;
  }
  /* So few bytes always fit. */
  if (send(peer->socket, &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) return -1;
  peer->is_connected = 1;
  return 1;
}

/* Takes what connects. Who does not say hello as a rank does is closed, when others come. */
static int take_ranks(struct mesh *mesh) {
  for (;;) {
    int made = accept4(mesh->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (made < 0 && (errno == ECONNABORTED || errno == EINTR)) continue;
    if (made < 0) break;
    struct guest *guest = &mesh->guests[mesh->came++ % GUESTS];
    if (guest->socket >= 0) close(guest->socket);
    *guest = (struct guest){.socket = made};
  }
  if (errno != EAGAIN) return -1;
  for (int at = 0; at < GUESTS; at++) {
    struct guest *guest = &mesh->guests[at];
    if (guest->socket < 0) continue;
    char *to = (char *)&guest->hello + guest->bytes;
    ssize_t more = recv(guest->socket, to, sizeof guest->hello - guest->bytes, 0);
    if (more < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    guest->bytes += more > 0 ? more : 0;
    if (more > 0 && guest->bytes < sizeof guest->hello) continue;
    int rank = guest->hello.rank;
    int is_ours = more > 0 && guest->hello.cookie == mesh->cookie && rank > mesh->rank && rank < mesh->nranks &&
                  !mesh->peers[rank].is_connected;
    if (is_ours) {
      mesh->peers[rank].socket = guest->socket;
      mesh->peers[rank].is_connected = 1;
    } else {
      close(guest->socket);
    }
    guest->socket = -1;
  }
  return 0;
}

/* Connects with the ranks before this one, and is connected with by those behind it. */
static int connect_mesh(void *handle, const void *const *blobs, const size_t *blob_bytes, int *done, char *why) {
  struct mesh *mesh = handle;
  int one = 1, missing = 0;
  for (int rank = 0; rank < mesh->rank; rank++) {
    struct card card;
    if (blob_bytes[rank] != sizeof card) {
      snprintf(why, STRATA_PROVIDER_TEXT_BYTES, "rank %d told %zu bytes", rank, blob_bytes[rank]);
      return 1;
    }
    memcpy(&card, blobs[rank], sizeof card);
    int made = call_rank(mesh, rank, &card);
    if (made < 0) return fail(why, "connecting to a rank");
    missing += !made;
  }
  if (take_ranks(mesh)) return fail(why, "taking a rank's connection");
  for (int rank = mesh->rank + 1; rank < mesh->nranks; rank++) missing += !mesh->peers[rank].is_connected;
  if (missing) return 0;
  for (int rank = 0; rank < mesh->nranks; rank++)
    if (rank != mesh->rank) setsockopt(mesh->peers[rank].socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  close_guests(mesh);
  *done = 1;
  return 0;
}

/* ncclInt32, ncclInt64, ncclFloat32 and ncclFloat64; ncclSum, ncclProd, ncclMax and ncclMin. */
enum { INT32 = 2, INT64 = 4, FLOAT32 = 7, FLOAT64 = 8 };
enum { SUM = 0, PROD = 1, MAX = 2, MIN = 3 };

static uint64_t most_bytes(void *handle, int collective, int dtype, int op, int uneven) {
  (void)handle;
  (void)uneven;
  switch (collective) {
    case STRATA_ALL_GATHER:
    case STRATA_BROADCAST:
    case STRATA_ALL_TO_ALL:
    case STRATA_GATHER:
    case STRATA_SCATTER:
      return UINT64_MAX;
    case STRATA_ALL_REDUCE:
    case STRATA_REDUCE_SCATTER:
      /* Each rank keeps the vectors of all. */
      return (dtype == INT32 || dtype == INT64 || dtype == FLOAT32 || dtype == FLOAT64) && op >= SUM && op <= MIN
                 ? 64 << 20
                 : 0;
    default:
      return 0;
  }
}

#define FOLD(TYPE, WIDE)                                                                     \
  do {                                                                                       \
    TYPE *to = into;                                                                         \
    const TYPE *from = vector;                                                               \
    for (uint64_t at = 0; at < count; at++) switch (op) {                                    \
        case SUM: to[at] = (TYPE)((WIDE)to[at] + (WIDE)from[at]); break;                     \
        case PROD: to[at] = (TYPE)((WIDE)to[at] * (WIDE)from[at]); break;                    \
        case MAX: to[at] = to[at] > from[at] ? to[at] : from[at]; break;                     \
        default: to[at] = to[at] < from[at] ? to[at] : from[at];                             \
      }                                                                                      \
  } while (0)

/* Folds a vector into another one. Integers wrap, which C has for those without a sign. */
static void fold(int dtype, int op, void *into, const void *vector, uint64_t count) {
  switch (dtype) {
    case INT32: FOLD(int32_t, uint32_t); break;
    case INT64: FOLD(int64_t, uint64_t); break;
    case FLOAT32: FOLD(float, float); break;
    default: FOLD(double, double);
  }
}

static void message_to(struct mesh *mesh, int rank, const void *bytes, uint64_t length) {
  struct peer *peer = &mesh->peers[rank];
  peer->send = bytes, peer->sent = 0, peer->is_sending = 1;
  peer->out = (struct header){mesh->calls, length};
}

static void message_from(struct mesh *mesh, int rank, void *bytes, uint64_t length) {
  struct peer *peer = &mesh->peers[rank];
  peer->recv = bytes, peer->received = 0, peer->is_receiving = 1;
  peer->expected = length;
}

/* A block of a buffer. */
struct block {
  char *at;
  uint64_t count, bytes;
};

/* Block `index` of a buffer. Without lists all blocks have the call's count and follow one another. */
static struct block block_of(const strata_provider_call *call, const void *buffer, int index, const uint64_t *counts,
                             const uint64_t *places) {
  uint64_t count = counts ? counts[index] : call->count;
  uint64_t place = counts ? places[index] : call->count * index;
  return (struct block){(char *)buffer + place * call->elem_bytes, count, count * call->elem_bytes};
}

static struct block sent(const strata_provider_call *call, int index) {
  return block_of(call, call->send, index, call->send_counts, call->send_places);
}

static struct block received(const strata_provider_call *call, int index) {
  return block_of(call, call->recv, index, call->recv_counts, call->recv_places);
}

static int reduces(const strata_provider_call *call) {
  return call->collective == STRATA_ALL_REDUCE || call->collective == STRATA_REDUCE_SCATTER;
}

/* What this rank has for `rank`, itself included; no address where it has nothing. */
static struct block block_for(const struct mesh *mesh, const strata_provider_call *call, int rank) {
  struct block none = {NULL, 0, 0};
  int is_root = mesh->rank == call->root;
  switch (call->collective) {
    case STRATA_REDUCE_SCATTER:
    case STRATA_ALL_TO_ALL: return sent(call, rank);
    case STRATA_SCATTER: return is_root ? sent(call, rank) : none;
    case STRATA_GATHER: return rank == call->root ? sent(call, 0) : none;
    case STRATA_BROADCAST: return is_root ? received(call, 0) : none;
    default: return sent(call, 0); /* STRATA_ALL_REDUCE, STRATA_ALL_GATHER */
  }
}

/* Where what this rank gets of `rank`, itself included, goes; no address where it gets nothing. */
static struct block block_from(const struct mesh *mesh, const strata_provider_call *call, int rank) {
  struct block none = {NULL, 0, 0}, own = {NULL, 0, 0};
  switch (call->collective) {
    case STRATA_ALL_REDUCE:
    case STRATA_REDUCE_SCATTER:
      own = received(call, 0);
      own.at = mesh->vectors + rank * own.bytes;
      return own;
    case STRATA_ALL_GATHER:
    case STRATA_ALL_TO_ALL: return received(call, rank);
    case STRATA_GATHER: return mesh->rank == call->root ? received(call, rank) : none;
    default: return rank == call->root ? received(call, 0) : none; /* STRATA_SCATTER, STRATA_BROADCAST */
  }
}

/* Whether this rank has a part of the call that goes to, or comes from, a rank. Also a block without elements is told: so counts that
 * differ are noticed. */
static int has_part(const strata_provider_call *call, int from, int to) {
  switch (call->collective) {
    case STRATA_GATHER: return to == call->root;
    case STRATA_SCATTER:
    case STRATA_BROADCAST: return from == call->root;
    default: return 1;
  }
}

static int start(void *handle, const strata_provider_call *call, void **request, char *why) {
  struct mesh *mesh = handle;
  uint64_t vectors = reduces(call) ? received(call, 0).bytes * mesh->nranks : 0;
  if (mesh->room < vectors) {
    free(mesh->vectors);
    mesh->room = 0;
    mesh->vectors = malloc(vectors);
    if (!mesh->vectors) return fail(why, "no memory for the ranks' vectors");
    mesh->room = vectors;
  }
  mesh->calls++;
  mesh->call = *call;
  for (int rank = 0; rank < mesh->nranks; rank++) {
    if (rank == mesh->rank) continue;
    struct block out = block_for(mesh, call, rank), in = block_from(mesh, call, rank);
    if (has_part(call, mesh->rank, rank)) message_to(mesh, rank, out.at, out.bytes);
    if (has_part(call, rank, mesh->rank)) message_from(mesh, rank, in.at, in.bytes);
  }
  struct block out = block_for(mesh, call, mesh->rank), in = block_from(mesh, call, mesh->rank);
  /* In place a block lies there already, but for one that is reduced. */
  int is_there = call->collective == STRATA_BROADCAST || (call->in_place && !reduces(call));
  if (has_part(call, mesh->rank, mesh->rank) && !is_there && in.bytes) memcpy(in.at, out.at, in.bytes);
  *request = mesh;
  return 0;
}

/* Sends what the socket takes; -1 for an error. */
static int push(struct peer *peer) {
  while (peer->is_sending) {
    uint64_t head = sizeof peer->out, all = head + peer->out.bytes;
    int in_header = peer->sent < head;
    const char *from = in_header ? (const char *)&peer->out + peer->sent : peer->send + (peer->sent - head);
    ssize_t sent = send(peer->socket, from, (in_header ? head : all) - peer->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno == EAGAIN || errno == EINTR ? 0 : -1;
    peer->sent += sent;
    if (peer->sent == all) peer->is_sending = 0;
  }
  return 0;
}

/* Receives what has come; -1 for an error. */
static int pull(struct mesh *mesh, struct peer *peer) {
  while (peer->is_receiving) {
    uint64_t head = sizeof peer->in, all = head + peer->expected;
    int in_header = peer->received < head;
    struct header *header = &peer->in;
    char *to = in_header ? (char *)header + peer->received : peer->recv + (peer->received - head);
    ssize_t came = recv(peer->socket, to, (in_header ? head : all) - peer->received, MSG_DONTWAIT);
    if (came == 0) errno = ECONNRESET;
    if (came < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (came <= 0) return -1;
    peer->received += came;
    if (in_header && peer->received == head && (header->call != mesh->calls || header->bytes != peer->expected)) {
      errno = EPROTO;
      return -1;
    }
    if (peer->received == all) peer->is_receiving = 0;
  }
  return 0;
}

static int test(void *handle, void *request, int *done, char *why) {
  struct mesh *mesh = handle;
  int is_over = 1;
  (void)request;
  for (int rank = 0; rank < mesh->nranks; rank++) {
    struct peer *peer = &mesh->peers[rank];
    if (rank == mesh->rank) continue;
    if (push(peer) || pull(mesh, peer)) {
      snprintf(why, STRATA_PROVIDER_TEXT_BYTES, "call %llu, between ranks %d and %d: %s",
               (unsigned long long)mesh->calls, mesh->rank, rank, strerror(errno));
      return 1;
    }
    is_over &= !peer->is_sending && !peer->is_receiving;
  }
  struct block own = is_over && reduces(&mesh->call) ? received(&mesh->call, 0) : (struct block){NULL, 0, 0};
  if (own.bytes) memcpy(own.at, mesh->vectors, own.bytes);
  for (int rank = 1; rank < mesh->nranks && own.bytes; rank++)
    fold(mesh->call.dtype, mesh->call.op, own.at, mesh->vectors + rank * own.bytes, own.count);
  *done = is_over;
  return 0;
}

static void abort_mesh(void *handle) {
  struct mesh *mesh = handle;
  /* Whoever waits for this rank finds its connections closed. */
  for (int rank = 0; rank < mesh->nranks; rank++) {
    struct peer *peer = &mesh->peers[rank];
    if (peer->socket >= 0) close(peer->socket);
    peer->socket = -1, peer->is_sending = peer->is_receiving = 0;
  }
}

static const strata_provider provider = {
    STRATA_PROVIDER_VERSION, sizeof provider, "mesh", open_mesh, connect_mesh, most_bytes, start, test, abort_mesh,
    close_all,
};

const strata_provider *strata_provider_plugin(void) { return &provider; }
