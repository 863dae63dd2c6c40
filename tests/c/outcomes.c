// How calls end: at the handler, at the client, and on the threads of a server.
//
//   outcomes ADDRESS ADDRESS
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <rpcrdma.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

enum { PROGRAM = 0x20000001, ROOM = 16 };
enum { STATUS = 1, FAIL, KEEP, GIVE, END, END_ON_WORKER, HOLD, CREDENTIAL };
// Arguments of FAIL, which select how its handler fails.
enum { OWN_CODE, CODE_OF_FUNCTION, OWN_CODE_WITHOUT_CHUNK, CODE_WITHOUT_CHUNK };

static rpcrdma_server *server, *other;
// A client that may have only one outstanding call.
static rpcrdma_local_client *one_call;
// The reply of a client that was freed in its callback, and the number of such clients.
static rpcrdma_reply *stale;
static int replaced;
// Runs of FAIL, the code of the last `rpcrdma_call_result`, and log lines about the descriptor of a task.
static atomic_int runs, result_code, lines;
static _Atomic(rpcrdma_buffer *) kept;
static _Atomic(rpcrdma_call *) held;

enum { SHARDS = 2, MAX_CONNECTIONS = 64 };
// The open connections of each shard, and the name of their peer. Only the shard uses them.
static struct shard_connections {
    uint64_t open[MAX_CONNECTIONS];
    int count;
    char peer[64];
} connections_by_shard[SHARDS];
static atomic_int begun, ended;

// Returns the index of a connection in `open`, or `count` if it is not open.
static int index_of(const struct shard_connections *shard, uint64_t connection) {
    int at = 0;
    while (at < shard->count && shard->open[at] != connection)
        at++;
    return at;
}

static void record_peer(void *context, const rpcrdma_peer_event *event) {
    CHECK(context == connections_by_shard && event->shard < SHARDS && event->peer);
    struct shard_connections *shard = &connections_by_shard[event->shard];
    int at = index_of(shard, event->connection);
    if (event->reason) {
        CHECK(at < shard->count && *event->reason);
        shard->open[at] = shard->open[--shard->count];
        ended++;
    } else {
        CHECK(at == shard->count && at < MAX_CONNECTIONS);
        shard->open[shard->count++] = event->connection;
        snprintf(shard->peer, sizeof shard->peer, "%s", event->peer);
        begun++;
    }
}

// Checks that the hook was called for a call's connection.
static void check_connection_reported(rpcrdma_call *call) {
    rpcrdma_call_info info;
    char peer[64];
    CHECK(!rpcrdma_call_header(call, &info, sizeof info) && info.shard < SHARDS);
    struct shard_connections *shard = &connections_by_shard[info.shard];
    CHECK(index_of(shard, info.connection) < shard->count);
    CHECK(rpcrdma_call_peer(call, peer, sizeof peer) >= 0 && !strcmp(peer, shard->peer));
}

static int read_number(const void *args, size_t len) {
    int value;
    CHECK(len == sizeof value);
    memcpy(&value, args, sizeof value);
    return value;
}

static int return_status(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                         size_t *results_len) {
    (void)context, (void)results, (void)results_len;
    check_connection_reported(call);
    return read_number(args, len);
}

// A handler in which a function of the library fails. It returns that function's code, or a code of its own.
static int fail_in_function(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                            size_t *results_len) {
    (void)context, (void)results, (void)results_len;
    size_t room = 0;
    void *memory = rpcrdma_call_write_chunk(call, 0, &room);
    if (memory)
        memset(memory, 0, room);
    runs++;
    switch (read_number(args, len)) {
    case OWN_CODE:
        CHECK(rpcrdma_call_write_chunk_filled(call, 0, ROOM + 1) == -EMSGSIZE);
        return -EIO;
    case CODE_OF_FUNCTION:
        return rpcrdma_call_write_chunk_filled(call, 0, ROOM + 1);
    case OWN_CODE_WITHOUT_CHUNK:
        CHECK(!rpcrdma_call_write_chunk(call, 0, NULL) && errno == ENOENT);
        return -EIO;
    default:
        CHECK(!rpcrdma_call_write_chunk(call, 0, NULL) && errno == ENOENT);
        return -ENOENT;
    }
}

