// Measures calls to `rpcperf serve` from a polled client: rate and latency.
//
//   bench_client [-a ADDRESS] [-o echo|read|write] [-s BYTES] [-t CALLS] [-D SECONDS] [-c KNOB=VALUE]...
//
// -t calls are outstanding. `echo` carries the payload both ways, within messages; `read` and `write` use a chunk.
// The options are those of `rpcperf rate`. Latency is a full round trip.

#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <rpcrdma.h>

#include "example.h"
#include "xdr.h"

// Program of bench/rpcperf.x.
enum { PROGRAM = 0x20525046, VERSION = 5 };
enum { ECHO_SMALL = 1, ECHO = 2, READ = 3, WRITE = 4 };
// Most bytes of ECHO_SMALL, and of a message.
enum { SMALL = 256, MAX_MESSAGE = 3840 };

// Histogram of nanoseconds: 32 steps for each power of two.
enum { STEPS = 32, BUCKETS = 60 * STEPS };

struct bench {
    rpcrdma_local_client *client;
    uint32_t procedure, size, depth, outstanding;
    uint64_t sequence, calls, start, end;
    // Of the calls under way, by token: start, and number.
    uint64_t *started, *numbers;
    uint64_t histogram[BUCKETS];
};

// Nanoseconds of a clock that only advances.
static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static size_t bucket_of(uint64_t value) {
    unsigned int shift = 0;
    while (value >= 2 * STEPS) {
        value >>= 1;
        shift++;
    }
    return shift * STEPS + value;
}

// Microseconds below which `part` of all calls ended.
static double percentile(const struct bench *bench, double part) {
    uint64_t left = (uint64_t)((double)bench->calls * part);
    size_t bucket = 0;
    while (bucket + 1 < BUCKETS && left >= bench->histogram[bucket])
        left -= bench->histogram[bucket++];
    if (bucket < 2 * STEPS)
        return (double)bucket / 1e3;
    size_t shift = bucket / STEPS - 1;
    return (double)((uint64_t)(bucket - shift * STEPS) << shift) / 1e3;
}

// Starts a call with the next number in its first bytes, or with a chunk in `buffer`.
static void start(struct bench *bench, uint64_t token, uint64_t time, rpcrdma_buffer *buffer) {
    unsigned char args[MAX_MESSAGE];
    rpcrdma_request request = {.procedure = bench->procedure, .token = token, .args = args, .args_len = 4};
    rpcrdma_read_chunk read = {.position = 4, .buffer = buffer}; // Behind its length.
    rpcrdma_write_chunk write = {.buffer = buffer};
    bench->numbers[token] = ++bench->sequence;
    if (bench->procedure <= ECHO) {
        request.args_len = xdr_padded(bench->size);
        memset(args, 0, request.args_len);
        memcpy(args, &bench->numbers[token], bench->size < 8 ? bench->size : 8);
    } else {
        xdr_put_u32(args, bench->size);
        request.read_chunks = &read;
        request.read_count = bench->procedure == WRITE;
        request.write_chunks = &write;
        request.write_count = bench->procedure == READ;
    }
    bench->started[token] = time;
    if (rpcrdma_local_client_start(bench->client, &request, NULL))
        die("start", rpcrdma_error());
    bench->outstanding++;
}

// Whether the reply belongs to the call.
static int is_answer(const struct bench *bench, uint64_t token, const unsigned char *results, size_t len) {
    if (bench->procedure <= ECHO)
        return len == xdr_padded(bench->size) &&
               memcmp(results, &bench->numbers[token], bench->size < 8 ? bench->size : 8) == 0;
    struct xdr from = {results, len};
    uint32_t moved;
    return xdr_u32(&from, &moved) == 0 && moved == bench->size;
}

static void done(void *context, const rpcrdma_completion *completion) {
    struct bench *bench = context;
    uint64_t token = completion->token;
    if (completion->error)
        die("call", rpcrdma_error());
    if (!is_answer(bench, token, completion->results, completion->results_len))
        die("call", "the reply is another call's");
    bench->outstanding--;
    // The next call starts as this one ends: one look at the clock for both.
    uint64_t time = now();
    // The period is longer if no call ended in it.
    if (time >= bench->start && (time < bench->end || !bench->calls)) {
        bench->histogram[bucket_of(time - bench->started[token])]++;
        bench->calls++;
        bench->end = time > bench->end ? time : bench->end;
    }
    if (time >= bench->end)
        return;
    // The buffer of the chunk serves the next call.
    rpcrdma_buffer *buffer = NULL;
    if (bench->procedure > ECHO) {
        buffer = bench->procedure == READ ? rpcrdma_reply_take_write_chunk(completion->reply, 0)
                                          : rpcrdma_reply_take_read_chunk(completion->reply, 0);
        if (!buffer)
            die("buffer", rpcrdma_error());
    }
    start(bench, token, time, buffer);
}

