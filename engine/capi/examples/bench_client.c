// Measures calls to `rpcperf serve` from a polled client: rate and latency.
//
//   bench_client [-a ADDRESS] [-o echo|read|write] [-s BYTES] [-t CALLS] [-D SECONDS] [-l] [-c KNOB=VALUE]...
//
// -t calls are outstanding. `echo` carries the payload both ways, within messages; `read` and `write` use a chunk.
// -s, -t and -D are as for `rpcperf rate`. -l also measures the round trip of each call, and reads the clock at the
// end of each. `taskset` pins the process. The server may need `rpcperf serve -s BYTES -t CALLS`, too.

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
static const char OPTIONS[] = "a:o:s:t:D:lc:";
// Maximum bytes of ECHO_SMALL, and of a message.
enum { SMALL = 256, MAX_MESSAGE = 3840 };

// Calls between two reads of the clock, unless the client has nothing to do.
enum { SAMPLE_EVERY = 64 };
// Empty polls before the thread yields the core.
enum { POLLS_BEFORE_YIELD = 256 };
// Histogram of nanoseconds: 32 steps for each power of two.
enum { STEPS = 32, BUCKETS = 60 * STEPS };

// A time, and the number of calls that had ended then.
struct sample {
    uint64_t time, calls;
};

// A slot for a call: under way, or free.
struct slot {
    uint64_t started;
    uint32_t number;
    rpcrdma_buffer *buffer;
};

struct bench {
    rpcrdma_local_client *client;
    uint32_t procedure, size, depth, sequence;
    uint64_t calls;
    // Begin and end of the measurement, which is longer if no call has ended between them.
    uint64_t from, until;
    struct sample first, last, now;
    int measures_latency, has_ended;
    rpcrdma_request request;
    rpcrdma_read_chunk read;
    rpcrdma_write_chunk write;
    // By token of the call.
    struct slot *slots;
    // Tokens of the free slots.
    uint32_t *free, free_count;
    uint64_t histogram[BUCKETS], timed;
    unsigned char args[MAX_MESSAGE];
};

// Nanoseconds of a clock that only advances.
static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void take_sample(struct bench *bench) {
    bench->now = (struct sample){now(), bench->calls};
    if (bench->now.time < bench->from)
        return;
    if (!bench->first.time)
        bench->first = bench->last = bench->now;
    else if (bench->now.time < bench->until || bench->last.calls == bench->first.calls)
        bench->last = bench->now;
    bench->has_ended = bench->now.time >= bench->until && bench->last.calls > bench->first.calls;
}

static size_t bucket_of(uint64_t value) {
    unsigned int shift = 0;
    while (value >= 2 * STEPS) {
        value >>= 1;
        shift++;
    }
    return shift * STEPS + value;
}

// The latency that `part` of all calls did not exceed, in microseconds.
static double percentile(const struct bench *bench, double part) {
    uint64_t left = (uint64_t)((double)bench->timed * part);
    size_t bucket = 0;
    while (bucket + 1 < BUCKETS && left >= bench->histogram[bucket])
        left -= bench->histogram[bucket++];
    if (bucket < 2 * STEPS)
        return (double)bucket / 1e3;
    size_t shift = bucket / STEPS - 1;
    return (double)((uint64_t)(bucket - shift * STEPS) << shift) / 1e3;
}

// The request of all calls, without its token, number and buffer.
static rpcrdma_request request_of(struct bench *bench) {
    if (bench->procedure <= ECHO)
        return (rpcrdma_request){
            .size = sizeof(rpcrdma_request), .procedure = bench->procedure,
            .args = bench->args, .args_len = xdr_padded(bench->size)};
    xdr_put_u32(bench->args, bench->size);
    bench->read.position = 4; // after the length
    return (rpcrdma_request){.size = sizeof(rpcrdma_request),
                             .procedure = bench->procedure,
                             .args = bench->args,
                             .args_len = 4,
                             .read_chunks = &bench->read,
                             .read_count = bench->procedure == WRITE,
                             .write_chunks = &bench->write,
                             .write_count = bench->procedure == READ};
}

// Starts a call with the next number in its first bytes, or with a chunk.
static void start(struct bench *bench, uint32_t token) {
    struct slot *slot = &bench->slots[token];
    bench->request.token = token;
    if (bench->procedure <= ECHO) {
        slot->number = ++bench->sequence;
        memcpy(bench->args, &slot->number, sizeof slot->number);
    } else
        bench->read.buffer = bench->write.buffer = slot->buffer;
    if (bench->measures_latency)
        slot->started = bench->now.time;
    if (rpcrdma_local_client_start(bench->client, &bench->request, NULL))
        die("start", rpcrdma_error());
}

// Whether the reply belongs to the call.
static int is_answer(const struct bench *bench, uint32_t token, const unsigned char *results, size_t len) {
    if (bench->procedure <= ECHO)
        return len == xdr_padded(bench->size) && !memcmp(results, &bench->slots[token].number, sizeof bench->sequence);
    struct xdr from = {results, len};
    uint32_t moved;
    return xdr_u32(&from, &moved) == 0 && moved == bench->size;
}

