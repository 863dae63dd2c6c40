// Calls and connections that do not start: their codes and texts, and the buffers that the caller keeps.
//
//   starts ADDRESS ADDRESS
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <rpcrdma.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "raw_peer.h"

enum { PROGRAM = 0x20000001, BULK = 65536, BULK_COUNT = 3 };

static int succeed(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                   size_t *results_len) {
    (void)context, (void)call, (void)args, (void)len, (void)results, (void)results_len;
    return 0;
}

static atomic_int unproven;

static void count_unproven(void *context, int level, const char *line) {
    (void)context;
    unproven += level == 2 && strstr(line, "did not prove that it has the key `blue`") && strstr(line, "wire.host_key");
}

static void done(void *context, const rpcrdma_completion *completion) {
    CHECK(completion->size == sizeof *completion && completion->error == 0);
    ++*(int *)context;
}

static rpcrdma_config *new_config(void) {
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
    CHECK(!rpcrdma_config_set(config, "poll.idle", "event"));
    CHECK(!rpcrdma_config_set(config, "memory.bulk_buffers", "[[65536, 3]]"));
    return config;
}

// Checks that a call does not start, and that its buffers stay unchanged.
static void check_refused(rpcrdma_local_client *client, rpcrdma_request request, int code, const char *text) {
    uint32_t xid = 7;
    CHECK(rpcrdma_local_client_start(client, &request, &xid) == code && xid == 7);
    CHECK(errno == -code && strstr(rpcrdma_error(), text));
    size_t len;
    for (size_t i = 0; i < request.read_count; i++)
        CHECK(!request.read_chunks[i].buffer ||
              (!memcmp(rpcrdma_buffer_data(request.read_chunks[i].buffer, &len), "read", 5) && len == 64));
    for (size_t i = 0; i < request.write_count; i++)
        CHECK(!request.write_chunks[i].buffer ||
              (!memcmp(rpcrdma_buffer_data(request.write_chunks[i].buffer, &len), "write", 6) && len == 128));
}

static void check_calls_without_memory(rpcrdma_local_client *client) {
    rpcrdma_buffer *sent = rpcrdma_alloc(client, 64), *room = rpcrdma_alloc(client, 128);
    CHECK(sent && room);
    strcpy(rpcrdma_buffer_data(sent, NULL), "read");
    strcpy(rpcrdma_buffer_data(room, NULL), "write");
    rpcrdma_read_chunk read = {.buffer = sent};
    // The third chunk is longer than any buffer.
    rpcrdma_write_chunk too_long[] = {{.len = 64}, {.buffer = room}, {.len = BULK + 1}};
    rpcrdma_request request = REQUEST(.procedure = 1, .read_chunks = &read, .read_count = 1, .write_chunks = too_long,
                                      .write_count = 3);
    check_refused(client, request, -EMSGSIZE, "65537 bytes exceeds 65536");
    // Only one buffer is free, which the first of two chunks gets.
    rpcrdma_write_chunk too_many[] = {{.len = BULK}, {.len = BULK}, {.buffer = room}};
    request.write_chunks = too_many;
    check_refused(client, request, -ENOBUFS, "no buffer of 65536 bytes is free");
    // Replies for which no buffer is long enough, or free.
    rpcrdma_write_chunk own = {.buffer = room};
    request.write_chunks = &own, request.write_count = 1, request.max_reply = 1 << 20;
    check_refused(client, request, -EMSGSIZE, "memory.bulk_buffers");
    rpcrdma_buffer *last = rpcrdma_alloc(client, BULK);
    CHECK(last);
    request.max_reply = BULK / 2;
    check_refused(client, request, -ENOBUFS, "memory.bulk_buffers");
    // A length beyond 32 bits is refused, not truncated.
    rpcrdma_write_chunk endless[] = {{.buffer = room}, {.len = (size_t)1 << 33}};
    request.write_chunks = endless, request.write_count = 2, request.max_reply = 0;
    check_refused(client, request, -EMSGSIZE, "8589934592");
    request.write_count = 1, request.max_reply = (size_t)1 << 33;
    check_refused(client, request, -EMSGSIZE, "8589934592");
    // Chunks that no call may have.
    request.max_reply = 0, read.position = 2;
    check_refused(client, request, -EINVAL, "Read chunk at byte 2");
    read.position = 8;
    check_refused(client, request, -EINVAL, "Read chunk at byte 8");
    read.position = 0, request.flags = RPCRDMA_ONE_WAY;
    check_refused(client, request, -EINVAL, "with chunks");
    request.flags = 0;
    // With enough memory the call starts: the handles of its buffers end, and the poll reports only this call.
    request.write_count = 1, request.max_reply = 0;
    int ended = 0;
    CHECK(!rpcrdma_local_client_start(client, &request, NULL));
    CHECK(!rpcrdma_buffer_data(sent, NULL) && errno == EBADF);
    while (!ended)
        CHECK(rpcrdma_local_client_poll(client, done, &ended) >= 0);
    for (int turn = 0; turn < 100; turn++)
        CHECK(rpcrdma_local_client_poll(client, done, &ended) >= 0);
    CHECK(ended == 1 && !rpcrdma_free(last));
}