static void set_number(rpcrdma_config *config, const char *name, unsigned long value) {
    char text[32];
    snprintf(text, sizeof text, "%lu", value);
    set(config, name, text);
}

int main(int argc, char **argv) {
    const char *address = "soft:rpcperf", *operation = "echo";
    static struct bench bench = {.size = 64, .depth = 64};
    unsigned long seconds = 3;
    rpcrdma_config *config = rpcrdma_config_new();
    if (!config)
        die("configuration", rpcrdma_error());
    set(config, "poll.idle", "poll");
    for (int option; (option = getopt(argc, argv, "a:o:s:t:D:c:")) != -1;) {
        if (option == 'a')
            address = optarg;
        else if (option == 'o')
            operation = optarg;
        else if (option == 's')
            bench.size = (uint32_t)number(optarg, 4, 1 << 30);
        else if (option == 't')
            bench.depth = (uint32_t)number(optarg, 1, 16384);
        else if (option == 'D')
            seconds = number(optarg, 1, 3600);
        else if (option == 'c')
            set_knob(config, optarg);
        else
            die("usage", "bench_client [-a ADDRESS] [-o echo|read|write] [-s BYTES] [-t CALLS] [-D SECONDS]"
                         " [-c KNOB=VALUE]...");
    }
    if (strcmp(operation, "echo") == 0)
        bench.procedure = bench.size <= SMALL ? ECHO_SMALL : ECHO;
    else if (strcmp(operation, "read") == 0)
        bench.procedure = READ;
    else if (strcmp(operation, "write") == 0)
        bench.procedure = WRITE;
    else
        die(operation, "wanted echo, read or write");
    if (bench.procedure <= ECHO && bench.size > MAX_MESSAGE)
        die("-s", "echo carries at most 3840 bytes");

    // As rpcperf sizes a client with one connection.
    set_number(config, "limits.credits", bench.depth < 32 ? 64 : 2 * bench.depth > 32767 ? 32767 : 2 * bench.depth);
    set_number(config, "limits.max_calls", bench.depth);
    set_number(config, "memory.small_buffers", 1024 + 2 * bench.depth + 16);
    set_number(config, "memory.message_buffers", 256 + 2 * bench.depth + 16);
    if (bench.procedure > ECHO) {
        char classes[64];
        snprintf(classes, sizeof classes, "[[%u, %u]]", bench.size, bench.depth);
        set(config, "memory.bulk_buffers", classes);
    }
    bench.client = rpcrdma_local_client_connect(address, PROGRAM, VERSION, config);
    if (!bench.client)
        die(address, rpcrdma_error());
    rpcrdma_free(config);
    bench.started = calloc(bench.depth, sizeof *bench.started);
    bench.numbers = calloc(bench.depth, sizeof *bench.numbers);
    if (!bench.started || !bench.numbers)
        die("calloc", strerror(errno));

    uint64_t begin = now();
    // A tenth is warm-up.
    bench.start = begin + seconds * 100000000;
    bench.end = begin + seconds * 1000000000;
    for (uint64_t token = 0; token < bench.depth; token++) {
        rpcrdma_buffer *buffer = NULL;
        if (bench.procedure > ECHO && !(buffer = rpcrdma_alloc(bench.client, bench.size)))
            die("buffer", rpcrdma_error());
        start(&bench, token, now(), buffer);
    }
    while (bench.outstanding) {
        int busy = rpcrdma_local_client_poll(bench.client, done, &bench);
        if (busy < 0)
            die("poll", rpcrdma_error());
        if (!busy)
            sched_yield();
    }
    double rate = (double)bench.calls / ((double)(bench.end - bench.start) / 1e9);
    printf("%s %u bytes, depth %u: %.0f calls/s, %.1f MB/s, p50 %.2f us, p99 %.2f us\n", operation, bench.size,
           bench.depth, rate, rate * bench.size / 1e6, percentile(&bench, 0.5), percentile(&bench, 0.99));
    if (rpcrdma_free(bench.client))
        die("end", rpcrdma_error());
    free(bench.started);
    free(bench.numbers);
    return 0;
}
