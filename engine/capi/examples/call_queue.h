// A queue of deferred calls, from a server to a pool of threads.

#ifndef EXAMPLE_CALL_QUEUE_H
#define EXAMPLE_CALL_QUEUE_H

#include <pthread.h>
#include <stddef.h>

#include <rpcrdma.h>

enum { QUEUE = 4096 };

static rpcrdma_call *queue[QUEUE];
static size_t first, queued;
static int closing;
static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queue_changed = PTHREAD_COND_INITIALIZER;

// Returns 0, or -1 if the queue is full.
static int call_queue_put(rpcrdma_call *call) {
    pthread_mutex_lock(&queue_lock);
    int full = queued == QUEUE;
    if (!full)
        queue[(first + queued++) % QUEUE] = call;
    pthread_mutex_unlock(&queue_lock);
    pthread_cond_signal(&queue_changed);
    return full ? -1 : 0;
}

// Waits for a call. Returns NULL once the queue is closed and empty.
static rpcrdma_call *call_queue_take(void) {
    rpcrdma_call *call = NULL;
    pthread_mutex_lock(&queue_lock);
    while (!queued && !closing)
        pthread_cond_wait(&queue_changed, &queue_lock);
    if (queued) {
        call = queue[first];
        first = (first + 1) % QUEUE;
        queued--;
    }
    pthread_mutex_unlock(&queue_lock);
    return call;
}

static void call_queue_close(void) {
    pthread_mutex_lock(&queue_lock);
    closing = 1;
    pthread_cond_broadcast(&queue_changed);
    pthread_mutex_unlock(&queue_lock);
}

#endif