// An invalid blocking call leaves its buffers with the caller, with or without a pointer for the reply.
static void check_calls_with_invalid_chunks(const char *address, rpcrdma_config *config) {
    rpcrdma_client *client = rpcrdma_client_connect(address, PROGRAM, 1, config);
    CHECK(client);
    rpcrdma_buffer *sent = rpcrdma_alloc(client, 64), *room = rpcrdma_alloc(client, 128);
    CHECK(sent && room);
    strcpy(rpcrdma_buffer_data(sent, NULL), "read");
    strcpy(rpcrdma_buffer_data(room, NULL), "write");
    rpcrdma_read_chunk read = {.buffer = sent};
    rpcrdma_write_chunk write[] = {{.len = 64}, {.buffer = room}};
    rpcrdma_request valid = REQUEST(.procedure = 1, .read_chunks = &read, .read_count = 1, .write_chunks = write,
                                    .write_count = 2);
    const struct {
        size_t position, args_len;
        uint32_t flags;
    } invalid[] = {{.position = 2}, {.position = 8}, {.flags = RPCRDMA_ONE_WAY}, {.args_len = 2}, {.flags = 1u << 31}};
    for (size_t i = 0; i < 2 * sizeof invalid / sizeof *invalid; i++) {
        rpcrdma_request request = valid;
        read.position = invalid[i / 2].position;
        request.args = "abc", request.args_len = invalid[i / 2].args_len, request.flags = invalid[i / 2].flags;
        rpcrdma_reply *reply = (rpcrdma_reply *)&reply;
        CHECK(rpcrdma_client_call(client, &request, i % 2 ? &reply : NULL) == -EINVAL && errno == EINVAL);
        CHECK(i % 2 == 0 || !reply);
        size_t len;
        const char *data = rpcrdma_buffer_data(sent, &len);
        CHECK(data && !strcmp(data, "read") && len == 64);
        data = rpcrdma_buffer_data(room, &len);
        CHECK(data && !strcmp(data, "write") && len == 128);
    }
    // The buffers are still usable, and their handles become invalid with a call that starts.
    read.position = 0;
    CHECK(!rpcrdma_client_call(client, &valid, NULL));
    CHECK(!rpcrdma_buffer_data(sent, NULL) && errno == EBADF && !rpcrdma_buffer_data(room, NULL) && errno == EBADF);
    // Buffers and replies outlive the client.
    rpcrdma_buffer *kept = rpcrdma_alloc(client, 64);
    rpcrdma_reply *reply;
    CHECK(kept && !rpcrdma_client_call(client, &REQUEST(.procedure = 1), &reply) && !rpcrdma_free(client));
    strcpy(rpcrdma_buffer_data(kept, NULL), "kept");
    size_t len = 1;
    CHECK(!strcmp(rpcrdma_buffer_data(kept, NULL), "kept") && rpcrdma_reply_results(reply, &len) && !len);
    CHECK(!rpcrdma_free(kept) && !rpcrdma_free(reply));
}

