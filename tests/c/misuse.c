// Misuses each function, as the rows of misuse_rows.h describe.
//
//   misuse            runs all rows
//   misuse --checked  in the checked build: runs the rows that do not end the process
//   misuse --count    prints the number of certain misuses
//   misuse --certain N  runs the Nth certain misuse, which ends the process in the checked build
//
// A misuse is certain if the arguments alone prove it (`is_certain`).
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <rpcrdma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "check.h"

#define ADDRESS "soft:misuse"
#define PROGRAM 0x20000001

static struct {
    rpcrdma_config *config, *config2;
    rpcrdma_services *services, *services2, *with_task;
    rpcrdma_server *server, *drained;
    rpcrdma_local_server *local_server;
    rpcrdma_client *client;
    rpcrdma_local_client *local_client;
    rpcrdma_call *call, *answered, *held, *forgotten;
    rpcrdma_buffer *buffer, *part;
    rpcrdma_reply *failed;
    rpcrdma_arena *arena, *for_reads;
    void *memory, *freed;
    int freed_in_callback, answered_in_handler, in_done;
    rpcrdma_reply *kept_twice;
    pthread_mutex_t lock;
} S = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void count_line(void *context, int level, const char *line) {
    (void)context, (void)level, (void)line;
}

static int empty(void *context, rpcrdma_call *call, const void *args, size_t len, void *results, size_t *results_len) {
    (void)context, (void)args, (void)len, (void)results, (void)results_len;
    S.answered_in_handler = rpcrdma_call_answer(call, 0);
    return 0;
}

// A deferred handler that keeps the first call and answers the others.
static void keep_first_call(void *context, rpcrdma_call *call, const void *args, size_t len) {
    (void)context, (void)args, (void)len;
    pthread_mutex_lock(&S.lock);
    int first = !S.call;
    if (first)
        S.call = call;
    pthread_mutex_unlock(&S.lock);
    if (!first) {
        CHECK(!rpcrdma_call_answer(call, 0));
        S.answered = call;
    }
}

// A deferred handler that keeps a call until `answer_again`.
static void hold_call(void *context, rpcrdma_call *call, const void *args, size_t len) {
    (void)context, (void)args, (void)len;
    pthread_mutex_lock(&S.lock);
    S.held = call;
    pthread_mutex_unlock(&S.lock);
}

// A deferred handler that keeps a call, which `tear_down` answers after the client's time-out.
static void leave_unanswered(void *context, rpcrdma_call *call, const void *args, size_t len) {
    (void)context, (void)args, (void)len;
    pthread_mutex_lock(&S.lock);
    S.forgotten = call;
    pthread_mutex_unlock(&S.lock);
}

static void no_peers(void *context, const rpcrdma_peer_event *event) {
    (void)context, (void)event;
}

static int no_work(void *context, unsigned shard) {
    (void)context, (void)shard;
    return 0;
}

static const rpcrdma_procedure TABLE[] = {
    {.number = 1, .handler = empty},
    {.number = 2, .deferred = keep_first_call, .write_chunks = 1, .max_write = 1 << 16},
    {.number = 3, .deferred = leave_unanswered},
    {.number = 4, .deferred = hold_call},
};

static int add(rpcrdma_procedure procedure) {
    rpcrdma_services *services = rpcrdma_services_new();
    int result = rpcrdma_services_add(services, 1, 1, &procedure, 1, sizeof procedure);
    CHECK(!rpcrdma_free(services));
    return result;
}

static void *free_local_client(void *unused) {
    (void)unused;
    return (void *)(intptr_t)rpcrdma_free(S.local_client);
}

static void *poll_local_client(void *unused) {
    (void)unused;
    return (void *)(intptr_t)rpcrdma_local_client_poll(S.local_client, NULL, NULL);
}

static void *detach_local_client(void *unused) {
    (void)unused;
    return (void *)(intptr_t)rpcrdma_detach(S.local_client);
}

static void *attach_local_client(void *unused) {
    (void)unused;
    return (void *)(intptr_t)rpcrdma_attach(S.local_client);
}

static void *poll_local_server(void *unused) {
    (void)unused;
    return (void *)(intptr_t)rpcrdma_local_server_poll(S.local_server);
}

static void *drain_local_server(void *unused) {
    (void)unused;
    return (void *)(intptr_t)rpcrdma_local_server_drain(S.local_server);
}

// Runs a function on another thread and returns its result.
static int run_on_other_thread(void *(*function)(void *)) {
    pthread_t thread;
    void *result;
    CHECK(!pthread_create(&thread, NULL, function, NULL));
    CHECK(!pthread_join(thread, &result));
    return (int)(intptr_t)result;
}

