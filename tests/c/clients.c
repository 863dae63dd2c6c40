// Three clients of one server in the same process. Each client connects, calls and ends on its own thread.
//
//   clients ADDRESS ADDRESS
#define _GNU_SOURCE
#include <pthread.h>
#include <rpcrdma.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

enum { PROGRAM = 0x20000001, CLIENTS = 3, CONNECTS = 12, CALLS = 8, BULK = 4096 };
enum { ECHO = 1, RECEIVE };

static int echo(void *context, rpcrdma_call *call, const void *args, size_t len, void *results, size_t *results_len) {
    (void)context, (void)call;
    memcpy(results, args, *results_len = len);
    return 0;
}

static int receive(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                   size_t *results_len) {
    (void)context, (void)call, (void)args, (void)len, (void)results, (void)results_len;
    return 0;
}

static void make_calls(rpcrdma_client *client, uint32_t number) {
    rpcrdma_buffer *buffer = rpcrdma_alloc(client, BULK);
    CHECK(buffer);
    memset(rpcrdma_buffer_data(buffer, NULL), 'x', BULK);
    rpcrdma_read_chunk read = {.buffer = buffer};
    CHECK(!rpcrdma_client_call(client, &REQUEST(.procedure = RECEIVE, .read_chunks = &read, .read_count = 1), NULL));
    rpcrdma_reply *reply;
    CHECK(!rpcrdma_client_call(client, &REQUEST(.procedure = ECHO, .args = &number, .args_len = 4), &reply));
    CHECK(*(const uint32_t *)rpcrdma_reply_results(reply, NULL) == number && !rpcrdma_free(reply));
}

static void *run_client(void *address) {
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
    CHECK(!rpcrdma_config_set(config, "poll.idle", "event"));
    for (uint32_t connect = 0; connect < CONNECTS; connect++) {
        rpcrdma_client *client = rpcrdma_client_connect(address, PROGRAM, 1, config);
        CHECK(client);
        for (uint32_t call = 0; call < CALLS; call++)
            make_calls(client, call);
        CHECK(!rpcrdma_free(client));
    }
    CHECK(!rpcrdma_free(config));
    return NULL;
}

int main(int argc, char **argv) {
    static const rpcrdma_procedure table[] = {
        {.number = ECHO, .handler = echo},
        {.number = RECEIVE, .handler = receive, .read_chunks = 1, .max_read = BULK, .flags = RPCRDMA_UNCOUNTED},
    };
    CHECK(argc == 3);
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, PROGRAM, 1, table, 2, sizeof *table));
    rpcrdma_server *server = rpcrdma_server_start(argv[1], services, NULL);
    CHECK(server && !rpcrdma_free(services));
    pthread_t threads[CLIENTS];
    for (int i = 0; i < CLIENTS; i++)
        CHECK(!pthread_create(&threads[i], NULL, run_client, argv[1]));
    for (int i = 0; i < CLIENTS; i++)
        CHECK(!pthread_join(threads[i], NULL));
    CHECK(!rpcrdma_free(server));
    printf("%d clients, %d connects of each\n", CLIENTS, CONNECTS);
    return 0;
}