// Requests of other versions, and arguments that are not XDR.
static void check_request_sizes(rpcrdma_local_client *client) {
    struct {
        rpcrdma_request request;
        uint64_t later;
    } newer = {.request = REQUEST(.procedure = 1)};
    newer.request.size = 0;
    check_refused(client, newer.request, -EINVAL, "sizeof(rpcrdma_request)");
    newer.request.size = sizeof newer.request - 1;
    check_refused(client, newer.request, -EINVAL, "sizeof(rpcrdma_request)");
    newer.request.size = (size_t)-1;
    check_refused(client, newer.request, -EINVAL, "sizeof(rpcrdma_request)");
    newer.request.size = sizeof newer;
    int ended = 0;
    CHECK(!rpcrdma_local_client_start(client, &newer.request, NULL));
    while (!ended)
        CHECK(rpcrdma_local_client_poll(client, done, &ended) >= 0);
    newer.later = 1;
    CHECK(rpcrdma_local_client_start(client, &newer.request, NULL) == -EINVAL && strstr(rpcrdma_error(), "lacks"));
    check_refused(client, REQUEST(.procedure = 1, .args = "hello", .args_len = 5), -EINVAL, "args_len is 5");
}

// Connects without blocking. Returns a negative code, or 1 once the connection is established.
static int begin_connect(const char *address, rpcrdma_config *config) {
    rpcrdma_local_client *client = rpcrdma_local_client_begin(address, PROGRAM, 1, config);
    int state = client ? 0 : -errno;
    while (client && !(state = rpcrdma_local_client_is_established(client)))
        CHECK(rpcrdma_local_client_poll(client, NULL, NULL) >= 0);
    CHECK(!rpcrdma_free(client));
    return state;
}

// Checks the code of connects that fail: with a thread, polled, and without blocking.
static void check_connect_fails(const char *address, const char *knob, const char *value, int code) {
    rpcrdma_config *config = new_config();
    CHECK(!knob || !rpcrdma_config_set(config, knob, value));
    // `connect.timeout` is for functions that block.
    if (!knob || strcmp(knob, "connect.timeout")) {
        int begun = -begin_connect(address, config);
        if (begun != code)
            fprintf(stderr, "%s: %d instead of %d: %s\n", address, begun, code, rpcrdma_error());
        CHECK(begun == code);
    }
    CHECK(!rpcrdma_client_connect(address, PROGRAM, 1, config));
    if (errno != code)
        fprintf(stderr, "%s: %d instead of %d: %s\n", address, errno, code, rpcrdma_error());
    CHECK(errno == code);
    CHECK(!rpcrdma_local_client_connect(address, PROGRAM, 1, config) && errno == code);
    CHECK(!rpcrdma_free(config));
}

// Connects to a listener that never answers, and to addresses without a listener.
static void check_connects_without_answer(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0 && !bind(fd, (struct sockaddr *)&at, sizeof at) && !listen(fd, 8));
    CHECK(!getsockname(fd, (struct sockaddr *)&at, &len));
    char address[64];
    snprintf(address, sizeof address, "iwarp:127.0.0.1:%d", ntohs(at.sin_port));
    check_connect_fails(address, "connect.timeout", "300ms", ETIMEDOUT);
    check_connect_fails(address, "debug.handshake_timeout", "300ms", ETIMEDOUT);
    CHECK(!close(fd));
    check_connect_fails(address, NULL, NULL, ECONNREFUSED);
    check_connect_fails("iwarp:nobody.invalid", NULL, NULL, ECONNREFUSED);
    check_connect_fails("soft:starts-nobody", NULL, NULL, ECONNREFUSED);
}

// Returns true if a text names the knob as in C, and neither as in Rust nor as a command-line option.
static int names_knob(const char *text) {
    return strstr(text, "wire.host_key") && !strstr(text, "wire.host_auth") && !strstr(text, "--");
}

// The close reason names the knob if the server requires a host key.
static void check_close_reason_without_key(const char *address) {
    rpcrdma_config *config = new_config();
    rpcrdma_local_client *client = rpcrdma_local_client_begin(address, PROGRAM, 1, config);
    CHECK(client);
    int state;
    while (!(state = rpcrdma_local_client_is_established(client)))
        CHECK(rpcrdma_local_client_poll(client, NULL, NULL) >= 0);
    CHECK(state == -EKEYREJECTED && names_knob(rpcrdma_error()));
    char reason[256];
    int len = rpcrdma_close_reason(client, reason, sizeof reason);
    CHECK(len > 0 && len < (int)sizeof reason && (int)strlen(reason) == len);
    if (!names_knob(reason))
        fprintf(stderr, "%s\n", reason);
    CHECK(strstr(reason, "requires a host key") && names_knob(reason));
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(config));
}