static int keep_chunk(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                      size_t *results_len) {
    (void)context, (void)args, (void)len, (void)results, (void)results_len;
    CHECK(kept = rpcrdma_call_take_read_chunk(call, 0));
    return 0;
}

static int return_kept_chunk(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                             size_t *results_len) {
    (void)context, (void)args, (void)len, (void)results, (void)results_len;
    return result_code = rpcrdma_call_result(call, 0, kept);
}

// A handler that tries to end its own server, which is refused, and ends another server.
static int end_servers(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                       size_t *results_len) {
    (void)context, (void)args, (void)len, (void)results, (void)results_len;
    CHECK(rpcrdma_free(server) == -EDEADLK);
    CHECK(rpcrdma_server_drain(server, 1000) == -EDEADLK);
    char stats[16];
    rpcrdma_call_info info;
    CHECK(!rpcrdma_call_header(call, &info, sizeof info));
    int on_shard = info.procedure == END, code = rpcrdma_stats(server, stats, sizeof stats);
    CHECK(on_shard ? code == -EDEADLK : code > 0);
    CHECK(!rpcrdma_free(other));
    other = NULL;
    return 0;
}

static int return_credential(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                             size_t *results_len) {
    (void)context, (void)args, (void)len;
    rpcrdma_call_info info;
    CHECK(!rpcrdma_call_header(call, &info, sizeof info) && info.credential_flavor == 1 && info.credential_len <= 256);
    memcpy(results, info.credential, *results_len = info.credential_len);
    return 0;
}

static void hold_call(void *context, rpcrdma_call *call, const void *args, size_t len) {
    (void)context, (void)args, (void)len;
    held = call;
}

static const rpcrdma_procedure TABLE[] = {
    {.number = STATUS, .handler = return_status},
    {.number = FAIL, .handler = fail_in_function, .write_chunks = 1, .max_write = 4 * ROOM},
    {.number = KEEP, .handler = keep_chunk, .read_chunks = 1, .max_read = ROOM, .flags = RPCRDMA_UNCOUNTED},
    {.number = GIVE, .handler = return_kept_chunk, .write_chunks = 1, .max_write = ROOM},
    {.number = END, .handler = end_servers},
    {.number = END_ON_WORKER, .handler = end_servers, .flags = RPCRDMA_ON_WORKERS},
    {.number = HOLD, .deferred = hold_call},
    {.number = CREDENTIAL, .handler = return_credential},
};

// Makes a call and returns its code. Sets `*status` to the status of the reply.
static int call(rpcrdma_client *client, rpcrdma_request request, int *status) {
    rpcrdma_reply *reply = NULL;
    int code = rpcrdma_client_call(client, &request, &reply);
    CHECK(reply);
    if (status)
        *status = rpcrdma_reply_status(reply);
    CHECK(!rpcrdma_free(reply));
    return code;
}

static void check_statuses(rpcrdma_client *client, const char *address, rpcrdma_config *config) {
    const int all[] = {RPCRDMA_PROG_UNAVAIL, RPCRDMA_PROC_UNAVAIL, RPCRDMA_GARBAGE_ARGS, RPCRDMA_SYSTEM_ERR,
                       RPCRDMA_AUTH_ERROR + 5};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        int status = 0, code = all[i] > RPCRDMA_AUTH_ERROR ? -EACCES : -EREMOTEIO;
        rpcrdma_request request = REQUEST(.procedure = STATUS, .args = &all[i], .args_len = sizeof *all);
        CHECK(call(client, request, &status) == code && status == all[i]);
    }
    int status = 1, none = 0;
    CHECK(!call(client, REQUEST(.procedure = STATUS, .args = &none, .args_len = sizeof none), &status) && !status);
    CHECK(call(client, REQUEST(.procedure = 99), &status) == -EREMOTEIO && status == RPCRDMA_PROC_UNAVAIL);
    rpcrdma_client *other = rpcrdma_client_connect(address, PROGRAM, 2, config);
    CHECK(other && call(other, REQUEST(.procedure = STATUS), &status) == -EREMOTEIO);
    CHECK(status == RPCRDMA_PROG_MISMATCH);
    CHECK(!rpcrdma_free(other) && (other = rpcrdma_client_connect(address, PROGRAM + 1, 1, config)));
    CHECK(call(other, REQUEST(.procedure = STATUS), &status) == -EREMOTEIO && status == RPCRDMA_PROG_UNAVAIL);
    CHECK(!rpcrdma_free(other));
}