static void done(void *context, const rpcrdma_completion *completion) {
    struct bench *bench = context;
    uint32_t token = (uint32_t)completion->token;
    if (completion->error)
        die("call", rpcrdma_error());
    if (!is_answer(bench, token, completion->results, completion->results_len))
        die("call", "the reply belongs to another call");
    bench->free[bench->free_count++] = token;
    bench->calls++;
    if (bench->measures_latency) {
        take_sample(bench);
        if (bench->last.calls == bench->calls) {
            bench->histogram[bucket_of(bench->now.time - bench->slots[token].started)]++;
            bench->timed++;
        }
    } else if (bench->calls - bench->now.calls >= SAMPLE_EVERY)
        take_sample(bench);
    // The next call reuses the buffer of the chunk.
    if (bench->procedure > ECHO &&
        !(bench->slots[token].buffer = bench->procedure == READ ? rpcrdma_reply_take_write_chunk(completion->reply, 0)
                                                                : rpcrdma_reply_take_read_chunk(completion->reply, 0)))
        die("buffer", rpcrdma_error());
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
    set(config, "debug.sample_latency", "0");
    for (int option; (option = getopt(argc, argv, OPTIONS)) != -1;) {
        if (option == 'a')
            address = optarg;
        else if (option == 'o')
            operation = optarg;
        else if (option == 's')
            bench.size = (uint32_t)number(optarg, 4, 1 << 30);
        else if (option == 't')
            bench.depth = (uint32_t)number(optarg, 1, 16383);
        else if (option == 'D')
            seconds = number(optarg, 1, 3600);
        else if (option == 'l')
            bench.measures_latency = 1;
        else if (option != 'c')
            die("usage", "bench_client [-a ADDRESS] [-o echo|read|write] [-s BYTES] [-t CALLS] [-D SECONDS]"
                         " [-l] [-c KNOB=VALUE]...");
    }
    if (optind < argc)
        die(argv[optind], "unknown argument");
    if (strcmp(operation, "echo") == 0)
        bench.procedure = bench.size <= SMALL ? ECHO_SMALL : ECHO;
    else if (strcmp(operation, "read") == 0)
        bench.procedure = READ;
    else if (strcmp(operation, "write") == 0)
        bench.procedure = WRITE;
    else
        die(operation, "expected echo, read or write");
    if (bench.procedure <= ECHO && bench.size > MAX_MESSAGE)
        die("-s", "echo carries at most 3840 bytes");

    // The sizes are those of an rpcperf client with one connection.
    set_number(config, "memory.receives", bench.depth <= 256 ? 1024 : 4 * bench.depth);
    set_number(config, "limits.credits", bench.depth < 32 ? 64 : 2 * bench.depth > 32767 ? 32767 : 2 * bench.depth);
    set_number(config, "limits.max_calls", bench.depth);
    set_number(config, "memory.small_buffers", 1024 + 2 * bench.depth + 16);
    set_number(config, "memory.message_buffers", 256 + 2 * bench.depth + 16);
    if (bench.procedure > ECHO) {
        char classes[64];
        snprintf(classes, sizeof classes, "[[%u, %u]]", bench.size, bench.depth);
        set(config, "memory.bulk_buffers", classes);
    }
    // The user's knobs are set last, so that they replace the values above.
    optind = 1;
    for (int option; (option = getopt(argc, argv, OPTIONS)) != -1;)
        if (option == 'c')
            set_knob(config, optarg);
    bench.client = rpcrdma_local_client_connect(address, PROGRAM, VERSION, config);
    if (!bench.client)
        die(address, rpcrdma_error());
    rpcrdma_free(config);
    bench.slots = calloc(bench.depth, sizeof *bench.slots);
    bench.free = calloc(bench.depth, sizeof *bench.free);
    if (!bench.slots || !bench.free)
        die("calloc", strerror(errno));

    bench.request = request_of(&bench);
    take_sample(&bench);
    // The first tenth is a warm-up.
    bench.from = bench.now.time + seconds * 100000000;
    bench.until = bench.now.time + seconds * 1000000000;
    bench.first = bench.last = (struct sample){0};
    for (uint32_t token = 0; token < bench.depth; token++) {
        bench.free[bench.free_count++] = token;
        if (bench.procedure > ECHO && !(bench.slots[token].buffer = rpcrdma_alloc(bench.client, bench.size)))
            die("buffer", rpcrdma_error());
    }
    for (unsigned int empty = 0; !bench.has_ended || bench.free_count < bench.depth;) {
        while (bench.free_count && !bench.has_ended)
            start(&bench, bench.free[--bench.free_count]);
        int busy = rpcrdma_local_client_poll(bench.client, done, &bench);
        if (busy < 0)
            die("poll", rpcrdma_error());
        if (busy) {
            empty = 0;
            continue;
        }
        if (!bench.measures_latency && bench.calls != bench.now.calls)
            take_sample(&bench);
        if (++empty % POLLS_BEFORE_YIELD == 0)
            sched_yield();
    }
    double seconds_counted = (double)(bench.last.time - bench.first.time) / 1e9;
    double rate = (double)(bench.last.calls - bench.first.calls) / seconds_counted;
    printf("%s %u bytes, depth %u: %.0f calls/s, %.1f MB/s", operation, bench.size, bench.depth, rate,
           rate * bench.size / 1e6);
    if (bench.measures_latency)
        printf(", p50 %.2f us, p99 %.2f us", percentile(&bench, 0.5), percentile(&bench, 0.99));
    printf("\n");
    for (uint32_t token = 0; token < bench.depth; token++)
        rpcrdma_free(bench.slots[token].buffer);
    if (rpcrdma_free(bench.client))
        die("end", rpcrdma_error());
    free(bench.slots);
    free(bench.free);
    return 0;
}
