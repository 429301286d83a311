/* Processes of a launcher find each other by strataGetWorldId. Each is a child that has a launcher's variables. */
#include "check.h"
#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 3

static void set(const char* name, int value) {
  char text[16];
  snprintf(text, sizeof text, "%d", value);
  setenv(name, text, 1);
}

static int free_port(void) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof address;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(fd >= 0 && bind(fd, (struct sockaddr*)&address, size) == 0);
  CHECK(getsockname(fd, (struct sockaddr*)&address, &size) == 0 && close(fd) == 0);
  return ntohs(address.sin_port);
}

static void expect(int rank, int nranks) {
  ncclUniqueId id;
  ncclComm_t comm;
  int found_rank = -1, found = -1, data = rank + 1;
  OK(strataGetWorldId(&id, &found, &found_rank));
  CHECK(found == nranks && found_rank == rank);
  OK(strataCommInitHost(&comm, found, id, found_rank, 30000));
  OK(ncclAllReduce(&data, &data, 1, ncclInt, ncclSum, comm, NULL));
  CHECK(data == nranks * (nranks + 1) / 2);
  OK(ncclCommDestroy(comm));
}

static void child(int rank, int port, const char* rank_name, const char* size_name) {
  set(rank_name, rank);
  set(size_name, RANKS);
  set("MASTER_PORT", port);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  alarm(60);
  /* Again: an id is for one communicator, and the port serves another time. */
  expect(rank, RANKS);
  expect(rank, RANKS);
  exit(0);
}

static void children(const char* rank_name, const char* size_name) {
  int port = free_port(), status;
  for (int rank = 0; rank < RANKS; rank++)
    if (fork() == 0) child(rank, port, rank_name, size_name);
  for (int rank = 0; rank < RANKS; rank++) CHECK(wait(&status) > 0 && status == 0);
}

int main(void) {
  static const char* const others[] = {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
                                       "PMI_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RUN_ID"};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) unsetenv(others[i]);
  children("RANK", "WORLD_SIZE");
  children("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  expect(0, 1);
  ncclUniqueId id;
  int nranks, rank;
  CHECK(strataGetWorldId(NULL, &nranks, &rank) == ncclInvalidArgument);
  CHECK(strataGetWorldId(&id, NULL, &rank) == ncclInvalidArgument);
  CHECK(strataGetWorldId(&id, &nranks, NULL) == ncclInvalidArgument);
  set("WORLD_SIZE", RANKS);
  CHECK(strataGetWorldId(&id, &nranks, &rank) == ncclInvalidArgument && strstr(strataGetLastError(), "RANK is not set"));
  set("RANK", RANKS);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  set("MASTER_PORT", free_port());
  CHECK(strataGetWorldId(&id, &nranks, &rank) == ncclInvalidArgument && strstr(strataGetLastError(), "RANK is 3"));
  /* Nobody comes. */
  set("RANK", 0);
  setenv("STRATA_BOOTSTRAP_TIMEOUT_MS", "200", 1);
  CHECK(strataGetWorldId(&id, &nranks, &rank) == ncclTimeout && strstr(strataGetLastError(), "did not come: 1, 2"));
  return 0;
}
