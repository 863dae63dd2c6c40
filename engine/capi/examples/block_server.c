// A block server: io_uring moves the blocks between a file and the memory of RDMA Reads and Writes.
//
//   block_server [-a ADDRESS] [-n BYTES] [-s KNOB=VALUE]... FILE
//
// Protocol: tools/blockstore/blockstore.x. -n grows the file. SIGTERM and SIGINT drain. The exit status is 77 without
// io_uring.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <rpcrdma.h>

#include "block_ring.h"
#include "example.h"
#include "xdr.h"

enum { PROGRAM = 0x2b10c570, VERSION = 1 };
enum { INFO = 1, READ, WRITE, FLUSH };
enum { OK, OUT_OF_RANGE, TOO_LONG, READ_ONLY, NO_SPACE, IO_ERROR };
// Bytes of a block, and of one within a reply.
enum { BLOCK_MAX = 1 << 20, INLINE_MAX = 4032 };
// The longest drain, in milliseconds.
enum { DRAIN_TIMEOUT = 10000 };

static int file;
static uint64_t size;

// The answers.

static void answer(rpcrdma_call *call, int status) {
    if (rpcrdma_call_answer(call, status))
        fprintf(stderr, "block_server: answer: %s\n", rpcrdma_error());
}

// Answers with `count` words as results.
static void answer_words(rpcrdma_call *call, const uint32_t *words, size_t count) {
    unsigned char *results = rpcrdma_call_reply(call, 4 * count);
    for (size_t i = 0; results && i < count; i++)
        results = xdr_put_u32(results, words[i]);
    answer(call, results ? 0 : -EMSGSIZE);
}

static void answer_status(rpcrdma_call *call, uint32_t status) {
    answer_words(call, &status, 1);
}

static void answer_write(rpcrdma_call *call, size_t len) {
    // 0: the data is not stable before FLUSH.
    answer_words(call, (uint32_t[]){OK, (uint32_t)len, 0}, 3);
}

// Answers a READ whose data is in place.
static void answer_read(rpcrdma_call *call, uint64_t offset, size_t len, int is_inline) {
    int error = is_inline ? 0 : rpcrdma_call_write_chunk_filled(call, 0, len);
    unsigned char *results = error ? NULL : rpcrdma_call_reply(call, 12 + (is_inline ? xdr_padded(len) : 0));
    if (results) {
        results = xdr_put_u32(results, OK);
        results = xdr_put_u32(results, offset + len == size);
        xdr_put_u32(results, (uint32_t)len);
    }
    answer(call, error ? error : results ? 0 : -EMSGSIZE);
}

// Jobs: queued by the handlers, started and ended by the task, on the one shard's thread.

static void queue(struct job job) {
    if (queue_job(job))
        answer(job.call, RPCRDMA_SYSTEM_ERR);
}

static void end_job(const struct job *job, int error) {
    if (error) {
        fprintf(stderr, "block_server: %zu bytes at %llu: %s\n", job->len, (unsigned long long)job->offset,
                strerror(error));
        answer_status(job->call, error == ENOSPC || error == EDQUOT ? NO_SPACE : IO_ERROR);
    } else if (job->kind == READ_JOB)
        answer_read(job->call, job->offset, job->len, job->is_inline);
    else if (job->kind == WRITE_JOB)
        answer_write(job->call, job->len);
    else
        answer_status(job->call, OK);
}

static int poll_jobs(void *context, unsigned int shard) {
    (void)context;
    (void)shard;
    int started = start_jobs(file), ended = end_jobs(end_job);
    return started || ended;
}

static int descriptor(void *context, unsigned int shard) {
    (void)context;
    (void)shard;
    return ring.ring_fd;
}

// The procedures.

static int info(void *context, rpcrdma_call *call, const void *args, size_t args_len, void *results,
                size_t *results_len) {
    (void)context, (void)call, (void)args, (void)args_len;
    unsigned char *to = xdr_put_u64(xdr_put_u32(results, OK), size);
    to = xdr_put_u32(xdr_put_u32(to, BLOCK_MAX), 1);
    *results_len = (size_t)(to - (unsigned char *)results);
    return 0;
}

static void read_block(void *context, rpcrdma_call *call, const void *at, size_t args_len) {
    (void)context;
    struct xdr args = {at, args_len};
    uint64_t offset;
    uint32_t count;
    if (xdr_u64(&args, &offset) || xdr_u32(&args, &count) || args.left) {
        answer(call, RPCRDMA_GARBAGE_ARGS);
        return;
    }
    if (count > BLOCK_MAX || offset > size) {
        answer_status(call, count > BLOCK_MAX ? TOO_LONG : OUT_OF_RANGE);
        return;
    }
    size_t room = INLINE_MAX;
    unsigned char *memory = rpcrdma_call_write_chunk(call, 0, &room);
    int is_inline = !memory;
    size_t len = count < room ? count : room;
    len = len < size - offset ? len : (size_t)(size - offset);
    if (is_inline) {
        // The data follows status, eof and length.
        unsigned char *results = rpcrdma_call_reply(call, 12 + xdr_padded(len));
        if (!results) {
            answer(call, -EMSGSIZE);
            return;
        }
        memory = results + 12;
    }
    if (len == 0)
        answer_read(call, offset, 0, is_inline);
    else
        queue((struct job){.call = call, .kind = READ_JOB, .is_inline = is_inline,
                           .memory = memory, .offset = offset, .len = len});
}

