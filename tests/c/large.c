// Makes a call with 64 MiB of chunk memory. The thread `rpcrdma-unmap` unmaps so large a mapping, perhaps after the
// last rpcrdma_free. valgrind must not report it as a leak (tests/c/run, check_large).
#include <rpcrdma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x) ((x) ? (void)0 : (fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, rpcrdma_error()), exit(1)))

enum { PROGRAM = 0x20000077 };

static int succeed(void *context, rpcrdma_call *call, const void *args, size_t args_len, void *results,
                   size_t *results_len) {
    (void)context, (void)call, (void)args, (void)args_len, (void)results;
    *results_len = 0;
    return 0;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    static const rpcrdma_procedure table[] = {{.number = 1, .handler = succeed, .read_chunks = 1, .max_read = 4096}};
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "memory.bulk_buffers", "[[1048576, 64]]"));
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, PROGRAM, 1, table, 1, sizeof *table));
    rpcrdma_server *server = rpcrdma_server_start(argv[1], services, NULL);
    CHECK(server);
    rpcrdma_client *client = rpcrdma_client_connect(argv[1], PROGRAM, 1, config);
    CHECK(client);
    static const char data[4096];
    const uint32_t length = 0x00100000; // 4096, in XDR
    const rpcrdma_read_chunk chunk = {.position = 4, .data = (void *)data, .len = sizeof data};
    CHECK(!rpcrdma_client_call(client, &(rpcrdma_request){.size = sizeof(rpcrdma_request), .procedure = 1, .args = &length,
                                                          .args_len = sizeof length, .read_chunks = &chunk,
                                                          .read_count = 1}, NULL));
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(server) && !rpcrdma_free(services) && !rpcrdma_free(config));
    printf("64 MiB of chunk memory\n");
    return 0;
}
