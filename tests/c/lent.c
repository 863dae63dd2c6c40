// A store lends its blocks to replies, and overwrites a block in place once `release` reports that no reply uses it.
//
//   lent ADDRESS ADDRESS
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <rpcrdma.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "check.h"

enum { PROGRAM = 0x20000001, READ = 1, WRITE = 2, BLOCK = 64 << 10, BLOCKS = 4 };
enum { DEPTH = 16, CALLS = 2000, ABANDONED_READS = 20 };

static struct block {
    unsigned char *data;
    pthread_mutex_t lock;
    // Replies that use the block.
    int readers;
    // A call that will fill the block with `value` once no reply uses it.
    rpcrdma_call *writer;
    int value;
} blocks[BLOCKS];
static atomic_int lent, released, released_arenas, writes_waited, refused;
static int reads_done, writes_done;
// Whether a write of the block is outstanding.
static int is_written[BLOCKS];

static void release_arena(void *context) {
    (void)context;
    released_arenas++;
}

// Fills a block that no reply uses.
static void fill(struct block *block, rpcrdma_call *writer) {
    memset(block->data, block->value, BLOCK);
    CHECK(!rpcrdma_call_answer(writer, 0));
}

// Releases a part of the arena. The arena's own release comes after those of all parts.
static void release(void *context) {
    struct block *block = context;
    CHECK(!released_arenas);
    CHECK(!pthread_mutex_lock(&block->lock));
    rpcrdma_call *writer = --block->readers ? NULL : block->writer;
    if (writer) {
        block->writer = NULL;
        writes_waited++;
        fill(block, writer);
    }
    CHECK(!pthread_mutex_unlock(&block->lock));
    released++;
}

// Returns the block of a call, and sets `*value` to the call's value.
static struct block *parse_args(const void *args, size_t len, int *value) {
    uint32_t words[2];
    CHECK(len == sizeof words);
    memcpy(words, args, len);
    CHECK(words[0] < BLOCKS);
    *value = (int)words[1];
    return &blocks[words[0]];
}

// Lends the whole block, or 0 bytes of it if the call's value is not 0. The results contain the block's value.
static void read_block(void *context, rpcrdma_call *call, const void *args, size_t len) {
    int value;
    struct block *block = parse_args(args, len, &value);
    CHECK(!pthread_mutex_lock(&block->lock));
    block->readers++;
    size_t part_len = value ? 0 : BLOCK;
    uint32_t results[] = {block->data[0], htonl((uint32_t)part_len)};
    CHECK(!pthread_mutex_unlock(&block->lock));
    size_t start = (size_t)(block->data - blocks[0].data);
    rpcrdma_buffer *part = rpcrdma_arena_part(context, start, part_len, release, block);
    CHECK(part);
    lent++;
    int status = rpcrdma_call_result(call, 0, part);
    if (status)
        refused++;
    else
        CHECK(!rpcrdma_call_reply_with(call, results, sizeof results));
    CHECK(!rpcrdma_call_answer(call, status));
}

static void write_block(void *context, rpcrdma_call *call, const void *args, size_t len) {
    (void)context;
    int value;
    struct block *block = parse_args(args, len, &value);
    CHECK(!pthread_mutex_lock(&block->lock));
    CHECK(!block->writer);
    block->value = value;
    if (block->readers)
        block->writer = call;
    else
        fill(block, call);
    CHECK(!pthread_mutex_unlock(&block->lock));
}

static void done(void *context, const rpcrdma_completion *completion) {
    int *free_slots = context;
    CHECK(!completion->error);
    if (completion->token < BLOCKS) {
        is_written[completion->token] = 0;
        writes_done++;
    } else {
        size_t len;
        rpcrdma_buffer *buffer = rpcrdma_reply_take_write_chunk(completion->reply, 0);
        CHECK(buffer);
        const unsigned char *data = rpcrdma_buffer_data(buffer, &len);
        uint32_t results[2];
        CHECK(completion->results_len == sizeof results);
        memcpy(results, completion->results, sizeof results);
        CHECK(len == ntohl(results[1]));
        CHECK(!len || (len == BLOCK && data[0] == results[0] && !memcmp(data, data + 1, BLOCK - 1)));
        CHECK(!rpcrdma_free(buffer));
        reads_done++;
    }
    ++*free_slots;
}

// Starts a call. `room` is the length of its Write chunk.
static void start_call(rpcrdma_local_client *client, uint32_t procedure, uint32_t block, uint32_t value, size_t room) {
    uint32_t words[] = {block, value};
    rpcrdma_write_chunk chunk = {.len = room};
    rpcrdma_request request = {
        .size = sizeof request, .procedure = procedure, .token = block,
        .args = words, .args_len = sizeof words, .max_reply = 8};
    if (procedure == READ)
        request.token = BLOCKS, request.write_chunks = &chunk, request.write_count = 1;
    else
        is_written[block] = 1;
    CHECK(!rpcrdma_local_client_start(client, &request, NULL));
}

static void poll_ends(rpcrdma_local_client *client, rpcrdma_local_server *server, rpcrdma_done function,
                      void *context) {
    CHECK(rpcrdma_local_client_poll(client, function, context) >= 0);
    CHECK(!server || rpcrdma_local_server_poll(server) >= 0);
}

