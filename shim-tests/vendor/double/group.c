/* Groups: what a thread calls between ncclGroupStart and ncclGroupEnd is kept and done at the outermost end.
 *
 * Communicators of a group work side by side, each on its own thread. No operation of a group sees the results of
 * another: outputs are written when all operations have read their inputs. NCCL promises no order, and whoever counts on
 * one is found out. */
#include "double.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local struct {
  int depth, blocking; /* blocking: of the group's communicators; -1 when there are none yet */
  ncclResult_t error;
  struct op* ops;
  size_t op_count;
  struct job* jobs;
  size_t job_count;
} group = {.blocking = -1};

/* Operations that were moved out of a thread's group, and what became of them. */
struct batch {
  struct op* ops;
  size_t count;
  int running; /* on a stream of the soft GPU */
};

/* The operations of one communicator. */
struct lane {
  struct op** ops;
  size_t count;
  ncclResult_t result;
};

int group_depth(void) { return group.depth; }

ncclResult_t group_start(void) {
  if (group.depth++ == 0) {
    group.error = ncclSuccess;
    group.blocking = -1;
  }
  return ncclSuccess;
}

void group_fail(ncclResult_t result) {
  if (group.depth > 0 && group.error == ncclSuccess && result != ncclInProgress) group.error = result;
}

int group_uses(ncclComm_t comm) {
  for (size_t i = 0; i < group.op_count; i++)
    if (group.ops[i].comm == comm) return 1;
  for (size_t i = 0; i < group.job_count; i++)
    if (group.jobs[i].comm == comm || group.jobs[i].parent == comm) return 1;
  return 0;
}

static ncclResult_t same_blocking(int blocking) {
  REFUSE(group.blocking != -1 && group.blocking != blocking, ncclInvalidArgument,
         "blocking and nonblocking communicators in one group");
  group.blocking = blocking;
  return ncclSuccess;
}

ncclResult_t group_add_op(struct op* op) {
  TRY(same_blocking(op->comm->blocking));
  struct op* more = realloc(group.ops, (group.op_count + 1) * sizeof(*more));
  if (!more) return ncclSystemError;
  group.ops = more;
  group.ops[group.op_count++] = *op;
  atomic_fetch_add(&op->comm->users, 1);
  return ncclSuccess;
}

ncclResult_t group_take_job(const struct job* job) {
  TRY(same_blocking(!job->background));
  for (size_t i = 0; i < group.job_count; i++)
    REFUSE(job->background && job->parent && group.jobs[i].parent == job->parent, ncclInvalidUsage,
           "two nonblocking jobs for one communicator in a group");
  struct job* more = realloc(group.jobs, (group.job_count + 1) * sizeof(*more));
  if (!more) return ncclSystemError;
  group.jobs = more;
  group.jobs[group.job_count++] = *job;
  return ncclSuccess;
}

static void release_ops(struct batch* batch) {
  for (size_t i = 0; i < batch->count; i++) {
    free(batch->ops[i].result);
    struct ncclComm* comm = batch->ops[i].comm;
    atomic_fetch_sub(&comm->users, 1);
    if (batch->running) atomic_fetch_sub(&comm->running, 1);
  }
  free(batch->ops);
}

static struct batch take_ops(void) {
  struct batch batch = {group.ops, group.op_count, 0};
  group.ops = NULL;
  group.op_count = 0;
  return batch;
}

ncclResult_t group_drop(void) {
  struct batch batch = take_ops();
  release_ops(&batch);
  for (size_t i = 0; i < group.job_count; i++) job_drop(&group.jobs[i]);
  free(group.jobs);
  group.jobs = NULL;
  group.job_count = 0;
  return group.error;
}

static void* run_lane(void* argument) {
  struct lane* lane = argument;
  inside_enter();
  lane->result = ops_run(lane->ops, lane->count);
  return NULL;
}

