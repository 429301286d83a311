/* Making communicators: at once, at the end of a group, or in the background, and the ids by which ranks find each
 * other. */
#include "double.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* What NCCL puts into an id; the other 88 bytes stay zero. */
struct id_content {
  uint64_t magic;
  uint16_t family, port;
  uint8_t address[24];
  int32_t nranks;
};

uint64_t id_of(const ncclUniqueId* id) {
  struct id_content content;
  memcpy(&content, id, sizeof(content));
  return content.magic;
}

ncclResult_t make_id(ncclUniqueId* id) {
  struct id_content content = {.family = 2, .port = 0x1234, .address = {127, 0, 0, 1}};
  REFUSE(!id, ncclInvalidArgument, "GetUniqueId : out argument is NULL");
  REFUSE(getrandom(&content.magic, sizeof(content.magic), 0) != sizeof(content.magic), ncclSystemError, "getrandom");
  memset(id, 0, sizeof(*id));
  memcpy(id, &content, sizeof(content));
  return ncclSuccess;
}

API(ncclResult_t, ncclGetUniqueId, ncclUniqueId* uniqueId) {
  struct call call;
  call_begin(&call, "ncclGetUniqueId");
  return call_end(&call, make_id(uniqueId));
}

#if DOUBLE_VERSION >= 22902
API(ncclResult_t, ncclCommGetUniqueId, ncclComm_t comm, ncclUniqueId* uniqueId) {
  struct call call;
  call_begin(&call, "ncclCommGetUniqueId");
  call_comm(&call, comm);
  ncclResult_t result = comm_check(comm);
  return call_end(&call, result == ncclSuccess ? make_id(uniqueId) : result);
}
#endif

static uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/* The id of a communicator without some ranks of the parent, which do not call: the others come to the same by
 * themselves. `list` stands for the list of those ranks, and may come more than once. */
ncclResult_t shrunk_id(struct ncclComm* parent, uint64_t list, uint64_t* id) {
  int at = 0;
  while (at < SHRINKS && parent->shrinks[at].times > 0 && parent->shrinks[at].list != list) at++;
  REFUSE(at == SHRINKS, ncclInvalidUsage, "the double shrinks a communicator in at most %d ways", SHRINKS);
  parent->shrinks[at].list = list;
  *id = mixed(parent->id ^ mixed(list ^ ((uint64_t)++parent->shrinks[at].times << 40)));
  return ncclSuccess;
}

static void place_in_split(struct job* job) {
  const struct post* mine = &job->post;
  for (int rank = 0; rank < job->parent->nranks; rank++) {
    const struct post* post = &job->parent->board->seats[rank].post[CONTROL];
    if (post->color != mine->color) continue;
    if (job->comm->nranks++ == 0) job->comm->id = id_of(&post->id); /* that of the first member */
    job->comm->rank += post->key < mine->key || (post->key == mine->key && rank < job->parent->rank);
  }
}

static ncclResult_t id_for_growth(struct job* job) {
  for (int rank = 0; rank < job->parent->nranks; rank++) {
    const struct post* post = &job->parent->board->seats[rank].post[CONTROL];
    if (post->has_id) job->comm->id = id_of(&post->id);
  }
  REFUSE(job->comm->id == 0, ncclInvalidArgument, "no rank gave the id to grow with");
  return ncclSuccess;
}

/* What the ranks of the parent have to tell each other first. */
static ncclResult_t consult_parent(struct job* job) {
  if (job->kind == JOB_INIT) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  TRY(turn_post(job->parent, CONTROL, &job->post));
  if (job->kind == JOB_SPLIT) place_in_split(job);
  else result = id_for_growth(job);
  TRY(turn_finish(job->parent, CONTROL));
  return result;
}

static void settle(struct ncclComm* comm, ncclResult_t result) {
  if (!comm) return;
  int in_progress = ncclInProgress;
  atomic_compare_exchange_strong(&comm->state, &in_progress, (int)result);
}

/* As the vendor's own threads do, this one calls public functions, which a library in front of the double sees. */
static void behave_like_a_vendor(struct job* job) {
  ncclResult_t state;
  const char* delay = getenv("DOUBLE_DELAY_MS");
  for (int left = delay ? atoi(delay) : 0; left >= 0 && !atomic_load(&job->comm->aborted); left -= 5) {
    int failed = ncclGroupStart() != ncclSuccess || ncclGroupEnd() != ncclSuccess ||
                 ncclCommGetAsyncError(job->comm, &state) != ncclSuccess || state != ncclInProgress;
    if (failed && !atomic_load(&job->comm->aborted)) {
      fprintf(stderr, "double: a public call of the vendor's own thread failed\n");
      abort();
    }
    if (left > 0) usleep(5000);
  }
}

void job_run(struct job* job) {
  struct ncclComm *comm = job->comm, *parent = job->parent;
  if (job->background) behave_like_a_vendor(job);
  job->result = consult_parent(job);
  int left_out = job->kind == JOB_SPLIT && job->post.color == NCCL_SPLIT_NOCOLOR;
  if (job->result == ncclSuccess && !left_out) job->result = board_take_seat(comm);
  /* A test wants this rank to fail when all others have done their part. */
  if (is_named_by(comm, "DOUBLE_FAIL_SPLIT")) job->result = ncclSystemError;
  if (job->result == ncclSuccess && !left_out) profile_begin(comm);
  comm->maker = NULL;
  int keep = job->result == ncclSuccess ? !left_out : job->background && !job->late;
  if (!keep) *job->out = NULL;
  else if (job->late) *job->out = comm;
  settle(comm, job->result);
  settle(parent, job->background ? job->result : ncclSuccess);
  atomic_fetch_sub(&comm->users, 1);
  if (!keep) comm_free(comm);
  if (parent) atomic_fetch_sub(&parent->users, 1); /* The last access: the parent may be destroyed now. */
}

static void* run_detached(void* argument) {
  inside_enter();
  job_run(argument);
  free(argument);
  return NULL;
}

/* Runs the job, or starts it. */
ncclResult_t job_launch(const struct job* job) {
  struct job* moved = malloc(sizeof(*moved));
  pthread_t thread;
  if (!moved) abort();
  *moved = *job;
  if (job->background) {
    if (pthread_create(&thread, NULL, run_detached, moved) != 0) abort();
    pthread_detach(thread);
    return ncclInProgress;
  }
  job_run(moved);
  ncclResult_t result = moved->result;
  free(moved);
  return result;
}

/* Takes over a job: into the open group, or at once. */
ncclResult_t job_submit(const struct job* job) {
  atomic_fetch_add(&job->comm->users, 1);
  if (job->parent) atomic_fetch_add(&job->parent->users, 1);
  if (job->parent && !atomic_load(&job->parent->aborted)) job->comm->maker = job->parent;
  if (job->background && job->parent) atomic_store(&job->parent->state, ncclInProgress);
  if (group_depth() == 0) return job_launch(job);
  ncclResult_t result = group_take_job(job);
  if (result != ncclSuccess) job_drop(job);
  return result == ncclSuccess && job->background ? ncclInProgress : result;
}

/* Forgets a job that was never launched. */
void job_drop(const struct job* job) {
  settle(job->parent, ncclSuccess);
  if (!job->late) *job->out = NULL;
  atomic_fetch_sub(&job->comm->users, 1);
  comm_free(job->comm);
  if (job->parent) atomic_fetch_sub(&job->parent->users, 1);
}
