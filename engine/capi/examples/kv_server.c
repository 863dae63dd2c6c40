// A key-value server in an epoll loop of its own. A pool of threads answers the calls.
//
//   kv_server [-a ADDRESS] [-t THREADS] [-s KNOB=VALUE]...
//
// Protocol: tests/embed/kv.x. Values travel as Read and Write chunks, or within messages. SIGTERM and SIGINT drain.

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <rpcrdma.h>

#include "call_queue.h"
#include "example.h"
#include "kv_store.h"
#include "xdr.h"

enum { PROGRAM = 0x20004b56, VERSION = 1 };
enum { KV_GET = 1, KV_PUT, KV_DELETE, KV_LIST };
enum { MAX_KEY = 1024, MAX_VALUE = 262144, MAX_NAMES = 1024 };
// Bytes of a page of names, and of a value within a reply.
enum { MAX_PAGE = 2048, MAX_INLINE = 2048 };
enum { MAX_THREADS = 64 };

// The procedures. Each returns the status for rpcrdma_call_answer.

static int answer_word(rpcrdma_call *call, uint32_t word) {
    unsigned char results[4];
    xdr_put_u32(results, word);
    return rpcrdma_call_reply_with(call, results, sizeof results);
}

static int answer_value(rpcrdma_call *call, const unsigned char *value, uint32_t len) {
    size_t room, inline_len = 8;
    // Empty data has no chunk (RFC 8166 §3.4.4).
    unsigned char *chunk = len ? rpcrdma_call_write_chunk(call, 0, &room) : NULL;
    if (chunk) {
        if (len <= room)
            memcpy(chunk, value, len);
        int error = rpcrdma_call_write_chunk_filled(call, 0, len);
        if (error)
            return error;
    } else {
        inline_len += xdr_padded(len);
    }
    unsigned char *results = rpcrdma_call_reply(call, inline_len);
    if (!results)
        return -EMSGSIZE;
    results = xdr_put_u32(results, 1);
    results = xdr_put_u32(results, len);
    if (!chunk)
        memcpy(results, value, len);
    return 0;
}

static int get(rpcrdma_call *call, struct xdr args) {
    const unsigned char *key;
    uint32_t key_len;
    if (xdr_opaque(&args, MAX_KEY, &key, &key_len) || args.left)
        return RPCRDMA_GARBAGE_ARGS;
    pthread_rwlock_rdlock(&store_lock);
    int found;
    size_t at = search(key, key_len, &found);
    int status = found ? answer_value(call, store[at]->bytes + key_len, store[at]->value_len) : answer_word(call, 0);
    pthread_rwlock_unlock(&store_lock);
    return status;
}

static int put(rpcrdma_call *call, struct xdr args) {
    const unsigned char *key, *value, *start = args.at;
    uint32_t key_len, len;
    if (xdr_opaque(&args, MAX_KEY, &key, &key_len) || xdr_u32(&args, &len) || len > MAX_VALUE)
        return RPCRDMA_GARBAGE_ARGS;
    size_t chunk_len, position;
    value = rpcrdma_call_read_chunk(call, 0, &chunk_len, &position);
    if (value ? chunk_len != len || position != (size_t)(args.at - start) : !(value = xdr_bytes(&args, len)))
        return RPCRDMA_GARBAGE_ARGS;
    if (args.left)
        return RPCRDMA_GARBAGE_ARGS;
    struct entry *entry = malloc(sizeof *entry + key_len + len);
    if (!entry)
        return RPCRDMA_SYSTEM_ERR;
    entry->key_len = key_len;
    entry->value_len = len;
    memcpy(entry->bytes, key, key_len);
    memcpy(entry->bytes + key_len, value, len);
    pthread_rwlock_wrlock(&store_lock);
    int error = insert(entry);
    pthread_rwlock_unlock(&store_lock);
    return error ? RPCRDMA_SYSTEM_ERR : 0;
}

static int delete(rpcrdma_call *call, struct xdr args) {
    const unsigned char *key;
    uint32_t len;
    if (xdr_opaque(&args, MAX_KEY, &key, &len) || args.left)
        return RPCRDMA_GARBAGE_ARGS;
    int found;
    pthread_rwlock_wrlock(&store_lock);
    size_t at = search(key, len, &found);
    if (found) {
        free(store[at]);
        entries--;
        memmove(&store[at], &store[at + 1], (entries - at) * sizeof *store);
    }
    pthread_rwlock_unlock(&store_lock);
    return answer_word(call, (uint32_t)found);
}

static int list(rpcrdma_call *call, struct xdr args) {
    const unsigned char *prefix, *after;
    uint32_t prefix_len, after_len;
    if (xdr_opaque(&args, MAX_KEY, &prefix, &prefix_len) || xdr_opaque(&args, MAX_KEY, &after, &after_len) || args.left)
        return RPCRDMA_GARBAGE_ARGS;
    unsigned char page[MAX_PAGE + 8], *to = page + 4;
    uint32_t count = 0, more = 0;
    int found;
    pthread_rwlock_rdlock(&store_lock);
    // Names with the prefix begin where the prefix itself would be. Names up to `after` are left out.
    for (size_t at = search(prefix, prefix_len, &found); at < entries; at++) {
        const struct entry *entry = store[at];
        if (entry->key_len < prefix_len || memcmp(entry->bytes, prefix, prefix_len) != 0)
            break;
        if (after_len && compare(entry, after, after_len) <= 0)
            continue;
        size_t padded = xdr_padded(entry->key_len);
        if (count == MAX_NAMES || (size_t)(page + 4 + MAX_PAGE - to) < 4 + padded) {
            more = 1;
            break;
        }
        to = xdr_put_u32(to, entry->key_len);
        memset(to, 0, padded);
        memcpy(to, entry->bytes, entry->key_len);
        to += padded;
        count++;
    }
    pthread_rwlock_unlock(&store_lock);
    xdr_put_u32(page, count);
    to = xdr_put_u32(to, more);
    return rpcrdma_call_reply_with(call, page, (size_t)(to - page));
}

