/* The barrier of turns.h for programs that are not C: bench/gloo.py opens this as a library, so that it waits as bench/host.c. */
#include "turns.h"

void bench_meet(Barrier *barrier, int n, int asleep) { meet(barrier, n, asleep); }

int bench_barrier_bytes(void) { return (int)sizeof(Barrier); }
