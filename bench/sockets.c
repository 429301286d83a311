// What the ways of moving bytes over a TCP socket cost, by themselves: send and recv, MSG_ZEROCOPY, io_uring, io_uring's send_zc.
// usage: sockets serve PORT | sockets ADDRESS PORT      (the second measures against the first, which ends with it)
// build: cc -O2 -std=gnu11 bench/sockets.c -luring -o sockets      (Debian: liburing-dev)
// "tries" is send with MSG_DONTWAIT again and again, as src/transport/tcp does. A round is a message there and one byte back, so that nothing queues up between two rounds. Rows of CSV: way, bytes, median us,
// quartiles, and the part of zero-copy sends of which the kernel says that it copied all the same.
#include <arpa/inet.h>
#include <errno.h>
#include <liburing.h>
#include <linux/errqueue.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef IORING_SEND_ZC_REPORT_USAGE // Linux 6.2's, younger than Debian 12's headers.
#define IORING_SEND_ZC_REPORT_USAGE (1U << 3)
#define IORING_NOTIF_USAGE_ZC_COPIED (1U << 31)
#endif

enum { ROUNDS = 401, MAX = 16 << 20 };
enum way { SEND, TRIES, ZEROCOPY, RING, RING_ZC, WAYS };
static const char *NAMES[WAYS] = {"send", "tries", "MSG_ZEROCOPY", "io_uring send", "io_uring send_zc"};
static struct io_uring ring;
static long sends, copied;

static void check(int good, const char *what) {
    if (!good) {
        fprintf(stderr, "sockets: %s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static void receive(int fd, char *to, size_t n) {
    while (n) {
        ssize_t got = recv(fd, to, n, MSG_DONTWAIT);
        if (got < 0 && errno == EAGAIN)
            continue; // A rank with a processor of its own polls.
        if (got <= 0)
            exit(got < 0);
        to += got, n -= got;
    }
}

// A zero-copy send is complete, and its memory free, when its notice has come; that is part of what it costs.
static void notices(int fd, uint32_t wanted) {
    static uint32_t seen;
    while (seen != wanted) {
        char control[128];
        struct msghdr message = {.msg_control = control, .msg_controllen = sizeof control};
        if (recvmsg(fd, &message, MSG_ERRQUEUE) < 0)
            continue;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        struct sock_extended_err *e = (void *)CMSG_DATA(c);
        seen += e->ee_data - e->ee_info + 1;
        if (e->ee_code & SO_EE_CODE_ZEROCOPY_COPIED)
            copied += e->ee_data - e->ee_info + 1;
    }
}

static ssize_t by_ring(int fd, const char *from, size_t n, int zero) {
    struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
    if (zero)
        io_uring_prep_send_zc(entry, fd, from, n, MSG_WAITALL, IORING_SEND_ZC_REPORT_USAGE);
    else
        io_uring_prep_send(entry, fd, from, n, MSG_WAITALL);
    io_uring_submit(&ring);
    ssize_t result = -1;
    for (int more = 1; more;) {
        struct io_uring_cqe *end;
        if (io_uring_peek_cqe(&ring, &end))
            continue;
        more = end->flags & IORING_CQE_F_MORE;
        if (end->flags & IORING_CQE_F_NOTIF)
            copied += (uint32_t)end->res == IORING_NOTIF_USAGE_ZC_COPIED;
        else
            result = end->res;
        io_uring_cqe_seen(&ring, end);
    }
    errno = result < 0 ? -result : 0;
    return result;
}

static void transmit(enum way way, int fd, const char *from, size_t n) {
    static uint32_t zero;
    while (n) {
        ssize_t put;
        switch (way) {
        case SEND: put = send(fd, from, n, 0); break;
        case ZEROCOPY: put = send(fd, from, n, MSG_ZEROCOPY), zero++; break;
        case TRIES:
            while ((put = send(fd, from, n, MSG_DONTWAIT)) < 0 && errno == EAGAIN) {
            }
            break;
        default: put = by_ring(fd, from, n, way == RING_ZC);
        }
        check(put > 0, NAMES[way]);
        from += put, n -= put, sends++;
    }
    if (way == ZEROCOPY)
        notices(fd, zero);
}

static int compare(const void *a, const void *b) {
    return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b);
}

static void serve(int port, char *data) {
    int listening = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    check(!bind(listening, (void *)&address, sizeof address) && !listen(listening, 1), "listen");
    int fd = accept(listening, 0, 0);
    check(fd >= 0, "accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    for (;;) {
        uint64_t n;
        receive(fd, (char *)&n, sizeof n);
        for (int i = 0; i < ROUNDS; i++) {
            receive(fd, data, n);
            check(send(fd, data, 1, 0) == 1, "send");
        }
    }
}

static void measure(const char *host, int port, char *data) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    check(inet_pton(AF_INET, host, &address.sin_addr) == 1, host);
    for (int tries = 0; connect(fd, (void *)&address, sizeof address); usleep(10000))
        check(tries++ < 300, "connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    check(!setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &yes, sizeof yes), "SO_ZEROCOPY");
    check(!io_uring_queue_init(8, &ring, 0), "io_uring");
    printf("way,bytes,median us,first quartile,third quartile,copied all the same\n");
    static const uint64_t SIZES[] = {8, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, MAX};
    for (unsigned s = 0; s < sizeof SIZES / sizeof *SIZES; s++)
        for (int way = 0; way < WAYS; way++) {
            double times[ROUNDS];
            check(send(fd, &SIZES[s], 8, 0) == 8, "send");
            sends = copied = 0;
            for (int i = 0; i < ROUNDS; i++) {
                char back;
                double begun = now();
                transmit(way, fd, data, SIZES[s]);
                receive(fd, &back, 1);
                times[i] = now() - begun;
            }
            qsort(times, ROUNDS, sizeof *times, compare);
            printf("%s,%lu,%.1f,%.1f,%.1f,%.2f\n", NAMES[way], SIZES[s], times[ROUNDS / 2], times[ROUNDS / 4], times[3 * ROUNDS / 4],
                   (double)copied / sends);
            fflush(stdout);
        }
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: sockets serve PORT | sockets ADDRESS PORT\n");
        return 2;
    }
    char *data = mmap(0, MAX, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    check(data != MAP_FAILED, "memory");
    if (!strcmp(argv[1], "serve"))
        serve(atoi(argv[2]), data);
    else
        measure(argv[1], atoi(argv[2]), data);
}