// Connects to a server that requires a host key.
static void check_connects_without_key(const char *address, rpcrdma_services *services) {
    rpcrdma_config *config = new_config();
    CHECK(!rpcrdma_config_set(config, "wire.host_key", "blue:000102030405060708090a0b0c0d0e0f"));
    rpcrdma_server *server = rpcrdma_server_start(address, services, config);
    CHECK(server);
    check_connect_fails(address, NULL, NULL, EKEYREJECTED);
    CHECK(strstr(rpcrdma_error(), "requires a host key") && strstr(rpcrdma_error(), "no call was executed"));
    check_connect_fails(address, "wire.host_key", "blue:ff0102030405060708090a0b0c0d0e0f", EKEYREJECTED);
    CHECK(strstr(rpcrdma_error(), "its key differs") && strstr(rpcrdma_error(), "(wire.host_key)"));
    check_connect_fails(address, "wire.host_key", "red:000102030405060708090a0b0c0d0e0f", EKEYREJECTED);
    check_close_reason_without_key(address);
    rpcrdma_client *client = rpcrdma_client_connect(address, PROGRAM, 1, config);
    CHECK(client);
    // The server's log names the key of the client that connected with a different key.
    do
        CHECK(!rpcrdma_client_call(client, &REQUEST(.procedure = 1), NULL));
    while (!unproven);
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(server) && !rpcrdma_free(config));
}

static void count_refused(void *context, const rpcrdma_completion *completion) {
    CHECK(completion->error == -EKEYREJECTED && strstr(rpcrdma_error(), "the call was not executed"));
    ++*(int *)context;
}

// A server requires a host key only after its restart. A call that waits for the new connection is not executed.
static void check_calls_without_key(const char *address, rpcrdma_services *services) {
    rpcrdma_config *config = new_config(), *keyed = new_config();
    CHECK(!rpcrdma_config_set(config, "connect.reconnect_attempts", "1000"));
    CHECK(!rpcrdma_config_set(keyed, "wire.host_key", "blue:000102030405060708090a0b0c0d0e0f"));
    rpcrdma_server *server = rpcrdma_server_start(address, services, NULL);
    CHECK(server);
    rpcrdma_local_client *client = rpcrdma_local_client_connect(address, PROGRAM, 1, config);
    CHECK(client && !rpcrdma_free(server));
    int ended = 0;
    while (rpcrdma_local_client_is_established(client) == 1)
        CHECK(rpcrdma_local_client_poll(client, count_refused, &ended) >= 0);
    CHECK(!rpcrdma_local_client_start(client, &REQUEST(.procedure = 1), NULL));
    CHECK(server = rpcrdma_server_start(address, services, keyed));
    while (!ended)
        CHECK(rpcrdma_local_client_poll(client, count_refused, &ended) >= 0);
    CHECK(ended == 1 && !rpcrdma_free(client) && !rpcrdma_free(server));
    CHECK(!rpcrdma_free(config) && !rpcrdma_free(keyed));
}

// The end of an established connection is not a failed connect.
static void check_end_of_established_connection(const char *address, rpcrdma_services *services) {
    rpcrdma_config *config = new_config();
    rpcrdma_server *server = rpcrdma_server_start(address, services, config);
    rpcrdma_local_client *client = rpcrdma_local_client_begin(address, PROGRAM, 1, config);
    CHECK(server && client);
    while (!rpcrdma_local_client_is_established(client))
        CHECK(rpcrdma_local_client_poll(client, NULL, NULL) >= 0);
    CHECK(rpcrdma_local_client_is_established(client) == 1 && !rpcrdma_free(server));
    while (rpcrdma_local_client_is_established(client) >= 0)
        CHECK(rpcrdma_local_client_poll(client, NULL, NULL) >= 0);
    CHECK(rpcrdma_local_client_is_established(client) == -ENOTCONN);
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(config));
}

