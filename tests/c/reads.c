// Read chunks are placed in memory of the application: at a server with threads, at a polled server, and at a polled
// client that is called back.
//
//   reads ADDRESS ADDRESS
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <rpcrdma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "check.h"

enum { PROGRAM = 0x20000001, PAGE = 64 << 10, PAGES = 24, CALLS = 3 * PAGES, KEPT = PAGES + 4 };

static unsigned char *memory;
static int released;
// Number of chunks in the application's memory, and in the library's.
static int inside, outside;
// The chunks that the handler has kept, at most KEPT of them, and their first bytes, which must not change.
static rpcrdma_buffer *kept[KEPT];
static unsigned char first[KEPT];
static int kept_count;

static void release(void *context) {
    *(int *)context += 1;
}

static int is_full_of(const unsigned char *data, size_t len, unsigned char value) {
    return data[0] == value && !memcmp(data, data + 1, len - 1);
}

// A handler that keeps the chunks of the first KEPT calls. KEPT exceeds the number of pages.
static int keep_chunk(void *context, rpcrdma_call *call, const void *args, size_t args_len, void *results,
                      size_t *results_len) {
    (void)context, (void)args, (void)args_len, (void)results, (void)results_len;
    size_t len;
    const unsigned char *data = rpcrdma_call_read_chunk(call, 0, &len, NULL);
    CHECK(data && len >= PAGE - CALLS && is_full_of(data, len, data[0]));
    size_t offset = (size_t)((uintptr_t)data - (uintptr_t)memory);
    if (offset < (size_t)PAGES * PAGE) {
        CHECK(offset % PAGE == 0);
        inside++;
    } else
        outside++;
    if (kept_count < KEPT) {
        first[kept_count] = data[0];
        CHECK(kept[kept_count++] = rpcrdma_call_take_read_chunk(call, 0));
    }
    return 0;
}

static void free_kept(void) {
    for (int i = 0; i < kept_count; i++) {
        size_t len;
        const unsigned char *data = rpcrdma_buffer_data(kept[i], &len);
        CHECK(data && is_full_of(data, len, first[i]));
        CHECK(!rpcrdma_free(kept[i]));
    }
    kept_count = KEPT;
}

static void done(void *context, const rpcrdma_completion *completion) {
    CHECK(!completion->error);
    *(int *)context = 1;
}

// Makes a call with a chunk whose bytes are `value`. `server` is NULL if the server has threads.
static void call(rpcrdma_local_client *client, rpcrdma_local_server *server, int value) {
    uint32_t len = htonl((uint32_t)(PAGE - value));
    rpcrdma_buffer *buffer = rpcrdma_alloc(client, PAGE);
    CHECK(buffer && !rpcrdma_buffer_window(buffer, 0, (size_t)(PAGE - value)));
    memset(rpcrdma_buffer_data(buffer, NULL), value, (size_t)(PAGE - value));
    rpcrdma_read_chunk chunk = {.position = sizeof len, .buffer = buffer};
    rpcrdma_request request = {
        .size = sizeof request, .procedure = 1, .args = &len, .args_len = sizeof len,
        .read_chunks = &chunk, .read_count = 1};
    CHECK(!rpcrdma_local_client_start(client, &request, NULL));
    for (int is_done = 0; !is_done;) {
        CHECK(rpcrdma_local_client_poll(client, done, &is_done) >= 0);
        CHECK(!server || rpcrdma_local_server_poll(server) >= 0);
    }
}

// Creates services whose Read chunks are placed in newly mapped memory.
static rpcrdma_services *new_services_with_memory(void) {
    memory = mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    inside = outside = kept_count = released = 0;
    rpcrdma_arena *arena = rpcrdma_arena_new(memory, (size_t)PAGES * PAGE, release, &released);
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(arena && services);
    const rpcrdma_procedure table[] = {
        {.number = 1, .handler = keep_chunk, .read_chunks = 1, .max_read = PAGE, .reads_into = arena}};
    CHECK(!rpcrdma_services_add(services, PROGRAM, 1, table, 1, sizeof *table) && !rpcrdma_free(arena));
    return services;
}

static rpcrdma_config *new_config(void) {
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
    return config;
}

