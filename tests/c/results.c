// Handlers that write no results or results that are not XDR, and Write chunks without bytes or memory.
//
//   results ADDRESS ADDRESS
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <rpcrdma.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "raw_peer.h"

enum { PROGRAM = 0x20000001, ROOM = 16, LONG = 4096 };
enum { ANSWER = 1, DEFERRED, TWO_CHUNKS, OWN_MEMORY };
// Behaviours of the handlers of ANSWER and DEFERRED.
enum {
    IGNORE_TOO_LONG,
    IGNORE_TOO_LONG_ROOM,
    IGNORE_NULL,
    IGNORE_ODD,
    IGNORE_ODD_ROOM,
    RECOVER,
    IGNORE_LONG_CHUNK,
    RECOVER_CHUNK,
    IGNORE_MISSING_CHUNK,
    RECOVER_MISSING_CHUNK,
    NOTHING_IN_MISSING_CHUNK,
    IGNORE_NO_BUFFER,
    RETURN_ODD_LENGTH,
    RETURN_LENGTH,
    RETURN_CODE,
    RETURN_STATUS,
    CASES
};

static char log_text[64 << 10];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void append_log_line(void *context, int level, const char *line) {
    (void)context, (void)level;
    pthread_mutex_lock(&lock);
    size_t len = strlen(log_text);
    snprintf(log_text + len, sizeof log_text - len, "%s\n", line);
    pthread_mutex_unlock(&lock);
}

// Returns true if the log contains this text. The server writes to the log before it answers.
static int has_logged(const char *text) {
    pthread_mutex_lock(&lock);
    int has = strstr(log_text, text) != NULL;
    pthread_mutex_unlock(&lock);
    return has;
}

// Provokes the failure of a case, ignores it, and returns the status of the handler.
static int provoke_failure(int which, rpcrdma_call *call) {
    static const char bytes[LONG];
    void *memory;
    size_t room;
    switch (which) {
    case IGNORE_TOO_LONG:
        CHECK(rpcrdma_call_reply_with(call, bytes, LONG) == -EMSGSIZE);
        return 0;
    case IGNORE_TOO_LONG_ROOM:
        CHECK(!rpcrdma_call_reply(call, LONG) && errno == EMSGSIZE);
        return 0;
    case IGNORE_NULL:
        CHECK(rpcrdma_call_reply_with(call, NULL, 4) == -EINVAL);
        return 0;
    case IGNORE_ODD:
        CHECK(rpcrdma_call_reply_with(call, bytes, 5) == -EINVAL);
        return 0;
    case IGNORE_ODD_ROOM:
        CHECK(!rpcrdma_call_reply(call, 5) && errno == EINVAL);
        return 0;
    case RECOVER:
        CHECK(rpcrdma_call_reply_with(call, bytes, LONG) == -EMSGSIZE);
        CHECK(!rpcrdma_call_reply_with(call, bytes, 8));
        return 0;
    case IGNORE_LONG_CHUNK:
        // The client retransmits the call with a longer chunk.
        memory = rpcrdma_call_write_chunk(call, 0, &room);
        CHECK(memory && (room == ROOM || room == ROOM + 1));
        memset(memory, 7, room);
        CHECK(rpcrdma_call_write_chunk_filled(call, 0, ROOM + 1) == (room == ROOM ? -EMSGSIZE : 0));
        CHECK(!rpcrdma_call_reply_with(call, bytes, 8));
        return 0;
    case RECOVER_CHUNK:
        CHECK(rpcrdma_call_write_chunk_filled(call, 0, ROOM + 1) == -EMSGSIZE);
        memset(rpcrdma_call_write_chunk(call, 0, NULL), 7, ROOM);
        CHECK(!rpcrdma_call_write_chunk_filled(call, 0, ROOM) && !rpcrdma_call_reply_with(call, bytes, 8));
        return 0;
    case IGNORE_MISSING_CHUNK:
        CHECK(!rpcrdma_call_reply_with(call, bytes, 8));
        CHECK(rpcrdma_call_write_chunk_filled(call, 0, ROOM) == -ENOENT);
        return 0;
    case RECOVER_MISSING_CHUNK:
        CHECK(rpcrdma_call_write_chunk_filled(call, 0, ROOM) == -ENOENT);
        CHECK(!rpcrdma_call_reply_with(call, bytes, 8));
        return 0;
    case NOTHING_IN_MISSING_CHUNK:
        CHECK(!rpcrdma_call_reply_with(call, bytes, 8));
        CHECK(rpcrdma_call_write_chunk_filled(call, 0, 0) == -ENOENT);
        return 0;
    case IGNORE_NO_BUFFER:
        CHECK(!rpcrdma_call_reply_with(call, bytes, 8));
        CHECK(rpcrdma_call_result(call, 0, NULL) == -EINVAL);
        return 0;
    case RETURN_CODE:
        return -4711;
    default:
        return RPCRDMA_SYSTEM_ERR;
    }
}