// Addresses that are in use, by another server or by the same one.
static void check_starts_at_used_addresses(const char *address, rpcrdma_services *services) {
    rpcrdma_config *config = new_config();
    char twice[256];
    snprintf(twice, sizeof twice, "%s,%s", address, address);
    CHECK(!rpcrdma_server_start(twice, services, config) && errno == EADDRINUSE);
    CHECK(strstr(rpcrdma_error(), "is listed twice") && strstr(rpcrdma_error(), address));
    rpcrdma_server *server = rpcrdma_server_start(address, services, config);
    CHECK(server && !rpcrdma_server_start(address, services, config) && errno == EADDRINUSE);
    CHECK(strstr(rpcrdma_error(), "another ") && !strstr(rpcrdma_error(), "twice"));
    CHECK(!rpcrdma_free(server) && !rpcrdma_free(config));
}

// A server neither replaces nor removes a file at the path of its statistics if the file is not a socket.
static void check_other_files_are_spared(const char *address, rpcrdma_services *services) {
    char path[] = "/tmp/rpcrdma-starts-XXXXXX", other[64];
    int file = mkstemp(path);
    CHECK(file >= 0 && write(file, "data", 4) == 4);
    snprintf(other, sizeof other, "%s-link", path);
    CHECK(!symlink(path, other));
    const char *paths[] = {path, other};
    for (int i = 0; i < 2; i++) {
        rpcrdma_config *config = new_config();
        CHECK(!rpcrdma_config_set(config, "server.stats", paths[i]));
        CHECK(!rpcrdma_server_start(address, services, config) && errno == EADDRNOTAVAIL);
        CHECK(strstr(rpcrdma_error(), "not a socket") && !rpcrdma_free(config));
    }
    struct stat before, after;
    CHECK(!fstat(file, &before) && !lstat(path, &after) && before.st_ino == after.st_ino && after.st_size == 4);
    CHECK(!lstat(other, &after) && S_ISLNK(after.st_mode) && !close(file) && !unlink(other) && !unlink(path));
}

// A client of version 1 connects to a server that requires a key, and its calls fail without being executed.
static void check_calls_of_version_1_without_key(const char *address, rpcrdma_services *services) {
    rpcrdma_config *config = new_config(), *keyed = new_config();
    CHECK(!rpcrdma_config_set(config, "wire.credit_mode", "v1"));
    CHECK(!rpcrdma_config_set(keyed, "wire.host_key", "blue:000102030405060708090a0b0c0d0e0f"));
    // Version 1 and a host key contradict each other in one configuration.
    CHECK(rpcrdma_config_set(config, "wire.host_key", "blue:000102030405060708090a0b0c0d0e0f") == -EINVAL);
    CHECK(!strncmp(rpcrdma_error(), "wire.host_key: ", 15) && names_knob(rpcrdma_error()));
    CHECK(rpcrdma_config_set(keyed, "wire.credit_mode", "v1") == -EINVAL && names_knob(rpcrdma_error()));
    CHECK(!strncmp(rpcrdma_error(), "wire.credit_mode: ", 18));
    rpcrdma_server *server = rpcrdma_server_start(address, services, keyed);
    rpcrdma_client *client = rpcrdma_client_connect(address, PROGRAM, 1, config);
    CHECK(server && client);
    CHECK(rpcrdma_client_call(client, &REQUEST(.procedure = 1), NULL) == -EPROTO);
    CHECK(strstr(rpcrdma_error(), "not executed, and a retry on this connection fails"));
    CHECK(rpcrdma_client_call(client, &REQUEST(.procedure = 1, .flags = RPCRDMA_ONE_WAY), NULL) == -EINVAL);
    CHECK(strstr(rpcrdma_error(), "one-way call in version 1"));
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(server) && !rpcrdma_free(config) && !rpcrdma_free(keyed));
}

// Sets a limit of file sizes below the size of the library's memory, which is a file for the kernel.
static void check_starts_below_file_size_limit(const char *address, rpcrdma_services *services) {
    struct rlimit before, low;
    CHECK(!getrlimit(RLIMIT_FSIZE, &before));
    rpcrdma_server *server = rpcrdma_server_start(address, services, NULL);
    low = before, low.rlim_cur = 1 << 20;
    CHECK(server && !setrlimit(RLIMIT_FSIZE, &low));
    check_connect_fails(address, NULL, NULL, EFBIG);
    CHECK(strstr(rpcrdma_error(), "RLIMIT_FSIZE is 1048576") && strstr(rpcrdma_error(), "`ulimit -f unlimited`"));
    CHECK(!rpcrdma_free(server) && !rpcrdma_server_start(address, services, NULL) && errno == EFBIG);
    CHECK(!rpcrdma_local_server_start(address, services, NULL) && errno == EFBIG);
    CHECK(!setrlimit(RLIMIT_FSIZE, &before));
}

