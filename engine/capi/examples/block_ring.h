// The io_uring of block_server, and its operations. One thread at a time uses it.

#ifndef EXAMPLE_BLOCK_RING_H
#define EXAMPLE_BLOCK_RING_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <liburing.h>
#include <rpcrdma.h>

#include "example.h"

// Maximum number of operations that the kernel runs at a time.
enum { ENTRIES = 256 };

// An operation and its call. The call keeps the memory, even if its client is killed.
struct job {
    struct job *next;
    rpcrdma_call *call;
    enum { READ_JOB, WRITE_JOB, FLUSH_JOB } kind;
    int is_inline;
    unsigned char *memory;
    uint64_t offset;
    size_t len, done;
};

static struct io_uring ring;
static struct job *waiting, **last = &waiting;
static unsigned int under_way;

// Queues a copy of the job. Returns 0, or -1 if there is no memory.
static int queue_job(struct job queued) {
    struct job *job = malloc(sizeof *job);
    if (!job)
        return -1;
    *job = queued;
    *last = job;
    last = &job->next;
    return 0;
}

// Submits waiting jobs to the kernel, with one system call. Returns whether there were any.
static int start_jobs(int file) {
    while (waiting && under_way < ENTRIES) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
        if (!sqe)
            break;
        struct job *job = waiting;
        if (!(waiting = job->next))
            last = &waiting;
        job->next = NULL;
        unsigned char *memory = job->memory + job->done;
        unsigned int left = (unsigned int)(job->len - job->done);
        if (job->kind == READ_JOB)
            io_uring_prep_read(sqe, file, memory, left, job->offset + job->done);
        else if (job->kind == WRITE_JOB)
            io_uring_prep_write(sqe, file, memory, left, job->offset + job->done);
        else
            io_uring_prep_fsync(sqe, file, IORING_FSYNC_DATASYNC);
        io_uring_sqe_set_data(sqe, job);
        under_way++;
    }
    if (!io_uring_sq_ready(&ring))
        return 0;
    int error = io_uring_submit(&ring);
    if (error < 0 && error != -EAGAIN && error != -EBUSY && error != -EINTR)
        die("io_uring_submit", strerror(-error));
    return 1;
}

// Passes each finished job to `end`, with a code of errno.h or 0. Returns whether there were any.
static int end_jobs(void (*end)(const struct job *job, int error)) {
    struct io_uring_cqe *cqe;
    int any = 0;
    for (; io_uring_peek_cqe(&ring, &cqe) == 0; any = 1) {
        struct job *job = io_uring_cqe_get_data(cqe);
        int moved = cqe->res;
        io_uring_cqe_seen(&ring, cqe);
        under_way--;
        if (moved > 0)
            job->done += (size_t)moved;
        if (moved == -EINTR || moved == -EAGAIN || (moved > 0 && job->done < job->len)) {
            // The rest is queued again.
            *last = job;
            last = &job->next;
            continue;
        }
        // A job that moved no bytes is beyond the end of a truncated file.
        end(job, moved < 0 ? -moved : job->done < job->len ? EIO : 0);
        free(job);
    }
    return any;
}

#endif