/* Sorts the operations by communicator, in order within each; returns the number of lanes. */
static size_t make_lanes(struct batch* batch, struct lane* lanes, struct op** sorted) {
  size_t lane_count = 0, placed = 0;
  for (size_t i = 0; i < batch->count; i++) {
    int known = 0;
    for (size_t k = 0; k < lane_count; k++) known |= lanes[k].ops[0]->comm == batch->ops[i].comm;
    if (known) continue;
    struct lane* lane = &lanes[lane_count++];
    lane->ops = sorted + placed;
    lane->count = 0;
    for (size_t k = i; k < batch->count; k++)
      if (batch->ops[k].comm == batch->ops[i].comm) sorted[placed++] = &batch->ops[k], lane->count++;
  }
  return lane_count;
}

static ncclResult_t run_lanes(struct lane* lanes, size_t count) {
  pthread_t* threads = calloc(count, sizeof(*threads));
  ncclResult_t result = threads ? ncclSuccess : ncclSystemError;
  if (count == 1) {
    lanes[0].result = ops_run(lanes[0].ops, lanes[0].count);
  } else if (threads) {
    for (size_t i = 0; i < count; i++)
      if (pthread_create(&threads[i], NULL, run_lane, &lanes[i]) != 0) abort();
    for (size_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
  }
  free(threads);
  for (size_t i = 0; i < count; i++) {
    if (lanes[i].result == ncclSuccess) continue;
    struct ncclComm* comm = lanes[i].ops[0]->comm;
    if (!atomic_load(&comm->revoked)) atomic_store(&comm->state, lanes[i].result);
    if (result == ncclSuccess) result = lanes[i].result;
  }
  return result;
}

static ncclResult_t run_batch(struct batch* batch) {
  struct lane* lanes = calloc(batch->count, sizeof(*lanes));
  struct op** sorted = calloc(batch->count, sizeof(struct op*));
  ncclResult_t result = ncclSystemError;
  if (lanes && sorted) {
    size_t count = make_lanes(batch, lanes, sorted);
    record_launch(sorted, batch->count);
    result = run_lanes(lanes, count);
    for (size_t i = 0; i < count; i++)
      for (size_t k = 0; lanes[i].result == ncclSuccess && k < lanes[i].count; k++) op_deliver(lanes[i].ops[k]);
  }
  free(lanes);
  free(sorted);
  return result;
}

static void* run_in_background(void* argument) {
  struct batch* batch = argument;
  inside_enter();
  run_batch(batch);
  for (size_t i = 0; i < batch->count; i++) {
    int in_progress = ncclInProgress;
    atomic_compare_exchange_strong(&batch->ops[i].comm->state, &in_progress, ncclSuccess);
  }
  release_ops(batch);
  free(batch);
  return NULL;
}

/* Whenever the graph is launched into which it was captured; it stays as it was captured. */
static void run_in_graph(void* argument) {
  struct batch batch = *(struct batch*)argument;
  size_t bytes = batch.count * sizeof(*batch.ops);
  batch.ops = memcpy(malloc(bytes), batch.ops, bytes);
  inside_enter();
  run_batch(&batch);
  inside_leave();
  for (size_t i = 0; i < batch.count; i++) free(batch.ops[i].result);
  free(batch.ops);
}

/* On a stream of the soft GPU, at its time. Failures show in the communicators. */
static void run_on_stream(void* argument) {
  struct batch* batch = argument;
  batch->running = 1;
  for (size_t i = 0; i < batch->count; i++) atomic_fetch_add(&batch->ops[i].comm->running, 1);
  inside_enter();
  run_batch(batch);
  inside_leave();
  release_ops(batch);
  free(batch);
}

static ncclResult_t enqueue_ops(struct batch batch) {
  struct batch* moved = malloc(sizeof(*moved));
  if (!moved) return ncclSystemError;
  *moved = batch;
  for (size_t i = 0; i < batch.count; i++) {
    batch.ops[i].send = gpu_memory(batch.ops[i].send);
    batch.ops[i].recv = gpu_memory(batch.ops[i].recv);
    batch.ops[i].bias = gpu_memory(batch.ops[i].bias);
    batch.ops[i].redop.pointer = gpu_memory(batch.ops[i].redop.pointer);
  }
  int captured = gpu_is_captured(batch.ops[0].stream);
  if (gpu_enqueue(batch.ops, batch.count, captured ? run_in_graph : run_on_stream, moved) == 0) {
    /* A graph may be launched as often as its program likes, and needs the communicators alive only then. */
    for (size_t i = 0; captured && i < batch.count; i++) atomic_fetch_sub(&batch.ops[i].comm->users, 1);
    return ncclSuccess;
  }
  complain("the driver refuses an operation");
  release_ops(moved);
  free(moved);
  return ncclUnhandledCudaError;
}

static ncclResult_t launch_ops(void) {
  struct batch batch = take_ops();
  if (batch.count == 0) return ncclSuccess;
  if (gpu_present()) return enqueue_ops(batch);
  if (batch.ops[0].comm->blocking) {
    ncclResult_t result = run_batch(&batch);
    release_ops(&batch);
    return result;
  }
  struct batch* moved = malloc(sizeof(*moved));
  pthread_t thread;
  if (!moved) return ncclSystemError;
  *moved = batch;
  for (size_t i = 0; i < batch.count; i++) atomic_store(&batch.ops[i].comm->state, ncclInProgress);
  if (pthread_create(&thread, NULL, run_in_background, moved) != 0) abort();
  pthread_detach(thread);
  return ncclInProgress;
}

/* The jobs of a group from one of them on. */
struct jobs {
  struct job* first;
  size_t count;
  pthread_t thread;
};

/* Runs the first job, and then the others that the same communicator is asked for, in their order. */
static void* run_jobs(void* argument) {
  struct jobs* jobs = argument;
  inside_enter();
  const struct ncclComm* parent = jobs->first->parent;
  job_run(jobs->first);
  for (size_t i = 1; i < jobs->count; i++)
    if (parent && jobs->first[i].parent == parent) job_run(&jobs->first[i]);
  return NULL;
}

static int has_a_thread(const struct job* jobs, size_t index) {
  if (jobs[index].background) return 0;
  for (size_t i = 0; i < index; i++)
    if (jobs[index].parent && jobs[i].parent == jobs[index].parent) return 0;
  return 1;
}

/* Background jobs are on their way after this, the others done. */
static ncclResult_t launch_jobs(void) {
  struct job* jobs = group.jobs;
  size_t count = group.job_count;
  ncclResult_t result = ncclSuccess;
  group.jobs = NULL;
  group.job_count = 0;
  struct jobs* threads = calloc(count + 1, sizeof(*threads));
  if (!threads) return ncclSystemError;
  for (size_t i = 0; i < count; i++) {
    threads[i] = (struct jobs){&jobs[i], count - i, 0};
    if (jobs[i].background) result = job_launch(&jobs[i]);
    else if (has_a_thread(jobs, i) && pthread_create(&threads[i].thread, NULL, run_jobs, &threads[i]) != 0) abort();
  }
  for (size_t i = 0; i < count; i++)
    if (has_a_thread(jobs, i)) pthread_join(threads[i].thread, NULL);
  for (size_t i = 0; i < count; i++)
    if (!jobs[i].background && result == ncclSuccess) result = jobs[i].result;
  free(threads);
  free(jobs);
  return result;
}

ncclResult_t group_end(void) {
  REFUSE(group.depth == 0, ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (--group.depth > 0) return ncclSuccess;
  if (group.error != ncclSuccess) return group_drop();
  ncclResult_t jobs = launch_jobs();
  if (jobs != ncclSuccess && jobs != ncclInProgress) group.error = jobs;
  if (group.error != ncclSuccess) return group_drop();
  ncclResult_t ops = launch_ops();
  return ops != ncclSuccess ? ops : jobs;
}

/* Ends the group without doing anything; returns how many operations it had. */
int group_simulate(void) {
  int ops = (int)group.op_count;
  if (--group.depth == 0) group_drop();
  return ops;
}