static rpcrdma_local_client *connect_client(const char *address, rpcrdma_config *config, rpcrdma_local_server *server) {
    rpcrdma_local_client *client = rpcrdma_local_client_begin(address, PROGRAM, 1, config);
    CHECK(client);
    for (int is_established = 0; !is_established;) {
        poll_ends(client, server, NULL, NULL);
        CHECK((is_established = rpcrdma_local_client_is_established(client)) >= 0);
    }
    return client;
}

static void run(const char *address, int is_polled) {
    unsigned char *memory =
        mmap(NULL, (size_t)BLOCKS * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    released_arenas = lent = released = writes_waited = refused = reads_done = writes_done = 0;
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = (struct block){.data = memory + (size_t)i * BLOCK};
        CHECK(!pthread_mutex_init(&blocks[i].lock, NULL));
    }
    rpcrdma_arena *arena = rpcrdma_arena_new(memory, (size_t)BLOCKS * BLOCK, release_arena, NULL);
    rpcrdma_config *config = rpcrdma_config_new();
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(arena && config && services && !rpcrdma_config_arena(config, arena));
    CHECK(!rpcrdma_config_set(config, "prefault", "false"));
    CHECK(!rpcrdma_config_set(config, "memory.bulk_buffers", "[[\"64KiB\", 40]]"));
    const rpcrdma_procedure table[] = {
        {.number = READ, .flags = RPCRDMA_OWN_RESULTS, .deferred = read_block, .context = arena, .max_reply = 8,
         .write_chunks = 1, .max_write = BLOCK},
        {.number = WRITE, .deferred = write_block}};
    CHECK(!rpcrdma_services_add(services, PROGRAM, 1, table, 2, sizeof *table));
    rpcrdma_local_server *polled = is_polled ? rpcrdma_local_server_start(address, services, config) : NULL;
    rpcrdma_server *server = is_polled ? NULL : rpcrdma_server_start(address, services, config);
    CHECK(polled || server);

    // Each block is read three times, then written.
    rpcrdma_local_client *client = connect_client(address, config, polled);
    int free_slots = DEPTH;
    for (int i = 0; i < CALLS;) {
        for (uint32_t block = (uint32_t)(i / 4 % BLOCKS); i < CALLS && free_slots && !is_written[block]; free_slots--) {
            if (i++ % 4 < 3)
                start_call(client, READ, block, 0, BLOCK);
            else
                start_call(client, WRITE, block, (uint32_t)(i / 16 % 256), 0);
            block = (uint32_t)(i / 4 % BLOCKS);
        }
        poll_ends(client, polled, done, &free_slots);
    }
    while (free_slots < DEPTH)
        poll_ends(client, polled, done, &free_slots);
    // All parts are released without another call.
    while (released < lent)
        poll_ends(client, polled, NULL, NULL);
    CHECK(reads_done == lent && writes_done == CALLS / 4 && reads_done == 3 * writes_done);
    CHECK(writes_waited > 0 && !refused);

    // A part that exceeds the chunk is released immediately. The client then retransmits the call with a longer chunk.
    free_slots = 0;
    start_call(client, READ, 0, 0, BLOCK / 2);
    while (!free_slots)
        poll_ends(client, polled, done, &free_slots);
    CHECK(refused == 1);

    // A part of 0 bytes is an empty result.
    start_call(client, READ, 0, 1, BLOCK);
    while (free_slots < 2 || released < lent)
        poll_ends(client, polled, done, &free_slots);
    CHECK(reads_done == 3 * writes_done + 2 && refused == 1);

    // The client is freed while its reads are outstanding.
    for (int i = 0; i < ABANDONED_READS; i++)
        start_call(client, READ, (uint32_t)(i % BLOCKS), 0, BLOCK);
    for (int i = 0; i < 3; i++)
        poll_ends(client, polled, NULL, NULL);
    CHECK(!rpcrdma_free(client));
    client = connect_client(address, config, polled);
    while (released < lent)
        poll_ends(client, polled, NULL, NULL);
    CHECK(!rpcrdma_free(client));

    // A part outlives its server, and keeps the arena.
    rpcrdma_buffer *part = rpcrdma_arena_part(arena, BLOCK, 1, release, &blocks[1]);
    CHECK(part && ++lent && ++blocks[1].readers);
    CHECK(!rpcrdma_arena_part(arena, 0, (size_t)BLOCKS * BLOCK + 1, release, &blocks[0]) && ++lent);
    CHECK(released == lent - 1);
    CHECK(!rpcrdma_free(polled) && !rpcrdma_free(server) && !rpcrdma_free(services) && !rpcrdma_free(config));
    CHECK(!rpcrdma_free(arena) && !released_arenas && !rpcrdma_buffer_window(part, 1, 0));
    CHECK(!rpcrdma_free(part) && released_arenas == 1 && released == lent);
    CHECK(!munmap(memory, (size_t)BLOCKS * BLOCK));
    printf("%d of %d writes waited%s", writes_waited, CALLS / 4, is_polled ? "\n" : ", ");
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    run(argv[1], 0);
    run(argv[2], 1);
    return 0;
}