// Lets the process open at most `more` further descriptors.
static void allow_descriptors(int more) {
    struct rlimit limit;
    int first = dup(0);
    CHECK(first >= 0 && !close(first) && !getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = (rlim_t)(first + more);
    CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
}

// Returns true if a start has failed for lack of descriptors and its text says so.
static int lacks_descriptors(void) {
    const char *text = rpcrdma_error();
    int says_so = errno == EMFILE && strstr(text, "RLIMIT_NOFILE is ") && strstr(text, "`ulimit -n 65536`");
    if (!says_so)
        fprintf(stderr, "%d: %s\n", errno, text);
    return says_so;
}

// Starts servers and clients without enough descriptors, so that each call that opens one fails.
static void check_starts_without_descriptors(const char *address, rpcrdma_services *services) {
    struct rlimit before;
    CHECK(!getrlimit(RLIMIT_NOFILE, &before));
    rpcrdma_config *config = new_config();
    rpcrdma_server *server = NULL;
    int failures = 0;
    for (int more = 0; !server; more++) {
        CHECK(more < 64);
        allow_descriptors(more);
        server = rpcrdma_server_start(address, services, config);
        CHECK(server || lacks_descriptors());
        failures += !server;
        CHECK(!setrlimit(RLIMIT_NOFILE, &before));
    }
    CHECK(failures > 2);
    // The limits are so low that the client lacks descriptors. With higher limits, the server would lack some.
    for (int more = 0; more < 3; more++) {
        allow_descriptors(more);
        CHECK(!rpcrdma_client_connect(address, PROGRAM, 1, config) && lacks_descriptors());
        CHECK(!rpcrdma_local_client_connect(address, PROGRAM, 1, config) && lacks_descriptors());
        CHECK(!setrlimit(RLIMIT_NOFILE, &before));
    }
    CHECK(!rpcrdma_free(server) && !rpcrdma_free(config));
}

// Returns true under valgrind or a sanitizer, whose own memory would count against a limit of address space.
static int is_instrumented(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 1;
#else
    const char *preloaded = getenv("LD_PRELOAD");
    return preloaded && strstr(preloaded, "valgrind");
#endif
}

// Returns the number of mapped bytes of the process.
static size_t mapped_bytes(void) {
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%lu", &pages) == 1 && !fclose(file));
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

// Lets the process map at most `more` further bytes.
static void allow_memory(size_t more, const struct rlimit *before) {
    const struct rlimit limit = {.rlim_cur = mapped_bytes() + more, .rlim_max = before->rlim_max};
    CHECK(!setrlimit(RLIMIT_AS, &limit));
}

// Returns true if a start has failed with this code and its text names both limits.
static int names_limits(int code, const char *limit, const char *other) {
    const char *text = rpcrdma_error();
    int says_so = errno == code && strstr(text, limit) && strstr(text, other);
    if (!says_so)
        fprintf(stderr, "%d: %s\n", errno, text);
    return says_so;
}

// Starts servers and clients below limits of address space, so that threads, buffers and rings are refused.
static void check_starts_without_memory(const char *address, rpcrdma_services *services) {
    struct rlimit before;
    CHECK(!getrlimit(RLIMIT_AS, &before));
    rpcrdma_config *config = new_config();
    rpcrdma_server *server = rpcrdma_server_start(address, services, config);
    CHECK(server);
    // The heap keeps free memory and all threads share it, so that only mappings fail.
    enum { BLOCKS = 256, BLOCK = 1 << 16 };
    void *blocks[BLOCKS];
    CHECK(mallopt(M_ARENA_MAX, 1) && mallopt(M_MMAP_THRESHOLD, 1 << 30) && mallopt(M_TRIM_THRESHOLD, 1 << 30));
    for (int i = 0; i < BLOCKS; i++)
        CHECK(blocks[i] = malloc(BLOCK));
    for (int i = 0; i < BLOCKS; i++)
        free(blocks[i]);
    allow_memory(1 << 20, &before);
    CHECK(!rpcrdma_server_start("soft:starts-memory", services, config));
    CHECK(names_limits(EAGAIN, "RLIMIT_NPROC is ", "RLIMIT_AS is "));
    CHECK(!rpcrdma_client_connect(address, PROGRAM, 1, config));
    CHECK(names_limits(EAGAIN, "RLIMIT_NPROC is ", "RLIMIT_AS is "));
    CHECK(!rpcrdma_local_server_start("soft:starts-memory", services, config));
    CHECK(names_limits(ENOMEM, "RLIMIT_AS is ", "memory.receives"));
    // With rising limits, first the buffers are refused, and then the rings of the connection.
    int no_buffers = 0, no_rings = 0;
    for (size_t more = 1 << 20; !no_rings && more < 1 << 25; more += 1 << 17) {
        allow_memory(more, &before);
        rpcrdma_local_client *client = rpcrdma_local_client_connect(address, PROGRAM, 1, config);
        if (strncmp(address, "soft:", 5) && client) {
            // The sockets of the connection are memory of the kernel, so there are no rings to refuse.
            CHECK(!rpcrdma_free(client));
            no_rings = 1;
            continue;
        }
        CHECK(!client && names_limits(ENOMEM, "RLIMIT_AS is ", "mmap of "));
        no_buffers += strstr(rpcrdma_error(), "memory.receives") != NULL;
        no_rings = strstr(rpcrdma_error(), "rpcrdma-ring: mmap of ") != NULL;
        CHECK(!no_rings || strstr(rpcrdma_error(), "wire.receive_size"));
    }
    CHECK(no_buffers && no_rings && !setrlimit(RLIMIT_AS, &before));
    // Both kinds of clients are refused chunk memory.
    for (int is_polled = 0; is_polled < 2; is_polled++) {
        rpcrdma_config *large = new_config();
        CHECK(!rpcrdma_config_set(large, "memory.bulk_buffers", "[[67108864, 1]]"));
        void *client = is_polled ? (void *)rpcrdma_local_client_connect(address, PROGRAM, 1, large)
                                 : (void *)rpcrdma_client_connect(address, PROGRAM, 1, large);
        CHECK(client);
        allow_memory(1 << 24, &before);
        CHECK(!rpcrdma_alloc(client, 1) && names_limits(ENOMEM, "RLIMIT_AS", "memory.bulk_buffers"));
        CHECK(!setrlimit(RLIMIT_AS, &before) && !rpcrdma_free(client) && !rpcrdma_free(large));
    }
    CHECK(!rpcrdma_free(server) && !rpcrdma_free(config));
}

// The system refuses chunk memory to both kinds of clients, and later grants it.
static void check_allocations_beyond_limits(const char *address, rpcrdma_services *services) {
    rpcrdma_config *config = new_config();
    rpcrdma_server *server = rpcrdma_server_start(address, services, NULL);
    CHECK(server);
    for (int is_polled = 0; is_polled < 2; is_polled++) {
        void *client = is_polled ? (void *)rpcrdma_local_client_connect(address, PROGRAM, 1, config)
                                 : (void *)rpcrdma_client_connect(address, PROGRAM, 1, config);
        CHECK(client);
        struct rlimit before;
        CHECK(!getrlimit(RLIMIT_FSIZE, &before));
        const struct rlimit low = {.rlim_cur = 4096, .rlim_max = before.rlim_max};
        CHECK(!setrlimit(RLIMIT_FSIZE, &low));
        CHECK(!rpcrdma_alloc(client, 1) && errno == EFBIG && strstr(rpcrdma_error(), "`ulimit -f`"));
        rpcrdma_read_chunk read = {.data = "read", .len = 4};
        rpcrdma_write_chunk room = {.len = 4};
        if (is_polled) {
            rpcrdma_request with_room = REQUEST(.procedure = 1, .write_chunks = &room, .write_count = 1);
            check_refused(client, with_room, -EFBIG, "`ulimit -f`");
            rpcrdma_request with_data = REQUEST(.procedure = 1, .read_chunks = &read, .read_count = 1);
            check_refused(client, with_data, -EFBIG, "`ulimit -f`");
        } else {
            CHECK(rpcrdma_client_start(client, &REQUEST(.procedure = 1, .read_chunks = &read, .read_count = 1)) == -EFBIG);
        }
        CHECK(!setrlimit(RLIMIT_FSIZE, &before) && !getrlimit(RLIMIT_NOFILE, &before));
        allow_descriptors(0);
        CHECK(!rpcrdma_alloc(client, 1) && errno == EMFILE && strstr(rpcrdma_error(), "`ulimit -n`"));
        CHECK(!setrlimit(RLIMIT_NOFILE, &before));
        void *memory = rpcrdma_alloc(client, 1);
        CHECK(memory && !rpcrdma_free(memory) && !rpcrdma_free(client));
    }
    CHECK(!rpcrdma_free(server) && !rpcrdma_free(config));
}

// A server has Receives for few connections, so that a further connection is refused.
static void check_connects_without_receives(const char *address, rpcrdma_services *services) {
    enum { MAX_CLIENTS = 256 };
    rpcrdma_config *config = new_config(), *few = new_config();
    CHECK(!rpcrdma_config_set(few, "memory.receives", "256") && !rpcrdma_config_set(few, "limits.credits", "64"));
    // No connection is evicted for others.
    CHECK(!rpcrdma_config_set(few, "accept.evict_after", "1h"));
    rpcrdma_server *server = rpcrdma_server_start(address, services, few);
    CHECK(server);
    // The credits of idle clients shrink, so that some more connections are accepted later.
    void *clients[MAX_CLIENTS];
    int count = 0;
    for (int is_polled = 0; is_polled < 2; is_polled++) {
        for (; count < MAX_CLIENTS; count++) {
            clients[count] = is_polled ? (void *)rpcrdma_local_client_connect(address, PROGRAM, 1, config)
                                       : (void *)rpcrdma_client_connect(address, PROGRAM, 1, config);
            if (!clients[count])
                break;
            CHECK(is_polled || !rpcrdma_client_call(clients[count], &REQUEST(.procedure = 1), NULL));
        }
        CHECK(count > 0 && count < MAX_CLIENTS && errno == EAGAIN && strstr(rpcrdma_error(), "no receives left"));
    }
    while (count)
        CHECK(!rpcrdma_free(clients[--count]));
    CHECK(!rpcrdma_free(server) && !rpcrdma_free(few) && !rpcrdma_free(config));
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    CHECK(!rpcrdma_log(count_unproven, NULL, 2));
    static const rpcrdma_procedure table[] = {{.number = 1, .handler = succeed, .max_reply = BULK, .read_chunks = 1,
                                               .max_read = BULK, .write_chunks = 3, .max_write = BULK,
                                               .flags = RPCRDMA_UNCOUNTED}};
    rpcrdma_config *config = new_config();
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, PROGRAM, 1, table, 1, sizeof *table));
    // This test comes first, because the C library keeps the stacks of ended threads, which would count as mapped.
    if (!is_instrumented())
        check_starts_without_memory(argv[2], services);
    rpcrdma_server *server = rpcrdma_server_start(argv[1], services, NULL);
    CHECK(server);
    rpcrdma_local_client *client = rpcrdma_local_client_connect(argv[1], PROGRAM, 1, config);
    CHECK(client);
    check_calls_without_memory(client);
    check_request_sizes(client);
    CHECK(!rpcrdma_free(client));
    check_calls_with_invalid_chunks(argv[1], config);
    check_connects_without_answer();
    check_connects_without_key(argv[2], services);
    check_calls_without_key(argv[2], services);
    check_calls_of_version_1_without_key(argv[2], services);
    check_end_of_established_connection(argv[2], services);
    check_starts_at_used_addresses(argv[2], services);
    check_other_files_are_spared(argv[2], services);
    check_starts_below_file_size_limit(argv[2], services);
    check_starts_without_descriptors(argv[2], services);
    check_allocations_beyond_limits(argv[2], services);
    check_connects_without_receives(argv[2], services);
    CHECK(!rpcrdma_free(server) && !rpcrdma_free(services) && !rpcrdma_free(config));
    printf("memory, lengths, sizes of requests, codes of connects\n");
    return 0;
}
