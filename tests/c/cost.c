// Instructions of calls in C, for comparison with engine/capi/examples/cost.rs in Rust. One thread polls both ends.
//
//   valgrind --tool=callgrind --toggle-collect='*server_side_poll*' cost CALLS [write|read|config]
//
// Calls echo 64 bytes. With `write` or `read`, 4096 bytes travel in a Read or Write chunk. With `config`, the program
// instead sets a knob CALLS times, in config_side_set, in a configuration that has other knobs.
#include <errno.h>
#include <rpcrdma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

#define PROGRAM 0x20000001
#define BULK 4096
#define ROOM 256 // the default of max_reply

static char bulk[BULK];

static int echo(void *context, rpcrdma_call *call, const void *args, size_t len, void *results, size_t *results_len) {
    (void)context, (void)call;
    if (len > ROOM)
        return RPCRDMA_GARBAGE_ARGS;
    memcpy(results, args, len);
    *results_len = len;
    return 0;
}

static int receive_chunk(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                         size_t *results_len) {
    (void)context, (void)args, (void)results, (void)results_len;
    return rpcrdma_call_read_chunk(call, 0, &len, NULL) && len == BULK ? 0 : RPCRDMA_GARBAGE_ARGS;
}

static int send_chunk(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                      size_t *results_len) {
    (void)context, (void)args, (void)len, (void)results, (void)results_len;
    void *memory = rpcrdma_call_write_chunk(call, 0, NULL);
    if (!memory)
        return -ENOENT;
    memcpy(memory, bulk, BULK);
    return rpcrdma_call_write_chunk_filled(call, 0, BULK);
}

static const rpcrdma_procedure TABLE[] = {
    {.number = 1, .handler = echo},
    {.number = 2, .handler = receive_chunk, .flags = RPCRDMA_UNCOUNTED, .read_chunks = 1, .max_read = BULK},
    {.number = 3, .handler = send_chunk, .write_chunks = 1, .max_write = BULK},
};

static rpcrdma_local_client *client;
static rpcrdma_local_server *server;
static unsigned procedure = 1;
static int is_done;

__attribute__((noinline)) static void client_side_start(void) {
    rpcrdma_request request = {.size = sizeof request, .procedure = procedure, .token = 1};
    if (procedure == 1) {
        request.args = bulk, request.args_len = 64;
        CHECK(!rpcrdma_local_client_start(client, &request, NULL));
    } else if (procedure == 2) {
        rpcrdma_read_chunk data = {.data = bulk, .len = BULK};
        request.read_chunks = &data, request.read_count = 1;
        CHECK(!rpcrdma_local_client_start(client, &request, NULL));
    } else {
        rpcrdma_write_chunk room = {.len = BULK};
        request.write_chunks = &room, request.write_count = 1;
        CHECK(!rpcrdma_local_client_start(client, &request, NULL));
    }
}

static void done(void *context, const rpcrdma_completion *completion) {
    (void)context;
    CHECK(!completion->error && (procedure != 1 || completion->results_len == 64));
    is_done = 1;
}

__attribute__((noinline)) static int client_side_poll(void) {
    return rpcrdma_local_client_poll(client, done, NULL);
}

__attribute__((noinline)) static int server_side_poll(void) {
    return rpcrdma_local_server_poll(server);
}

static rpcrdma_config *config;

__attribute__((noinline)) static void config_side_set(void) {
    CHECK(!rpcrdma_config_set(config, "memory.receives", "4096"));
}

// Sets other knobs, as a program may do first.
static void set_other_knobs(void) {
    static const char *const knobs[][2] = {
        {"prefault", "false"},         {"limits.credits", "16"},     {"limits.max_calls", "64"},
        {"limits.max_reads", "8"},     {"timeouts.progress", "20s"}, {"timeouts.keep_alive", "30s"},
        {"connect.timeout", "5s"},     {"wire.host_key", "a:000102030405060708090a0b0c0d0e0f"},
        {"wire.receive_size", "8192"}, {"accept.evict_after", "1h"}, {"memory.bulk_buffers", "[[65536, 3]]"},
        {"client.auth_sys", "1:1"},
    };
    for (size_t i = 0; i < sizeof knobs / sizeof *knobs; i++)
        CHECK(!rpcrdma_config_set(config, knobs[i][0], knobs[i][1]));
}

int main(int argc, char **argv) {
    int calls = argc > 1 ? atoi(argv[1]) : 1000;
    if (argc > 2)
        procedure = strcmp(argv[2], "write") ? 3 : 2;
    CHECK((config = rpcrdma_config_new()) && !rpcrdma_config_set(config, "poll.idle", "event"));
    if (argc > 2 && !strcmp(argv[2], "config")) {
        set_other_knobs();
        for (int i = 0; i < calls; i++)
            config_side_set();
        return rpcrdma_free(config);
    }
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, PROGRAM, 1, TABLE, 3, sizeof *TABLE));
    CHECK(server = rpcrdma_local_server_start("soft:cost", services, config));
    CHECK(client = rpcrdma_local_client_begin("soft:cost", PROGRAM, 1, config));
    while (!rpcrdma_local_client_is_established(client)) {
        server_side_poll();
        client_side_poll();
    }
    for (int i = 0; i < calls; i++) {
        is_done = 0;
        client_side_start();
        while (client_side_poll(), !is_done)
            server_side_poll();
    }
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(server) && !rpcrdma_free(services) && !rpcrdma_free(config));
    return 0;
}
