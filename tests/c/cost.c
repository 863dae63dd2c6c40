// What calls cost through C: both ends on one thread, polled in turn. engine/capi/examples/cost.rs is the same in Rust.
//
//   valgrind --tool=callgrind --toggle-collect='*server_side*' cost CALLS [write|read]
//
// Calls echo 64 bytes. With `write` and `read`, 4096 bytes travel in a Read or Write chunk.
#include <errno.h>
#include <rpcrdma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRAM 0x20000001
#define BULK 4096
#define CHECK(x)                                                                                                       \
    do                                                                                                                 \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "%s: %s\n", #x, rpcrdma_error());                                                          \
            exit(1);                                                                                                   \
        }                                                                                                              \
    while (0)

static char bulk[BULK];

static int echo(void *context, rpcrdma_call *call) {
    (void)context;
    size_t len;
    const void *args = rpcrdma_call_args(call, &len);
    void *results = rpcrdma_call_reply(call, len);
    if (!results)
        return -EMSGSIZE;
    memcpy(results, args, len);
    return 0;
}

static int take(void *context, rpcrdma_call *call) {
    (void)context;
    size_t len;
    return rpcrdma_call_read_chunk(call, 0, &len, NULL) && len == BULK ? 0 : RPCRDMA_GARBAGE_ARGS;
}

static int give(void *context, rpcrdma_call *call) {
    (void)context;
    void *memory = rpcrdma_call_write_chunk(call, 0, NULL);
    if (!memory)
        return -ENOENT;
    memcpy(memory, bulk, BULK);
    return rpcrdma_call_write_chunk_filled(call, 0, BULK);
}

static const rpcrdma_procedure TABLE[] = {
    {.number = 1, .handler = echo},
    {.number = 2, .handler = take, .flags = RPCRDMA_UNCOUNTED, .read_chunks = 1, .max_read = BULK},
    {.number = 3, .handler = give, .write_chunks = 1, .max_write = BULK},
};

static rpcrdma_local_client *client;
static rpcrdma_local_server *server;
static unsigned procedure = 1;
static int is_done;

__attribute__((noinline)) static void client_side_start(void) {
    void *args;
    rpcrdma_request *request = rpcrdma_local_client_request(client, procedure, procedure == 1 ? 64 : 0, &args);
    CHECK(request);
    if (procedure == 1) {
        memset(args, 7, 64);
    } else if (procedure == 2) {
        rpcrdma_buffer *data = rpcrdma_alloc(client, BULK);
        CHECK(data);
        memcpy(rpcrdma_buffer_data(data, NULL), bulk, BULK);
        CHECK(!rpcrdma_request_read_chunk(request, 0, data));
    } else {
        CHECK(!rpcrdma_request_write_chunk(request, NULL, BULK));
    }
    CHECK(!rpcrdma_local_client_start(client, request, 1, NULL));
}

static void done(void *context, uint64_t token, int error, rpcrdma_reply *reply) {
    (void)context, (void)token;
    size_t len;
    CHECK(!error && rpcrdma_reply_results(reply, &len));
    CHECK(procedure != 1 || len == 64);
    is_done = 1;
}

__attribute__((noinline)) static int client_side_poll(void) {
    return rpcrdma_local_client_poll(client, done, NULL);
}

__attribute__((noinline)) static int server_side(void) {
    return rpcrdma_local_server_poll(server);
}

int main(int argc, char **argv) {
    int calls = argc > 1 ? atoi(argv[1]) : 1000;
    if (argc > 2)
        procedure = strcmp(argv[2], "write") ? 3 : 2;
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "poll.idle", "event"));
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, PROGRAM, 1, TABLE, 3, sizeof *TABLE));
    CHECK(server = rpcrdma_local_server_start("soft:cost", services, config));
    CHECK(client = rpcrdma_local_client_begin("soft:cost", PROGRAM, 1, config));
    while (!rpcrdma_local_client_is_established(client)) {
        server_side();
        client_side_poll();
    }
    for (int i = 0; i < calls; i++) {
        is_done = 0;
        client_side_start();
        while (!is_done) {
            server_side();
            client_side_poll();
        }
    }
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(server) && !rpcrdma_free(services) && !rpcrdma_free(config));
    return 0;
}
