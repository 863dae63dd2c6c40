// Polled servers and clients that move from one thread to another, and polled servers that call their clients back.
//
//   threads ADDRESS ADDRESS
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <rpcrdma.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

enum { PROGRAM = 0x20000001, BACK_PROGRAM = 0x20000002, CALLS = 50, BULK = 16384 };
enum { ECHO = 1, CALL_BACK, BULK_ECHO };

// The call that CALL_BACK keeps. Tests also set it to any address while they wait for a completion, which clears it.
static rpcrdma_call *caller;
static int detached_in_done;

static int echo(void *context, rpcrdma_call *call, const void *args, size_t len, void *results, size_t *results_len) {
    (void)context, (void)call;
    CHECK(len == 4);
    memcpy(results, args, *results_len = len);
    return 0;
}

// A handler that returns a Read chunk as its result.
static int bulk_echo(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                     size_t *results_len) {
    (void)context, (void)args, (void)len, (void)results, (void)results_len;
    return rpcrdma_call_result(call, 0, rpcrdma_call_take_read_chunk(call, 0));
}

static void keep_call(void *context, rpcrdma_call *call, const void *args, size_t len) {
    (void)args, (void)len;
    // The poll is using the server, so handlers cannot use it.
    rpcrdma_local_server *polled = *(rpcrdma_local_server **)context;
    CHECK(!rpcrdma_local_server_call_back(polled, call, BACK_PROGRAM, 1, NULL) && errno == EBUSY);
    CHECK(rpcrdma_detach(polled) == -EBUSY && rpcrdma_free(polled) == -EBUSY);
    caller = call;
}

static rpcrdma_local_server *server;
static const rpcrdma_procedure TABLE[] = {
    {.number = ECHO, .handler = echo},
    {.number = CALL_BACK, .deferred = keep_call, .context = &server},
    {.number = BULK_ECHO, .handler = bulk_echo, .read_chunks = 1, .max_read = BULK, .write_chunks = 1,
     .max_write = BULK, .flags = RPCRDMA_UNCOUNTED},
};
static const rpcrdma_procedure BACK_TABLE[] = {{.number = ECHO, .handler = echo}};

static rpcrdma_config *new_config(void) {
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
    CHECK(!rpcrdma_config_set(config, "poll.idle", "event"));
    return config;
}

static void start_server(const char *address) {
    rpcrdma_config *config = new_config();
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, PROGRAM, 1, TABLE, 3, sizeof *TABLE));
    CHECK(server = rpcrdma_local_server_start(address, services, config));
    CHECK(!rpcrdma_free(services) && !rpcrdma_free(config));
}

static rpcrdma_local_client *begin_client(const char *address) {
    rpcrdma_config *config = new_config();
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, BACK_PROGRAM, 1, BACK_TABLE, 1, sizeof *BACK_TABLE));
    CHECK(!rpcrdma_config_callbacks(config, services));
    rpcrdma_local_client *client = rpcrdma_local_client_begin(address, PROGRAM, 1, config);
    CHECK(client && !rpcrdma_free(services) && !rpcrdma_free(config));
    while (!rpcrdma_local_client_is_established(client))
        CHECK(rpcrdma_local_server_poll(server) >= 0 && rpcrdma_local_client_poll(client, NULL, NULL) >= 0);
    return client;
}

static void done(void *context, const rpcrdma_completion *completion) {
    uint32_t number;
    CHECK(!completion->error && completion->results_len == sizeof number);
    memcpy(&number, completion->results, sizeof number);
    CHECK(number == completion->token);
    if (context)
        detached_in_done = rpcrdma_detach(context);
    caller = NULL;
}

static void bulk_done(void *context, const rpcrdma_completion *completion) {
    CHECK(!completion->error);
    rpcrdma_buffer *buffer = rpcrdma_reply_take_write_chunk(completion->reply, 0);
    size_t len;
    const char *data = rpcrdma_buffer_data(buffer, &len);
    CHECK(len == BULK && data[0] == 'x' && !memcmp(data, data + 1, BULK - 1));
    CHECK(!rpcrdma_free(buffer));
    *(int *)context = 1;
}