// Makes a blocking call.
static int call(rpcrdma_request request) {
    return rpcrdma_client_call(S.client, &request, NULL);
}

static int start(rpcrdma_request request) {
    return rpcrdma_local_client_start(S.local_client, &request, NULL);
}

// Makes a call with a Read chunk.
static int call_with_read_chunk(rpcrdma_buffer *buffer, size_t position) {
    rpcrdma_read_chunk chunk = {.position = position, .buffer = buffer, .len = 4};
    return call(REQUEST(.procedure = 1, .read_chunks = &chunk, .read_count = 1));
}

// An invalid call leaves the buffer to its caller, which frees it.
static int call_with_own_read_chunk(rpcrdma_buffer *buffer, size_t position) {
    int result = call_with_read_chunk(buffer, position);
    CHECK(!rpcrdma_free(buffer));
    return result;
}

static int call_with_write_chunk(rpcrdma_buffer *buffer) {
    rpcrdma_write_chunk chunk = {.buffer = buffer};
    return call(REQUEST(.procedure = 1, .write_chunks = &chunk, .write_count = 1));
}

// Answers a call twice. A later call, which may have the same slot, is not affected.
static int answer_again(void) {
    CHECK(!start(REQUEST(.procedure = 4)));
    for (int held = 0; !held;) {
        CHECK(rpcrdma_local_client_poll(S.local_client, NULL, NULL) >= 0);
        pthread_mutex_lock(&S.lock);
        held = S.held != NULL;
        pthread_mutex_unlock(&S.lock);
    }
    int result = rpcrdma_call_answer(S.answered, RPCRDMA_SYSTEM_ERR);
    CHECK(!rpcrdma_call_answer(S.held, 0));
    S.held = NULL;
    return result;
}

// A call that does not start leaves its buffers to the caller. The first of two buffers is still valid.
static int call_with_two_buffers(rpcrdma_buffer *second) {
    rpcrdma_read_chunk chunks[] = {{.buffer = S.buffer}, {.position = 64, .buffer = second}};
    int result = call(REQUEST(.procedure = 1, .read_chunks = chunks, .read_count = 2));
    CHECK(rpcrdma_buffer_data(S.buffer, NULL));
    return result;
}

// A call with one buffer in two chunks, or with too many chunks, does not start. The buffer is still valid.
static int call_with_shared_buffer(size_t reads) {
    rpcrdma_read_chunk chunks[5];
    for (size_t i = 0; i < 5; i++)
        chunks[i] = (rpcrdma_read_chunk){.position = 64 * i, .buffer = S.buffer};
    rpcrdma_write_chunk room = {.buffer = S.buffer};
    int result = call(REQUEST(
        .procedure = 1, .read_chunks = chunks, .read_count = reads, .write_chunks = &room, .write_count = 1));
    CHECK(rpcrdma_buffer_data(S.buffer, NULL));
    return result;
}

// A buffer of 0 bytes is valid, but cannot be a chunk. The buffer keeps its length.
static int call_with_empty_buffer(void) {
    size_t len;
    rpcrdma_buffer *buffer = rpcrdma_alloc(S.client, 64);
    CHECK(buffer && !rpcrdma_buffer_window(buffer, 0, 0) && rpcrdma_buffer_data(buffer, &len) && !len);
    int result = call_with_read_chunk(buffer, 0);
    CHECK(call_with_write_chunk(buffer) == result && !rpcrdma_buffer_window(buffer, 0, 64) && !rpcrdma_free(buffer));
    return result;
}

// Polls within a callback, and checks that these polls report no completions of other calls.
static void done(void *context, const rpcrdma_completion *completion) {
    rpcrdma_reply *reply = completion->reply;
    CHECK(!completion->error && !S.in_done);
    if (completion->token == 5) {
        ++*(int *)context;
        return;
    }
    CHECK(completion->token == 2);
    S.in_done = 1;
    CHECK(!start(REQUEST(.procedure = 1, .token = 5)));
    for (int turn = 0; turn < 100; turn++)
        CHECK(rpcrdma_local_client_poll(S.local_client, done, context) >= 0);
    S.in_done = 0;
    S.freed_in_callback = rpcrdma_free(reply);
    rpcrdma_reply *kept = rpcrdma_reply_keep(reply);
    CHECK(kept);
    S.kept_twice = rpcrdma_reply_keep(reply);
    CHECK(rpcrdma_reply_results(kept, NULL));
    CHECK(!rpcrdma_free(kept));
    ++*(int *)context;
}

// Returns the shard of a call, which is the server's only shard.
static uint32_t shard_of(rpcrdma_call *call) {
    rpcrdma_call_info info = {.shard = 1};
    CHECK(!rpcrdma_call_header(call, &info, sizeof info));
    return info.shard;
}

