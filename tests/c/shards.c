// A server of two shards, one for each address. A call's `shard` is the shard whose task runs on the handler's thread.
//
//   shards ADDRESS ADDRESS
#include <pthread.h>
#include <rpcrdma.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"

enum { SHARDS = 2, CALLS = 20, PROGRAM = 0x20000001 };

// One element for each shard, used only by the shard's thread until it has ended.
static struct {
    pthread_t thread;
    int has_run, calls;
} shards[SHARDS];

static int record_thread(void *context, unsigned shard) {
    (void)context;
    CHECK(shard < SHARDS);
    shards[shard].thread = pthread_self();
    shards[shard].has_run = 1;
    return 0;
}

static void check_shard_of_call(void *context, rpcrdma_call *call, const void *args, size_t args_len) {
    (void)context, (void)args, (void)args_len;
    rpcrdma_call_info info;
    CHECK(!rpcrdma_call_header(call, &info, sizeof info) && info.shard < SHARDS);
    if (shards[info.shard].has_run)
        CHECK(pthread_equal(shards[info.shard].thread, pthread_self()));
    shards[info.shard].calls += shards[info.shard].has_run;
    CHECK(!rpcrdma_call_answer(call, 0));
}

int main(int argc, char **argv) {
    CHECK(argc == 1 + SHARDS);
    char addresses[200];
    snprintf(addresses, sizeof addresses, "%s,%s", argv[1], argv[2]);
    const rpcrdma_procedure table[] = {{.number = 1, .deferred = check_shard_of_call}};
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, PROGRAM, 1, table, 1, sizeof *table));
    CHECK(!rpcrdma_services_task(services, record_thread, NULL, NULL));
    rpcrdma_server *server = rpcrdma_server_start(addresses, services, config);
    CHECK(server);
    for (int i = 0; i < SHARDS; i++) {
        rpcrdma_client *client = rpcrdma_client_connect(argv[1 + i], PROGRAM, 1, config);
        CHECK(client);
        for (int call = 0; call < CALLS; call++)
            CHECK(!rpcrdma_client_call(client, &REQUEST(.procedure = 1), NULL));
        CHECK(!rpcrdma_free(client));
    }
    // After the drain, the threads of the server have ended.
    CHECK(!rpcrdma_server_drain(server, 10000));
    CHECK(shards[0].calls > 0 && shards[1].calls > 0 && !pthread_equal(shards[0].thread, shards[1].thread));
    CHECK(!rpcrdma_free(services) && !rpcrdma_free(config));
    printf("%d and %d calls\n", shards[0].calls, shards[1].calls);
    return 0;
}