// A handler that returns the code of a failed function gets the reply for that failure. Any other negative code gets
// SYSTEM_ERR, even after a function has failed.
static void check_handler_codes(rpcrdma_client *client) {
    rpcrdma_write_chunk chunk = {.len = ROOM};
    int how = OWN_CODE, status;
    rpcrdma_request request = {.size = sizeof request, .procedure = FAIL, .args = &how, .args_len = sizeof how,
                               .write_chunks = &chunk, .write_count = 1};
    CHECK(call(client, request, &status) == -EREMOTEIO && status == RPCRDMA_SYSTEM_ERR && runs == 1);
    // The client retransmits the call with a longer chunk, so the handler runs twice.
    how = CODE_OF_FUNCTION;
    CHECK(!call(client, request, &status) && !status && runs == 3);
    request.write_count = 0;
    how = OWN_CODE_WITHOUT_CHUNK;
    CHECK(call(client, request, &status) == -EREMOTEIO && status == RPCRDMA_SYSTEM_ERR);
    how = CODE_WITHOUT_CHUNK;
    CHECK(call(client, request, &status) == -EREMOTEIO && status == RPCRDMA_GARBAGE_ARGS);
}

// A Read chunk that a handler has taken can be a result only on the shard that received it.
static void check_results_on_shards(rpcrdma_client *clients[2]) {
    rpcrdma_read_chunk data = {.data = "0123456789abcdef", .len = ROOM};
    rpcrdma_write_chunk room = {.len = ROOM};
    for (int shard = 0; shard < 2; shard++) {
        int status;
        CHECK(!call(clients[0], REQUEST(.procedure = KEEP, .read_chunks = &data, .read_count = 1), NULL));
        rpcrdma_request request = {.size = sizeof request, .procedure = GIVE, .write_chunks = &room, .write_count = 1};
        CHECK(call(clients[shard], request, &status) == (shard ? -EREMOTEIO : 0));
        CHECK(result_code == (shard ? -EXDEV : 0) && status == (shard ? RPCRDMA_SYSTEM_ERR : 0));
    }
}

static void *drain(void *unused) {
    (void)unused;
    CHECK(!rpcrdma_server_drain(server, 60000));
    return NULL;
}

// A draining server does not run new calls. They fail with EBUSY.
static void check_busy_while_draining(rpcrdma_client *client, const char *address, rpcrdma_config *config) {
    rpcrdma_local_client *holder = rpcrdma_local_client_connect(address, PROGRAM, 1, config);
    CHECK(holder && !rpcrdma_local_client_start(holder, &REQUEST(.procedure = HOLD), NULL));
    while (!held)
        CHECK(rpcrdma_local_client_poll(holder, NULL, NULL) >= 0);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, drain, NULL));
    int none = 0, code, status;
    do
        code = call(client, REQUEST(.procedure = STATUS, .args = &none, .args_len = sizeof none), &status);
    while (!code);
    CHECK(code == -EBUSY && status == -EBUSY);
    // The server's handle is valid until the drain ends.
    rpcrdma_client *back = rpcrdma_server_call_back(server, held, PROGRAM, 1, NULL);
    CHECK(back);
    // This client accepts no calls.
    CHECK(call(back, REQUEST(.procedure = STATUS), NULL) == -EOPNOTSUPP);
    CHECK(strstr(rpcrdma_error(), "rpcrdma_config_callbacks") && strstr(rpcrdma_error(), "debug.reverse"));
    CHECK(!rpcrdma_free(back));
    CHECK(!rpcrdma_call_answer(held, 0));
    CHECK(!rpcrdma_free(holder) && !pthread_join(thread, NULL));
}