// Passes structs of other sizes, as programs of other versions do. Returns 0 if each gets the fields that it has.
static int check_info_sizes(rpcrdma_call *call) {
    struct {
        rpcrdma_call_info info;
        uint64_t later, behind;
    } newer = {.later = 1, .behind = 1};
    rpcrdma_call_info older = {.program = 1};
    CHECK(!rpcrdma_call_header(call, &newer.info, sizeof newer - sizeof newer.behind));
    CHECK(newer.info.program == PROGRAM && newer.later == 0 && newer.behind == 1);
    return rpcrdma_call_header(call, &older, sizeof older.xid) || older.xid != newer.info.xid || older.program != 1;
}

// The pointer to the error text stays valid, because the next failure overwrites the text in place.
static int is_text_overwritten_in_place(void) {
    rpcrdma_free(S.call);
    const char *text = rpcrdma_error();
    char before[200];
    snprintf(before, sizeof before, "%s", text);
    rpcrdma_local_server_poll(NULL);
    return text == rpcrdma_error() && strcmp(before, text);
}

// Starts a server with a knob, and returns the code of the failure.
static int start_server(const char *address, const char *name, const char *value) {
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false") && !rpcrdma_config_set(config, name, value));
    rpcrdma_server *server = rpcrdma_server_start(address, S.services, config);
    int code = server ? 0 : -errno;
    CHECK(!rpcrdma_free(server) && !rpcrdma_free(config));
    errno = -code;
    return code;
}

static int start_local_server(const char *name, const char *value) {
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false") && !rpcrdma_config_set(config, name, value));
    rpcrdma_local_server *server = rpcrdma_local_server_start("soft:misuse-knob", S.services, config);
    int code = server ? 0 : -errno;
    CHECK(!rpcrdma_free(server) && !rpcrdma_free(config));
    errno = -code;
    return code;
}

// Returns the code of a connect that fails.
static int connect_to(const char *address) {
    CHECK(!rpcrdma_client_connect(address, PROGRAM, 1, S.config));
    return -errno;
}

// Connects with a core that this host does not have.
static int connect_on_core(void) {
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
    CHECK(!rpcrdma_config_set(config, "poll.core", "1023"));
    CHECK(!rpcrdma_client_connect(ADDRESS, PROGRAM, 1, config));
    int code = -errno;
    CHECK(!rpcrdma_free(config));
    return code;
}

static int connect_pinned(void) {
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false") && !rpcrdma_config_set(config, "poll.core", "0"));
    CHECK(!rpcrdma_local_client_connect(ADDRESS, PROGRAM, 1, config));
    int code = -errno;
    CHECK(!rpcrdma_free(config));
    return code;
}

// Adds an arena twice to a configuration.
static int add_arena_twice(void) {
    CHECK(!rpcrdma_config_set(S.config2, "prefault", "false"));
    CHECK(!rpcrdma_config_arena(S.config2, S.arena) && !rpcrdma_config_arena(S.config2, S.arena));
    rpcrdma_server *server = rpcrdma_server_start("soft:misuse-arena", S.services, S.config2);
    CHECK(server);
    return rpcrdma_free(server);
}

