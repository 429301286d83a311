/* The example's provider, which goes wrong as PROVIDER_FAULT says: what, and where it matters on which rank (open:1). */
#define strata_provider_plugin good_plugin
#include "../../examples/provider/mesh.c"
#undef strata_provider_plugin

static int my_rank;

/* Whether this fault is the one, on this rank. */
static int is_fault(const char *what) {
  const char *fault = getenv("PROVIDER_FAULT");
  size_t length = strlen(what);
  if (!fault || strncmp(fault, what, length)) return 0;
  return fault[length] == 0 || (fault[length] == ':' && atoi(fault + length + 1) == my_rank);
}

static int bad_open(const strata_provider_site *site, void **handle, void *blob, size_t *blob_bytes, char *why) {
  my_rank = site->rank;
  if (is_fault("open")) {
    snprintf(why, STRATA_PROVIDER_TEXT_BYTES, "out of order");
    return 5;
  }
  return open_mesh(site, handle, blob, blob_bytes, why);
}

static int bad_connect(void *handle, const void *const *blobs, const size_t *blob_bytes, int *done, char *why) {
  if (is_fault("connect")) return 6;
  if (is_fault("unconnected")) return 0;
  return connect_mesh(handle, blobs, blob_bytes, done, why);
}

static uint64_t bad_most_bytes(void *handle, int collective, int dtype, int op, int uneven) {
  if (is_fault("uneven") && uneven) return 1000;
  return is_fault("most") ? 0 : most_bytes(handle, collective, dtype, op, uneven);
}

static int bad_start(void *handle, const strata_provider_call *call, void **request, char *why) {
  if (is_fault("start")) {
    /* A text that fills its room, without an end. */
    memset(why, 'x', STRATA_PROVIDER_TEXT_BYTES);
    return 7;
  }
  return start(handle, call, request, why);
}

static int bad_test(void *handle, void *request, int *done, char *why) {
  if (is_fault("test")) {
    snprintf(why, STRATA_PROVIDER_TEXT_BYTES, "it broke");
    return 8;
  }
  return is_fault("never") ? 0 : test(handle, request, done, why);
}

static strata_provider bad = {
    STRATA_PROVIDER_VERSION, sizeof bad, "mesh", bad_open, bad_connect, bad_most_bytes, bad_start, bad_test, abort_mesh,
    close_all,
};

const strata_provider *strata_provider_plugin(void) {
  if (is_fault("null")) return NULL;
  if (is_fault("version")) bad.version = 77;
  if (is_fault("size")) bad.size = 40;
  if (is_fault("name")) bad.name = "no word";
  if (is_fault("mpi")) bad.name = "mpi";
  if (is_fault("lacks")) bad.test = NULL;
  return &bad;
}