static void start_in_callback(void *context, const rpcrdma_completion *completion) {
    CHECK(completion->error == -EAGAIN && ++*(int *)context < 1000);
    CHECK(!rpcrdma_local_client_start(one_call, &REQUEST(.procedure = HOLD), NULL));
}

// Connects a client that starts several calls. All but the first end immediately, because they exceed limits.max_calls.
static void start_beyond_max_calls(const char *address, int calls, int procedure) {
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
    CHECK(!rpcrdma_config_set(config, "limits.max_calls", "1"));
    CHECK(one_call = rpcrdma_local_client_connect(address, PROGRAM, 1, config));
    for (int i = 0; i < calls; i++)
        CHECK(!rpcrdma_local_client_start(
            one_call, &REQUEST(.procedure = procedure, .args = &i, .args_len = sizeof i), NULL));
    CHECK(!rpcrdma_free(config));
}

// Frees the client in its callback, and connects another client, possibly in the same slot. The completions of the new
// client are reported only by polls of the new client.
static void replace(void *address, const rpcrdma_completion *completion) {
    CHECK(completion->error == -EAGAIN && !replaced++ && !rpcrdma_free(one_call));
    start_beyond_max_calls(address, 3, STATUS);
    stale = completion->reply;
}

// Checks that the handle of the freed client's reply is invalid.
static void check_stale_reply(void *context, const rpcrdma_completion *completion) {
    (void)context, (void)completion;
    if (stale)
        CHECK(!rpcrdma_reply_results(stale, NULL) && errno == EBADF && !rpcrdma_reply_keep(stale));
    stale = NULL;
}

static void check_client_replaced_in_callback(char *address) {
    start_beyond_max_calls(address, 3, STATUS);
    // A poll without a callback leaves the completions for the next poll.
    CHECK(rpcrdma_local_client_poll(one_call, NULL, NULL) >= 0);
    CHECK(rpcrdma_local_client_poll(one_call, replace, address) == 1 && replaced == 1);
    CHECK(rpcrdma_local_client_poll(one_call, check_stale_reply, NULL) == 1 && !stale && !rpcrdma_free(one_call));
}

// A call that is started in a callback and ends immediately is reported by the next poll.
static void check_call_started_in_callback(const char *address) {
    start_beyond_max_calls(address, 2, HOLD);
    int ends = 0;
    for (int polls = 1; polls < 4; polls++)
        CHECK(rpcrdma_local_client_poll(one_call, start_in_callback, &ends) == 1 && ends == polls);
    while (!held)
        CHECK(rpcrdma_local_client_poll(one_call, NULL, NULL) >= 0);
    CHECK(!rpcrdma_call_answer(held, 0) && !rpcrdma_free(one_call));
    held = NULL;
}

static void count_line(void *context, int level, const char *line) {
    (void)context, (void)level;
    lines += strstr(line, "descriptor of the task") != NULL;
}

static int no_work(void *context, unsigned shard) {
    (void)context, (void)shard;
    return 0;
}

static int get_descriptor(void *context, unsigned shard) {
    (void)shard;
    return *(int *)context;
}

// Each client has a credential of its own, by which duplicate request caches tell clients apart.
static void check_credentials(const char *address) {
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
    CHECK(!rpcrdma_config_set(config, "client.auth_sys", "7:8"));
    char bodies[2][256];
    size_t lens[2];
    for (int i = 0; i < 2; i++) {
        rpcrdma_client *client = rpcrdma_client_connect(address, PROGRAM, 1, config);
        rpcrdma_reply *reply;
        CHECK(client && !rpcrdma_client_call(client, &REQUEST(.procedure = CREDENTIAL), &reply));
        const void *body = rpcrdma_reply_results(reply, &lens[i]);
        memcpy(bodies[i], body, lens[i]);
        CHECK(!rpcrdma_free(reply) && !rpcrdma_free(client));
    }
    CHECK(lens[0] == lens[1] && memcmp(bodies[0], bodies[1], 4) && !memcmp(bodies[0] + 4, bodies[1] + 4, lens[0] - 4));
    CHECK(!rpcrdma_free(config));
}