static int read_number(const void *args, size_t len) {
    int value;
    CHECK(len == sizeof value);
    memcpy(&value, args, sizeof value);
    return value;
}

static int answer_case(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                       size_t *results_len) {
    (void)context;
    int which = read_number(args, len);
    if (which != RETURN_ODD_LENGTH && which != RETURN_LENGTH)
        return provoke_failure(which, call);
    memset(results, 0, 8);
    *results_len = which == RETURN_LENGTH ? 8 : 7;
    return 0;
}

static void answer_deferred(void *context, rpcrdma_call *call, const void *args, size_t len) {
    (void)context;
    CHECK(!rpcrdma_call_answer(call, provoke_failure(read_number(args, len), call)));
}

// A handler with two results of 5 and 100 bytes. Each is written to its Write chunk, or among the inline results if
// there is no chunk, as rpcrdma.h describes.
static int return_two_chunks(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                             size_t *results_len) {
    (void)context, (void)args, (void)len;
    static const unsigned lens[] = {5, 100};
    char *to = results;
    for (unsigned i = 0; i < 2; i++) {
        size_t room;
        void *memory = rpcrdma_call_write_chunk(call, i, &room);
        CHECK(memory || errno == ENOENT);
        memset(to, 0, 4 + (lens[i] + 3) / 4 * 4), to[3] = (char)lens[i], to += 4;
        if (!memory || room >= lens[i])
            memset(memory ? memory : to, 'a' + (int)i, lens[i]);
        if (memory) {
            int code = rpcrdma_call_write_chunk_filled(call, i, lens[i]);
            if (code)
                return code;
        } else
            to += (lens[i] + 3) / 4 * 4;
    }
    *results_len = (size_t)(to - (char *)results);
    return 0;
}

// A handler whose own memory is the result. The caller offers the Write chunk, so the code must not be ENOENT, which
// would ask for inline data.
static int return_own_memory(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                             size_t *results_len) {
    (void)results, (void)results_len;
    int has_result = read_number(args, len);
    if (has_result)
        CHECK(!rpcrdma_call_result(call, 0, rpcrdma_arena_part(context, 0, ROOM, NULL, NULL)));
    CHECK(!rpcrdma_call_write_chunk(call, 0, NULL) && errno == EINVAL);
    CHECK(rpcrdma_call_write_chunk_filled(call, 0, 0) == -EINVAL);
    CHECK(strstr(rpcrdma_error(), has_result ? "already has memory of rpcrdma_call_result" : "RPCRDMA_OWN_RESULTS"));
    // The caller does not offer chunk 1, so its data belongs inline.
    CHECK(!rpcrdma_call_write_chunk(call, 1, NULL) && errno == ENOENT);
    return has_result ? 0 : rpcrdma_call_write_chunk_filled(call, 0, ROOM);
}

// Makes a call, and returns its code. `*status` gets the status of the reply, and `*len` the bytes of its results.
static int call(rpcrdma_client *client, rpcrdma_request request, int *status, size_t *len) {
    rpcrdma_reply *reply = NULL;
    int code = rpcrdma_client_call(client, &request, &reply);
    CHECK(reply);
    *status = rpcrdma_reply_status(reply);
    *len = 0;
    CHECK(code || rpcrdma_reply_results(reply, len));
    CHECK(!rpcrdma_free(reply));
    return code;
}

static void run_cases(rpcrdma_client *client, uint32_t procedure) {
    // Whether each case has results; -1: its Write chunk is too short at first.
    static const int has_results[CASES] = {[RECOVER] = 1,           [RECOVER_CHUNK] = 1,
                                           [IGNORE_LONG_CHUNK] = -1, [RECOVER_MISSING_CHUNK] = 1,
                                           [RETURN_LENGTH] = 1,      [NOTHING_IN_MISSING_CHUNK] = 1};
    for (int which = 0; which < CASES; which++) {
        if (procedure == DEFERRED && (which == RETURN_ODD_LENGTH || which == RETURN_LENGTH))
            continue;
        rpcrdma_write_chunk chunk = {.len = ROOM};
        rpcrdma_request request = REQUEST(.procedure = procedure, .args = &which, .args_len = sizeof which);
        if (which == IGNORE_LONG_CHUNK || which == RECOVER_CHUNK)
            request.write_chunks = &chunk, request.write_count = 1;
        int status, code;
        size_t len;
        code = call(client, request, &status, &len);
        if (which == IGNORE_MISSING_CHUNK)
            CHECK(code == -EREMOTEIO && status == RPCRDMA_GARBAGE_ARGS);
        else if (has_results[which] > 0)
            CHECK(!code && len == 8);
        else if (has_results[which] < 0)
            // The retransmitted call has a chunk that is long enough.
            CHECK(!code && len == 8);
        else
            CHECK(code == -EREMOTEIO && status == RPCRDMA_SYSTEM_ERR);
    }
}