static void write_block(void *context, rpcrdma_call *call, const void *at, size_t args_len) {
    (void)context;
    struct xdr args = {at, args_len};
    uint64_t offset;
    uint32_t len;
    if (xdr_u64(&args, &offset) || xdr_u32(&args, &len)) {
        answer(call, RPCRDMA_GARBAGE_ARGS);
        return;
    }
    size_t chunk_len, position;
    const unsigned char *data = rpcrdma_call_read_chunk(call, 0, &chunk_len, &position);
    // A Read chunk is the data if it is at byte 12, after offset and length.
    if (data ? chunk_len != len || position != 12 : !(data = xdr_bytes(&args, len)))
        data = NULL;
    if (!data || args.left)
        answer(call, RPCRDMA_GARBAGE_ARGS);
    else if (offset > size || len > size - offset)
        answer_status(call, OUT_OF_RANGE);
    else if (len == 0)
        answer_write(call, 0);
    else // The kernel only reads this memory.
        queue((struct job){.call = call, .kind = WRITE_JOB,
                           .memory = (unsigned char *)(uintptr_t)data, .offset = offset, .len = len});
}

static void flush(void *context, rpcrdma_call *call, const void *args, size_t args_len) {
    (void)context, (void)args, (void)args_len;
    queue((struct job){.call = call, .kind = FLUSH_JOB});
}

// Opens the file, or creates it, and grows it to `min_size` bytes.
static void open_file(const char *path, uint64_t min_size) {
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    struct stat stat;
    if (file < 0 || fstat(file, &stat))
        die(path, strerror(errno));
    size = (uint64_t)stat.st_size;
    if (min_size > size && ftruncate(file, (off_t)min_size))
        die(path, strerror(errno));
    size = min_size > size ? min_size : size;
    if (!size)
        die(path, "is empty: -n BYTES gives it a size");
}

int main(int argc, char **argv) {
    const char *address = "soft:blockstore";
    uint64_t min_size = 0;
    rpcrdma_config *config = rpcrdma_config_new();
    rpcrdma_services *services = rpcrdma_services_new();
    if (!config || !services)
        die("start", rpcrdma_error());
    set(config, "memory.bulk_buffers", "[[65536, 64], [1048576, 16]]");
    for (int option; (option = getopt(argc, argv, "a:n:s:")) != -1;) {
        if (option == 'a')
            address = optarg;
        else if (option == 'n')
            min_size = number(optarg, 1, LONG_MAX);
        else if (option == 's')
            set_knob(config, optarg);
        else
            die("usage", "block_server [-a ADDRESS] [-n BYTES] [-s KNOB=VALUE]... FILE");
    }
    if (optind + 1 != argc)
        die("usage", "block_server [-a ADDRESS] [-n BYTES] [-s KNOB=VALUE]... FILE");
    open_file(argv[optind], min_size);
    int error = io_uring_queue_init(ENTRIES, &ring, 0);
    if (error) {
        fprintf(stderr, "block_server: io_uring_queue_init: %s (sysctl kernel.io_uring_disabled)\n", strerror(-error));
        return 77;
    }

    // All threads inherit the mask, so that only sigwait gets the signals.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    const rpcrdma_procedure table[] = {
        {.number = INFO, .handler = info},
        {.number = READ, .deferred = read_block, .max_reply = 12 + INLINE_MAX,
         .write_chunks = 1, .max_write = BLOCK_MAX},
        {.number = WRITE, .deferred = write_block, .read_chunks = 1, .max_read = BLOCK_MAX},
        {.number = FLUSH, .deferred = flush},
    };
    if (rpcrdma_services_add(services, PROGRAM, VERSION, table, sizeof table / sizeof *table, sizeof *table) ||
        rpcrdma_services_task(services, poll_jobs, descriptor, NULL))
        die("services", rpcrdma_error());
    // There is one ring, so there is one shard.
    set(config, "server.shards", "1");
    rpcrdma_server *server = rpcrdma_server_start(address, services, config);
    if (!server)
        die(address, rpcrdma_error());
    rpcrdma_free(services);
    rpcrdma_free(config);
    printf("listening on %s: %s, %llu bytes\n", address, argv[optind], (unsigned long long)size);
    fflush(stdout);
    int signal;
    sigwait(&signals, &signal);

    int error_of_drain = rpcrdma_server_drain(server, DRAIN_TIMEOUT);
    if (error_of_drain)
        fprintf(stderr, "block_server: drain: %s\n", rpcrdma_error());
    // The thread of the shard has ended. The kernel may still use memory of calls that were cut off.
    while (waiting || under_way) {
        start_jobs(file);
        struct io_uring_cqe *cqe;
        error = io_uring_wait_cqe(&ring, &cqe);
        if (error && error != -EINTR)
            die("io_uring_wait_cqe", strerror(-error));
        end_jobs(end_job);
    }
    io_uring_queue_exit(&ring);
    close(file);
    return error_of_drain ? 1 : 0;
}