static void run(const char *address, int is_polled) {
    rpcrdma_services *services = new_services_with_memory();
    rpcrdma_config *config = new_config();
    rpcrdma_local_server *polled = is_polled ? rpcrdma_local_server_start(address, services, config) : NULL;
    rpcrdma_server *server = is_polled ? NULL : rpcrdma_server_start(address, services, config);
    CHECK(polled || server);
    CHECK(!rpcrdma_free(services));
    rpcrdma_local_client *client = rpcrdma_local_client_begin(address, PROGRAM, 1, config);
    CHECK(client);
    for (int established = 0; !established;) {
        CHECK(rpcrdma_local_client_poll(client, NULL, NULL) >= 0);
        CHECK(!polled || rpcrdma_local_server_poll(polled) >= 0);
        CHECK((established = rpcrdma_local_client_is_established(client)) >= 0);
    }
    // While no page is free, chunks are placed in the library's memory.
    for (int i = 0; i < KEPT; i++)
        call(client, polled, i);
    CHECK(inside == PAGES && outside == KEPT - PAGES);
    free_kept();
    for (int i = KEPT; i < CALLS; i++)
        call(client, polled, i);
    CHECK(inside == PAGES + CALLS - KEPT && outside == KEPT - PAGES);
    CHECK(!released);
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(polled) && !rpcrdma_free(server) && !rpcrdma_free(config));
    CHECK(released == 1);
    CHECK(!munmap(memory, (size_t)PAGES * PAGE));
}

static rpcrdma_server *caller;

// A handler that calls the client back for each byte of the arguments, with a chunk filled with that byte.
static int call_back(void *context, rpcrdma_call *call, const void *args, size_t args_len, void *results,
                     size_t *results_len) {
    (void)context, (void)results, (void)results_len;
    rpcrdma_client *back = rpcrdma_server_call_back(caller, call, PROGRAM, 1, NULL);
    CHECK(back && args_len);
    for (size_t i = 0; i < args_len; i++) {
        rpcrdma_buffer *buffer = rpcrdma_alloc(back, PAGE);
        CHECK(buffer);
        memset(rpcrdma_buffer_data(buffer, NULL), ((const unsigned char *)args)[i], PAGE);
        uint32_t len = htonl(PAGE);
        rpcrdma_read_chunk chunk = {.position = sizeof len, .buffer = buffer};
        rpcrdma_request request = {
            .size = sizeof request, .procedure = 1, .args = &len, .args_len = sizeof len,
            .read_chunks = &chunk, .read_count = 1};
        CHECK(!rpcrdma_client_call(back, &request, NULL));
    }
    CHECK(!rpcrdma_free(back));
    return 0;
}

// Makes a call during which the server makes `calls` calls back. The number must be a multiple of 4, as in XDR.
static void make_call_backs(rpcrdma_local_client *client, int calls) {
    unsigned char bytes[KEPT];
    for (int i = 0; i < calls; i++)
        bytes[i] = (unsigned char)(i + 1);
    rpcrdma_request request = {.size = sizeof request, .procedure = 2, .args = bytes, .args_len = (size_t)calls};
    CHECK(!rpcrdma_local_client_start(client, &request, NULL));
    for (int is_done = 0; !is_done;)
        CHECK(rpcrdma_local_client_poll(client, done, &is_done) >= 0);
}

// Several clients in turn use the same memory, which the end of each client returns.
static void run_callbacks(const char *address) {
    enum { CLIENTS = 3 };
    rpcrdma_services *services = new_services_with_memory(), *server_services = rpcrdma_services_new();
    rpcrdma_config *config = new_config(), *client_config = new_config();
    const rpcrdma_procedure table[] = {{.number = 2, .handler = call_back, .flags = RPCRDMA_ON_WORKERS}};
    CHECK(server_services && !rpcrdma_services_add(server_services, PROGRAM, 1, table, 1, sizeof *table));
    CHECK(!rpcrdma_config_set(config, "server.workers", "1"));
    CHECK(caller = rpcrdma_server_start(address, server_services, config));
    CHECK(!rpcrdma_config_callbacks(client_config, services));
    CHECK(!rpcrdma_free(services) && !rpcrdma_free(server_services));
    for (int i = 0; i < CLIENTS; i++) {
        rpcrdma_local_client *client = rpcrdma_local_client_connect(address, PROGRAM, 1, client_config);
        CHECK(client);
        inside = outside = kept_count = 0;
        make_call_backs(client, KEPT);
        CHECK(inside == PAGES && outside == KEPT - PAGES);
        free_kept();
        make_call_backs(client, PAGES);
        CHECK(inside == 2 * PAGES && outside == KEPT - PAGES);
        CHECK(!rpcrdma_free(client) && !released);
    }
    CHECK(!rpcrdma_free(client_config) && released == 1);
    CHECK(!rpcrdma_free(caller) && !rpcrdma_free(config));
    CHECK(!munmap(memory, (size_t)PAGES * PAGE));
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    CHECK(!rpcrdma_arena_new(NULL, PAGE, release, &released) && released == 1);
    run(argv[1], 0);
    run(argv[2], 1);
    printf("%d of %d chunks, ", inside, CALLS);
    run_callbacks(argv[1]);
    printf("and %d of %d in callbacks\n", inside, KEPT + PAGES);
    return 0;
}