static void run_own_memory(rpcrdma_client *client) {
    for (int has_result = 0; has_result < 2; has_result++) {
        rpcrdma_write_chunk chunk = {.len = ROOM};
        rpcrdma_request request = REQUEST(.procedure = OWN_MEMORY, .args = &has_result, .args_len = sizeof has_result,
                                          .write_chunks = &chunk, .write_count = 1);
        int status, code;
        size_t len;
        code = call(client, request, &status, &len);
        CHECK(has_result ? !code : code == -EREMOTEIO && status == RPCRDMA_SYSTEM_ERR);
    }
    CHECK(has_logged("RPCRDMA_OWN_RESULTS"));
}

// RFC 8166 §4.3.2.3: an empty Write chunk asks for its result inline. `empty` has a bit for each of the two chunks.
static void run_empty_chunks(int port) {
    enum { XID = 0x1234 };
    for (unsigned empty = 0; empty < 4; empty++) {
        uint32_t words[64] = {XID, 1, 4, 0, 0}, answer[256];
        size_t count = 5;
        for (unsigned i = 0; i < 2; i++) {
            unsigned segments = !(empty >> i & 1);
            words[count++] = 1, words[count++] = segments;
            if (segments) {
                const uint32_t segment[] = {0x100 + i, 100, 0, 0};
                memcpy(words + count, segment, sizeof segment), count += 4;
            }
        }
        const uint32_t rest[] = {0, 0, XID, 0, 2, PROGRAM, 1, TWO_CHUNKS, 0, 0, 0, 0};
        memcpy(words + count, rest, sizeof rest), count += sizeof rest / sizeof *rest;
        int crc, fd = raw_connect(port, &crc);
        size_t got = raw_exchange(fd, crc, words, count, answer, 256), at = 5;
        CHECK(got > at && answer[0] == XID && answer[3] == 0 && answer[4] == 0);
        for (unsigned i = 0; i < 2; i++) {
            unsigned segments = !(empty >> i & 1);
            CHECK(answer[at] == 1 && answer[at + 1] == segments);
            CHECK(!segments || answer[at + 3] == (i ? 100 : 5));
            at += 2 + 4 * segments;
        }
        // The end of both lists, then an accepted reply.
        const uint32_t accepted[] = {0, 0, XID, 1, 0, 0, 0, 0};
        CHECK(got > at + 8 && !memcmp(answer + at, accepted, sizeof accepted));
        at += 8;
        const uint32_t a = 0x61616161, b = 0x62626262;
        CHECK(answer[at++] == 5);
        if (empty & 1)
            CHECK(answer[at++] == a && answer[at++] == (a & 0xff000000));
        CHECK(answer[at++] == 100);
        for (int i = 0; empty & 2 && i < 25; i++)
            CHECK(answer[at++] == b);
        CHECK(at == got && !close(fd));
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 3 && !rpcrdma_log(append_log_line, NULL, 2));
    static _Alignas(4096) char memory[4096];
    rpcrdma_arena *arena = rpcrdma_arena_new(memory, sizeof memory, NULL, NULL);
    const rpcrdma_procedure table[] = {
        {.number = ANSWER, .handler = answer_case, .max_reply = 64, .write_chunks = 1, .max_write = LONG},
        {.number = DEFERRED, .deferred = answer_deferred, .max_reply = 64, .write_chunks = 1, .max_write = LONG},
        {.number = TWO_CHUNKS, .handler = return_two_chunks, .write_chunks = 2, .max_write = LONG},
        {.number = OWN_MEMORY, .handler = return_own_memory, .context = arena, .flags = RPCRDMA_OWN_RESULTS,
         .write_chunks = 1, .max_write = LONG},
    };
    rpcrdma_config *config = rpcrdma_config_new();
    CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
    CHECK(!rpcrdma_config_set(config, "poll.idle", "event") && !rpcrdma_config_arena(config, arena));
    rpcrdma_services *services = rpcrdma_services_new();
    CHECK(services && !rpcrdma_services_add(services, PROGRAM, 1, table, sizeof table / sizeof *table, sizeof *table));
    rpcrdma_server *server = rpcrdma_server_start(argv[1], services, config);
    rpcrdma_client *client = rpcrdma_client_connect(argv[1], PROGRAM, 1, config);
    CHECK(server && client);
    run_cases(client, ANSWER);
    run_cases(client, DEFERRED);
    run_own_memory(client);
    CHECK(has_logged("handler returned -4711, which is neither 0"));
    CHECK(has_logged("inline results of 7 bytes are not a multiple of 4"));
    char address[64];
    int port = free_port();
    snprintf(address, sizeof address, "iwarp:127.0.0.1:%d", port);
    rpcrdma_server *over_tcp = rpcrdma_server_start(address, services, config);
    CHECK(over_tcp);
    run_empty_chunks(port);
    CHECK(!rpcrdma_free(over_tcp));
    CHECK(!rpcrdma_free(client) && !rpcrdma_free(server) && !rpcrdma_free(services));
    CHECK(!rpcrdma_free(config) && !rpcrdma_free(arena));
    printf("ignored failures, lengths, codes, empty Write chunks, chunks without memory\n");
    return 0;
}
