/* What a test can see of the double: the calls made from outside, the groups that were launched, what is left at exit,
 * and the text of the last error.
 *
 * With DOUBLE_RECORD=<prefix> each goes as a line to <prefix>.<pid>, in a form without addresses, so that two runs can
 * be compared. Calls that the double makes of itself are left out, also when they came back through a library in front
 * of it. */
#include "double.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Atomic long live_comms, made_comms, live_bytes, live_redops, live_registrations, live_windows;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int file = -1;
static int file_of;     /* The process that opened the file: a child has its own. */
static int settled = 0; /* 1: no record is wanted; 2: one is. */

static _Thread_local int inside;        /* Public functions of the double that this thread is in. */
static _Thread_local int own_group_end; /* The next ncclGroupEnd is one of ours, see expect_own_group_end. */

static int wanted(void) {
  if (settled == 0) settled = getenv("DOUBLE_RECORD") ? 2 : 1;
  return settled == 2;
}

/* In one piece, so that lines of threads do not mix. */
static void write_line(const char* text, size_t len) {
  pthread_mutex_lock(&lock);
  if (file_of != getpid()) {
    char path[4096];
    snprintf(path, sizeof(path), "%s.%d", getenv("DOUBLE_RECORD"), getpid());
    if (file >= 0) close(file);
    file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    file_of = getpid();
  }
  if (file >= 0 && write(file, text, len) < 0) perror("DOUBLE_RECORD");
  pthread_mutex_unlock(&lock);
}

static size_t append(char* text, size_t size, size_t len, const char* format, va_list arguments) {
  int added = vsnprintf(text + len, size - len, format, arguments);
  return added < 0 ? len : len + (size_t)added < size ? len + (size_t)added : size - 1;
}

void call_note(struct call* call, const char* format, ...) {
  if (!call->recorded) return;
  va_list arguments;
  va_start(arguments, format);
  call->len = append(call->text, sizeof(call->text), call->len, format, arguments);
  va_end(arguments);
}

void call_begin(struct call* call, const char* name) {
  call->recorded = inside++ == 0 && wanted();
  if (own_group_end && strcmp(name, "ncclGroupEnd") == 0) own_group_end = call->recorded = 0;
  if (!call->recorded) return;
  call->depth = group_depth();
  call->len = 0;
  call_note(call, "%s", name);
}

ncclResult_t call_end(struct call* call, ncclResult_t result) {
  inside--;
  if (!call->recorded) return result;
  call_note(call, " depth=%d -> %d\n", call->depth, (int)result);
  write_line(call->text, call->len);
  return result;
}

/* Ends a call that has no result code. */
void call_leave(struct call* call) {
  inside--;
  if (!call->recorded) return;
  call_note(call, " depth=%d\n", call->depth);
  write_line(call->text, call->len);
}

/* For threads of the double: nothing that they call is written down. */
void inside_enter(void) { inside++; }

void inside_leave(void) { inside--; }

/* A function whose last act is a tail call of ncclGroupEnd has left itself by then; the call is its own all the same. */
void expect_own_group_end(void) { own_group_end = 1; }

void call_comm(struct call* call, ncclComm_t comm) {
  if (!call->recorded) return;
  if (!comm) {
    call_note(call, " comm=null");
  } else if (comm->start_magic != COMM_MAGIC || comm->end_magic != COMM_MAGIC) {
    call_note(call, " comm=bad");
  } else {
    call_note(call, " comm=%s nranks=%d rank=%d", comm->name, comm->nranks, comm->rank);
  }
}

/* Streams are numbered as they are first used; the null stream is 0. */
void call_stream(struct call* call, cudaStream_t stream) {
  static cudaStream_t known[256];
  static int count;
  if (!call->recorded) return;
  int number = 0;
  if (stream) {
    pthread_mutex_lock(&lock);
    while (number < count && known[number] != stream) number++;
    if (number == count && count < 256) known[count++] = stream;
    pthread_mutex_unlock(&lock);
    number++;
  }
  call_note(call, " stream=%d", number);
}

static void note_reduction(struct call* call, const struct op* op) {
  static const char* names[] = {"sum", "prod", "max", "min", "avg"};
  if ((unsigned)op->op < 5) call_note(call, " op=%s", names[op->op]);
  else call_note(call, op->redop.used ? " op=premulsum" : " op=?");
}

void call_op(struct call* call, const struct op* op) {
  if (!call->recorded) return;
  call_comm(call, op->comm);
  call_note(call, " count=%zu type=%s", op->count, type_name(op->type));
  if (func_reduces(op->func)) note_reduction(call, op);
  if (op->func == SEND || op->func == RECV) call_note(call, " peer=%d", op->root);
  else if (func_has_root(op->func)) call_note(call, " root=%d", op->root);
  if (op->func != SEND && op->func != RECV) call_note(call, " inplace=%d", op_in_place(op));
  call_stream(call, op->stream);
}

/* The operations that run as one: "launch 2 | ncclSend ... | ncclRecv ...". */
void record_launch(struct op* const* ops, size_t count) {
  if (!wanted()) return;
  size_t size = 64 + count * 300, len = 0;
  char* text = malloc(size);
  if (!text) return;
  len += (size_t)snprintf(text, size, "launch %zu", count);
  for (size_t i = 0; i < count; i++) {
    struct call call = {.recorded = 1};
    call_op(&call, ops[i]);
    call.text[call.len] = 0;
    len += (size_t)snprintf(text + len, size - len, " | %s%.200s", ops[i]->name, call.text);
  }
  text[len++] = '\n';
  write_line(text, len);
  free(text);
}

__attribute__((destructor)) static void record_exit(void) {
  char text[256];
  if (!wanted() || file_of != getpid()) return; /* nothing was called here */
  int len = snprintf(text, sizeof(text), "exit comms=%ld made=%ld bytes=%ld redops=%ld registrations=%ld windows=%ld\n",
                     live_comms, made_comms, live_bytes, live_redops, live_registrations, live_windows);
  write_line(text, (size_t)len);
}

/* ---- errors ---- */

static char complaint[1024];

/* The process's last error, as ncclGetLastError tells it. */
void complain(const char* format, ...) {
  va_list arguments;
  char text[sizeof(complaint)];
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  pthread_mutex_lock(&lock);
  memcpy(complaint, text, sizeof(text));
  pthread_mutex_unlock(&lock);
  if (getenv("DOUBLE_DEBUG")) fprintf(stderr, "double %d: %s\n", getpid(), text);
}

const char* last_complaint(void) { return complaint; }