// A shard cannot sleep on the descriptor of a file. The log has one line about it.
static void check_task_with_file(const char *address, rpcrdma_config *config) {
    char path[] = "/tmp/rpcrdma-outcomes-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && !unlink(path));
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, PROGRAM, 1, TABLE, 1, sizeof *TABLE));
    CHECK(!rpcrdma_services_peers(services, record_peer, connections_by_shard));
    CHECK(!rpcrdma_services_task(services, no_work, get_descriptor, &fd));
    rpcrdma_server *with_task = rpcrdma_server_start(address, services, config);
    rpcrdma_client *client = rpcrdma_client_connect(address, PROGRAM, 1, config);
    CHECK(with_task && client);
    int none = 0;
    for (int i = 0; i < 10 || !lines; i++)
        CHECK(!call(client, REQUEST(.procedure = STATUS, .args = &none, .args_len = sizeof none), NULL));
    CHECK(lines == 1);
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(with_task) && !rpcrdma_free(services) && !close(fd));
    CHECK(begun == 1 && ended == 1);
}

// The statistics of a server list its connections.
static void check_stats_list_peers(void) {
    static char stats[64 << 10];
    int len = rpcrdma_stats(server, NULL, 0);
    CHECK(len > 0 && len < (int)sizeof stats);
    CHECK(rpcrdma_stats(server, stats, sizeof stats) > 0 && strstr(stats, "\"peers\":[{\"slot\":"));
}

// Loads knobs from a file, including those that only the C interface has.
static void load_knobs(rpcrdma_config *config) {
    static const char text[] = "[server]\nshards = 2\nworkers = 1\n[poll]\ncontrol_interval = \"1s\"\n";
    char path[] = "/tmp/rpcrdma-outcomes-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, text, sizeof text - 1) == sizeof text - 1 && !close(fd));
    CHECK(!rpcrdma_config_load(config, path) && !unlink(path));
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    CHECK(!rpcrdma_log(count_line, NULL, 1));
    char addresses[200];
    snprintf(addresses, sizeof addresses, "%s,%s", argv[1], argv[2]);
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
    CHECK(!rpcrdma_config_set(config, "poll.idle", "event"));
    check_task_with_file(argv[1], config);
    load_knobs(config);
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, PROGRAM, 1, TABLE, sizeof TABLE / sizeof *TABLE, sizeof *TABLE));
    CHECK(!rpcrdma_services_peers(services, record_peer, connections_by_shard));
    CHECK(server = rpcrdma_server_start(addresses, services, config));
    rpcrdma_client *clients[2];
    for (int shard = 0; shard < 2; shard++)
        CHECK(clients[shard] = rpcrdma_client_connect(argv[1 + shard], PROGRAM, 1, config));
    check_stats_list_peers();
    check_statuses(clients[0], argv[1], config);
    check_handler_codes(clients[0]);
    check_results_on_shards(clients);
    CHECK(!call(clients[0], REQUEST(.procedure = END), NULL));
    snprintf(addresses, sizeof addresses, "soft:outcomes-%d", (int)getpid());
    CHECK(other = rpcrdma_server_start(addresses, services, config));
    CHECK(!call(clients[0], REQUEST(.procedure = END_ON_WORKER), NULL) && !other);
    check_client_replaced_in_callback(argv[1]);
    check_call_started_in_callback(argv[1]);
    check_credentials(argv[1]);
    check_busy_while_draining(clients[0], argv[1], config);
    CHECK(begun > 10 && ended == begun);
    CHECK(!rpcrdma_free(clients[0]) && !rpcrdma_free(clients[1]) && !rpcrdma_free(services) && !rpcrdma_free(config));
    printf("connections, peers, statuses, codes of handlers, EXDEV, EDEADLK, EBUSY\n");
    return 0;
}