static void set_up(void) {
    CHECK(!rpcrdma_log(count_line, NULL, 2));
    CHECK(!posix_memalign(&S.memory, 4096, 1 << 20));
    memset(S.memory, 0, 1 << 20);
    void *mapped = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED);
    CHECK(S.arena = rpcrdma_arena_new(mapped, 1 << 20, NULL, NULL));
    CHECK(S.part = rpcrdma_arena_part(S.arena, 4096, 4, NULL, NULL));
    CHECK(S.for_reads = rpcrdma_arena_new(S.memory, 1 << 20, NULL, NULL));
    CHECK(!add((rpcrdma_procedure){
        .handler = empty, .read_chunks = 1, .max_read = 1 << 20, .reads_into = S.for_reads}));
    CHECK((S.config = rpcrdma_config_new()) && (S.config2 = rpcrdma_config_new()));
    CHECK(!rpcrdma_config_set(S.config, "poll.idle", "event"));
    CHECK(!rpcrdma_config_set(S.config, "prefault", "false"));
    CHECK(!rpcrdma_config_arena(S.config, S.arena));
    CHECK((S.services = rpcrdma_services_new()) && (S.services2 = rpcrdma_services_new()));
    CHECK(!rpcrdma_services_add(S.services, PROGRAM, 1, TABLE, 4, sizeof *TABLE));
    CHECK(S.with_task = rpcrdma_services_new());
    CHECK(!rpcrdma_services_task(S.with_task, no_work, NULL, NULL));
    CHECK(S.server = rpcrdma_server_start(ADDRESS, S.services, S.config));
    CHECK(S.local_server = rpcrdma_local_server_start("soft:misuse-local", S.services, S.config));
    CHECK(S.client = rpcrdma_client_connect(ADDRESS, PROGRAM, 1, S.config));
    CHECK(S.local_client = rpcrdma_local_client_connect(ADDRESS, PROGRAM, 1, S.config));
    CHECK(S.buffer = rpcrdma_alloc(S.client, 64));
    // The first call has a Write chunk, and stays unanswered. The second one is answered.
    rpcrdma_write_chunk chunk = {.len = 64};
    CHECK(!start(REQUEST(.procedure = 2, .token = 1, .write_chunks = &chunk, .write_count = 1)));
    for (int kept = 0; !kept;) {
        CHECK(rpcrdma_local_client_poll(S.local_client, NULL, NULL) >= 0);
        pthread_mutex_lock(&S.lock);
        kept = S.call != NULL;
        pthread_mutex_unlock(&S.lock);
    }
    CHECK(!call(REQUEST(.procedure = 2)));
    CHECK(!call(REQUEST(.procedure = 1)));
    CHECK(rpcrdma_client_call(S.client, &REQUEST(.procedure = 99), &S.failed) == -EREMOTEIO);
    int is_done = 0;
    CHECK(!start(REQUEST(.procedure = 1, .token = 2)));
    while (is_done < 2)
        CHECK(rpcrdma_local_client_poll(S.local_client, done, &is_done) >= 0);
    CHECK(S.drained = rpcrdma_server_start("soft:misuse-drained", S.services, S.config));
    CHECK(!rpcrdma_server_drain(S.drained, 1000));
    S.freed = rpcrdma_config_new();
    CHECK(!rpcrdma_free(S.freed));
}

static void tear_down(void) {
    rpcrdma_call *forgotten = NULL;
    while (!forgotten) {
        pthread_mutex_lock(&S.lock);
        forgotten = S.forgotten;
        pthread_mutex_unlock(&S.lock);
    }
    CHECK(!rpcrdma_call_answer(S.call, 0) && !rpcrdma_call_answer(forgotten, 0));
    void *all[] = {S.failed, S.buffer, S.part, S.local_client, S.client, S.local_server, S.server,
                   S.services, S.services2, S.with_task, S.config, S.config2, S.arena, S.for_reads};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        CHECK(!rpcrdma_free(all[i]));
    free(S.memory);
}

#define ROW(function, number, result, is_certain, expression)                                                          \
    static intptr_t function##_##number(void) {                                                                        \
        return (intptr_t)(expression);                                                                                 \
    }
#include "misuse_rows.h"
#undef ROW

static const struct {
    const char *name, *text;
    intptr_t result;
    int is_certain;
    intptr_t (*run)(void);
} ROWS[] = {
#define ROW(function, number, result, is_certain, expression)                                                          \
    {#function, #expression, result, is_certain, function##_##number},
#include "misuse_rows.h"
#undef ROW
};
enum { COUNT = sizeof ROWS / sizeof *ROWS };

int main(int argc, char **argv) {
    int certain = 0, wrong = 0;
    if (argc > 1 && !strcmp(argv[1], "--count")) {
        for (int i = 0; i < COUNT; i++)
            certain += ROWS[i].is_certain;
        printf("%d\n", certain);
        return 0;
    }
    set_up();
    int only = argc > 2 ? atoi(argv[2]) : -1, is_checked = argc == 2;
    for (int i = 0; i < COUNT; i++) {
        certain += ROWS[i].is_certain;
        int is_selected = only >= 0 ? ROWS[i].is_certain && certain == only : !is_checked || !ROWS[i].is_certain;
        if (!is_selected)
            continue;
        errno = 0;
        intptr_t result = ROWS[i].run();
        // A failure also sets errno, but this thread does not see it if the function failed on another thread (-EPERM),
        // or if it failed earlier and the row only reads its result from `S`.
        int has_code = result >= 0 || result == -EPERM || errno == (int)-result || !strncmp(ROWS[i].text, "S.", 2);
        if (result != ROWS[i].result || !has_code || !*rpcrdma_error()) {
            fprintf(stderr, "%s: %ld instead of %ld: %s\n", ROWS[i].text, (long)result, (long)ROWS[i].result,
                    rpcrdma_error());
            wrong++;
        }
    }
    if (only >= 0)
        return 3; // The misuse did not end the process.
    tear_down();
    printf("%d rows, %d wrong\n", COUNT, wrong);
    return wrong != 0;
}