// Makes calls of all kinds on this thread, which polls both ends.
static void make_calls(rpcrdma_local_client *client) {
    static char data[BULK];
    memset(data, 'x', sizeof data);
    for (uint32_t i = 0; i < CALLS; i++) {
        caller = (rpcrdma_call *)&server;
        rpcrdma_request request = REQUEST(.procedure = ECHO, .token = i, .args = &i, .args_len = sizeof i);
        CHECK(!rpcrdma_local_client_start(client, &request, NULL));
        while (caller)
            CHECK(rpcrdma_local_server_poll(server) >= 0 && rpcrdma_local_client_poll(client, done, NULL) >= 0);
        rpcrdma_read_chunk read = {.data = data, .len = BULK};
        rpcrdma_write_chunk write = {.len = BULK};
        request = REQUEST(.procedure = BULK_ECHO, .read_chunks = &read, .read_count = 1, .write_chunks = &write,
                          .write_count = 1);
        CHECK(!rpcrdma_local_client_start(client, &request, NULL));
        for (int is_done = 0; !is_done;)
            CHECK(rpcrdma_local_server_poll(server) >= 0 &&
                  rpcrdma_local_client_poll(client, bulk_done, &is_done) >= 0);
    }
}

// Uses both ends on another thread, which must attach them first.
static void *use_both_ends(void *client) {
    CHECK(rpcrdma_local_client_poll(client, NULL, NULL) == -EPERM && rpcrdma_local_server_poll(server) == -EPERM);
    CHECK(!rpcrdma_attach(client) && !rpcrdma_attach(server) && !rpcrdma_attach(server));
    make_calls(client);
    return NULL;
}

static void *attach_foreign(void *client) {
    CHECK(rpcrdma_attach(client) == -EPERM && rpcrdma_free(client) == -EPERM && rpcrdma_detach(client) == -EPERM);
    return NULL;
}

static void *begin_elsewhere(void *address) {
    start_server(address);
    rpcrdma_local_client *client = begin_client(address);
    make_calls(client);
    return client;
}

static void *run_elsewhere(void *(*function)(void *), void *argument) {
    pthread_t thread;
    void *result;
    CHECK(!pthread_create(&thread, NULL, function, argument) && !pthread_join(thread, &result));
    return result;
}

static void check_moves(char *address) {
    start_server(address);
    rpcrdma_local_client *client = begin_client(address);
    make_calls(client);
    // A buffer of the client remains on this thread.
    rpcrdma_buffer *kept = rpcrdma_alloc(client, 64);
    CHECK(kept);
    run_elsewhere(attach_foreign, client);
    // A client cannot be detached in its callback.
    uint32_t number = 7;
    caller = (rpcrdma_call *)&server;
    CHECK(!rpcrdma_local_client_start(
        client, &REQUEST(.procedure = ECHO, .token = 7, .args = &number, .args_len = 4), NULL));
    while (caller)
        CHECK(rpcrdma_local_server_poll(server) >= 0 && rpcrdma_local_client_poll(client, done, client) >= 0);
    CHECK(detached_in_done == -EBUSY);
    CHECK(!rpcrdma_detach(client) && !rpcrdma_detach(server));
    CHECK(rpcrdma_local_client_poll(client, NULL, NULL) == -EPERM && rpcrdma_detach(client) == -EPERM);
    run_elsewhere(use_both_ends, client);
    // After the end of the other thread, this thread frees a buffer, and then attaches both ends.
    CHECK(!rpcrdma_free(kept));
    CHECK(rpcrdma_local_client_poll(client, NULL, NULL) == -EPERM);
    CHECK(!rpcrdma_attach(client) && !rpcrdma_attach(server));
    make_calls(client);
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(server));
    // Both ends were created by a thread that has ended. This thread can free them.
    client = run_elsewhere(begin_elsewhere, address);
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(server));
}