// The pool.

static void enqueue(void *context, rpcrdma_call *call, const void *args, size_t args_len) {
    (void)context, (void)args, (void)args_len;
    if (call_queue_put(call))
        rpcrdma_call_answer(call, RPCRDMA_SYSTEM_ERR);
}

static void *work(void *context) {
    (void)context;
    static int (*const procedures[])(rpcrdma_call *, struct xdr) = {
        [KV_GET] = get, [KV_PUT] = put, [KV_DELETE] = delete, [KV_LIST] = list};
    for (rpcrdma_call *call; (call = call_queue_take());) {
        rpcrdma_call_info info;
        int status = RPCRDMA_SYSTEM_ERR;
        if (!rpcrdma_call_header(call, &info, sizeof info))
            status = procedures[info.procedure](call, (struct xdr){info.args, info.args_len});
        if (rpcrdma_call_answer(call, status))
            fprintf(stderr, "kv_server: answer: %s\n", rpcrdma_error());
    }
    return NULL;
}

// The server's loop polls while there is work, and otherwise sleeps in epoll.

static void watch(int epoll, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (fd < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event))
        die("epoll", strerror(errno));
}

static void serve(rpcrdma_local_server *server, int stop) {
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    watch(epoll, stop);
    watch(epoll, rpcrdma_fd(server));
    unsigned int turns = 0;
    for (int draining = 0;;) {
        int busy = rpcrdma_local_server_poll(server);
        int drained = draining ? rpcrdma_local_server_drain(server) : 0;
        if (busy < 0 || drained < 0)
            die("poll", rpcrdma_error());
        if (drained)
            break;
        if (busy && ++turns % 64)
            continue;
        // While there is work, epoll only checks the other descriptors, without sleeping.
        int timeout = busy ? 0 : rpcrdma_arm(server, 1000);
        struct epoll_event events[2];
        int count = epoll_wait(epoll, events, 2, timeout > 0 ? timeout : 0);
        if (!busy && rpcrdma_disarm(server))
            die("disarm", rpcrdma_error());
        if (count < 0 && errno != EINTR)
            die("epoll_wait", strerror(errno));
        for (int i = 0; i < count; i++)
            draining |= events[i].data.fd == stop;
    }
    close(epoll);
}

static void print_log(void *context, int level, const char *line) {
    (void)context;
    (void)level;
    fprintf(stderr, "kv_server: %s\n", line);
}

int main(int argc, char **argv) {
    const char *address = "soft:kv";
    int threads = 4;
    rpcrdma_config *config = rpcrdma_config_new();
    rpcrdma_services *services = rpcrdma_services_new();
    if (!config || !services)
        die("start", rpcrdma_error());
    set(config, "memory.bulk_buffers", "[[16384, 64], [262144, 32]]");
    for (int option; (option = getopt(argc, argv, "a:t:s:")) != -1;) {
        if (option == 'a')
            address = optarg;
        else if (option == 't')
            threads = (int)number(optarg, 1, MAX_THREADS);
        else if (option == 's')
            set_knob(config, optarg);
        else
            die("usage", "kv_server [-a ADDRESS] [-t THREADS] [-s KNOB=VALUE]...");
    }

    // All threads inherit the mask, so that only the loop gets signals.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    int stop = signalfd(-1, &signals, SFD_CLOEXEC);

    const rpcrdma_procedure table[] = {
        {.number = KV_GET, .deferred = enqueue, .max_reply = 8 + MAX_INLINE, .write_chunks = 1, .max_write = MAX_VALUE},
        {.number = KV_PUT, .deferred = enqueue, .read_chunks = 1, .max_read = MAX_VALUE},
        {.number = KV_DELETE, .deferred = enqueue},
        {.number = KV_LIST, .deferred = enqueue, .max_reply = 8 + MAX_PAGE},
    };
    if (rpcrdma_log(print_log, NULL, 2) ||
        rpcrdma_services_add(services, PROGRAM, VERSION, table, sizeof table / sizeof *table, sizeof *table))
        die("start", rpcrdma_error());
    rpcrdma_local_server *server = rpcrdma_local_server_start(address, services, config);
    if (!server)
        die(address, rpcrdma_error());
    rpcrdma_free(services);
    rpcrdma_free(config);
    pthread_t pool[MAX_THREADS];
    for (int i = 0; i < threads; i++) {
        int error = pthread_create(&pool[i], NULL, work, NULL);
        if (error)
            die("pthread_create", strerror(error));
    }
    printf("listening on %s\n", address);
    fflush(stdout);
    serve(server, stop);

    // Calls of closed connections may still be queued. They must be answered before the server ends.
    call_queue_close();
    for (int i = 0; i < threads; i++)
        pthread_join(pool[i], NULL);
    if (rpcrdma_free(server))
        die("end", rpcrdma_error());
    close(stop);
    store_free();
    return 0;
}
