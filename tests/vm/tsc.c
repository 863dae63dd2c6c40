// Prints the rate of the time stamp counter in kHz, measured by the system's clock.
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

struct reading {
    long long nanoseconds;
    unsigned long long ticks;
};

static long long now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000LL + at.tv_nsec;
}

// Reads counter and clock together. Uses the shortest of many readings, because longer ones may have been interrupted.
static struct reading read_both(void) {
    struct reading best = {0, 0};
    long long shortest = 1000000000;
    for (int i = 0; i < 1000; i++) {
        long long before = now();
        unsigned long long ticks = __rdtsc();
        long long took = now() - before;
        if (took < shortest) {
            shortest = took;
            best.nanoseconds = before + took / 2;
            best.ticks = ticks;
        }
    }
    return best;
}

int main(void) {
    struct reading first = read_both();
    struct timespec pause = {0, 200000000};
    nanosleep(&pause, NULL);
    struct reading second = read_both();
    double ticks = (double)(second.ticks - first.ticks);
    printf("%.0f\n", ticks * 1e6 / (double)(second.nanoseconds - first.nanoseconds));
    return 0;
}