static void back_done(void *context, const rpcrdma_completion *completion) {
    uint32_t number;
    CHECK(!completion->error && completion->results_len == sizeof number);
    memcpy(&number, completion->results, sizeof number);
    CHECK(number == 40 + completion->token);
    ++*(int *)context;
}

static void count_lost(void *context, const rpcrdma_completion *completion) {
    CHECK(completion->error < 0);
    ++*(int *)context;
}

static void *call_elsewhere(void *back) {
    uint32_t number = 9;
    rpcrdma_reply *reply;
    CHECK(!rpcrdma_client_call(back, &REQUEST(.procedure = ECHO, .args = &number, .args_len = 4), &reply));
    CHECK(*(const uint32_t *)rpcrdma_reply_results(reply, NULL) == 9 && !rpcrdma_free(reply));
    __atomic_store_n(&caller, NULL, __ATOMIC_RELEASE);
    return NULL;
}

static void check_calls_back(const char *address) {
    start_server(address);
    rpcrdma_local_client *client = begin_client(address);
    CHECK(!rpcrdma_local_client_start(client, &REQUEST(.procedure = CALL_BACK), NULL));
    while (!caller)
        CHECK(rpcrdma_local_server_poll(server) >= 0 && rpcrdma_local_client_poll(client, NULL, NULL) >= 0);
    rpcrdma_client *back = rpcrdma_local_server_call_back(server, caller, BACK_PROGRAM, 1, NULL);
    CHECK(back && !rpcrdma_call_answer(caller, 0));
    // Calls after the answer, on the thread that polls the server.
    int ended = 0;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t number = 40 + i;
        CHECK(!rpcrdma_client_start(back, &REQUEST(.procedure = ECHO, .token = i, .args = &number, .args_len = 4)));
    }
    CHECK(rpcrdma_client_poll(back, back_done, &ended) == 0);
    while (ended < 4) {
        CHECK(rpcrdma_local_server_poll(server) >= 0 && rpcrdma_local_client_poll(client, NULL, NULL) >= 0);
        CHECK(rpcrdma_client_poll(back, NULL, NULL) == 0 && rpcrdma_client_poll(back, back_done, &ended) >= 0);
    }
    // A blocking call on this thread would wait for the thread itself, so it is refused.
    CHECK(rpcrdma_client_call(back, &REQUEST(.procedure = ECHO), NULL) == -EDEADLK);
    CHECK(strstr(rpcrdma_error(), "rpcrdma_client_start"));
    CHECK(!rpcrdma_alloc(back, 64) && errno == EDEADLK && rpcrdma_stats(back, NULL, 0) == -EDEADLK);
    // On another thread, a blocking call is possible.
    caller = (rpcrdma_call *)&server;
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, call_elsewhere, back));
    while (__atomic_load_n(&caller, __ATOMIC_ACQUIRE))
        CHECK(rpcrdma_local_server_poll(server) >= 0 && rpcrdma_local_client_poll(client, NULL, NULL) >= 0);
    CHECK(!pthread_join(thread, NULL));
    // The end of the server ends the calls that it makes.
    CHECK(!rpcrdma_client_start(back, &REQUEST(.procedure = ECHO, .args = &ended, .args_len = 4)));
    CHECK(!rpcrdma_free(server) && rpcrdma_client_poll(back, count_lost, &ended) == 1 && ended == 5);
    CHECK(rpcrdma_client_start(back, &REQUEST(.procedure = ECHO)) == -ENOTCONN);
    // After the end of the server, no thread drives the connection, so the code is not EDEADLK.
    CHECK(rpcrdma_client_call(back, &REQUEST(.procedure = ECHO), NULL) == -ENOTCONN);
    CHECK(strstr(rpcrdma_error(), "server of this client was freed") && strstr(rpcrdma_error(), "free the client"));
    CHECK(!rpcrdma_alloc(back, 64) && errno == ENOTCONN && rpcrdma_stats(back, NULL, 0) == 2);
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(back));
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    check_moves(argv[1]);
    check_calls_back(argv[2]);
    printf("moves of polled servers and clients, calls of polled servers\n");
    return 0;
}
