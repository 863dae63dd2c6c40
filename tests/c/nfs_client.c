// Reads and writes a file of an NFSv4.0 server (RFC 7530). The data travels in chunks (RFC 8267).
//
//   nfs_client ADDRESS get PATH >FILE    PATH begins at the server's root
//   nfs_client ADDRESS put PATH <FILE    the file must exist
//
// Prints the client's statistics to standard error.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include <rpcrdma.h>

#include "check.h"
#include "example.h"
#include "xdr.h"

enum { PROGRAM = 100003, VERSION = 4 };
enum { PROC_NULL, PROC_COMPOUND };
enum { OP_LOOKUP = 15, OP_PUTROOTFH = 24, OP_READ = 25, OP_WRITE = 38 };
enum { FILE_SYNC = 2 };
// Bytes of a READ or WRITE, of a path, and of the arguments before the data.
enum { BLOCK = 128 << 10, PATH_MAX_LEN = 512, ARGS_MAX = PATH_MAX_LEN * 9 + 100 };
// Time-out of a call in milliseconds.
enum { TIMEOUT = 60000 };

static rpcrdma_client *client;

// A COMPOUND: operations that lead to a file, and one on it.
struct compound {
    unsigned char args[ARGS_MAX], *end;
    uint32_t operations;
};

// Begins a COMPOUND, up to the stateid and offset of the last operation. The caller appends the other arguments of that
// operation.
static void begin_compound(struct compound *to, const char *path, uint32_t operation, uint64_t offset) {
    unsigned char *at = xdr_put_u32(xdr_put_u32(to->args, 0), 0); // no tag; minor version 0
    unsigned char *count = at;
    at = xdr_put_u32(at + 4, OP_PUTROOTFH);
    to->operations = 1;
    for (size_t len; *(path += strspn(path, "/")); path += len) {
        len = strcspn(path, "/");
        at = xdr_put_u32(xdr_put_u32(at, OP_LOOKUP), (uint32_t)len);
        memset(at, 0, xdr_padded(len));
        memcpy(at, path, len);
        at += xdr_padded(len);
        to->operations++;
    }
    at = xdr_put_u32(at, operation);
    memset(at, 0, 16); // the anonymous stateid
    to->end = xdr_put_u64(at + 16, offset);
    xdr_put_u32(count, ++to->operations);
}

// Calls COMPOUND, with a Read chunk of `len` bytes after the arguments, and a Write chunk of `room` bytes.
static rpcrdma_reply *call(const struct compound *compound, const void *data, size_t len, size_t room) {
    size_t args_len = (size_t)(compound->end - compound->args);
    rpcrdma_read_chunk read = {.position = args_len, .data = data, .len = len};
    rpcrdma_write_chunk write = {.len = room};
    rpcrdma_request request = {.size = sizeof request, .procedure = PROC_COMPOUND,
                               .args = compound->args, .args_len = args_len,
                               .read_chunks = &read, .read_count = len > 0,
                               .write_chunks = &write, .write_count = room > 0, .timeout = TIMEOUT};
    rpcrdma_reply *reply;
    if (rpcrdma_client_call(client, &request, &reply))
        die("call", rpcrdma_error());
    return reply;
}

static uint32_t read_word(struct xdr *from) {
    uint32_t value;
    if (xdr_u32(from, &value))
        die("reply", "too short");
    return value;
}

// Returns the results of the last operation. Exits unless all operations have succeeded.
static struct xdr results_of(rpcrdma_reply *reply, const struct compound *compound) {
    struct xdr results;
    results.at = rpcrdma_reply_results(reply, &results.left);
    uint32_t status = read_word(&results);
    if (status) {
        fprintf(stderr, "nfs_client: the server's status is %u\n", (unsigned)status);
        exit(1);
    }
    if (read_word(&results) || read_word(&results) != compound->operations)
        die("reply", "it has a tag, or another number of operations than the call");
    for (uint32_t i = 0; i < compound->operations; i++) {
        read_word(&results);
        if (read_word(&results))
            die("reply", "an operation has failed");
    }
    return results;
}

static void get_file(const char *path) {
    uint64_t offset = 0;
    for (uint32_t eof = 0; !eof;) {
        struct compound compound;
        begin_compound(&compound, path, OP_READ, offset);
        compound.end = xdr_put_u32(compound.end, BLOCK);
        rpcrdma_reply *reply = call(&compound, NULL, 0, BLOCK);
        struct xdr results = results_of(reply, &compound);
        eof = read_word(&results);
        uint32_t len = read_word(&results);
        if (len) {
            // The data must be in the chunk, and not among the inline results.
            rpcrdma_buffer *buffer = rpcrdma_reply_take_write_chunk(reply, 0);
            size_t room = 0;
            const void *data = buffer ? rpcrdma_buffer_data(buffer, &room) : NULL;
            if (!data || room < len || results.left)
                die("the data is not in the Write chunk", rpcrdma_error());
            if (fwrite(data, 1, len, stdout) != len)
                die("standard output", strerror(errno));
            rpcrdma_free(buffer);
        } else if (!eof)
            die("reply", "no data before the end");
        offset += len;
        rpcrdma_free(reply);
    }
    if (fflush(stdout))
        die("standard output", strerror(errno));
}

static void put_file(const char *path) {
    uint64_t offset = 0;
    for (;;) {
        static unsigned char data[BLOCK];
        size_t len = fread(data, 1, BLOCK, stdin);
        if (!len)
            break;
        struct compound compound;
        begin_compound(&compound, path, OP_WRITE, offset);
        compound.end = xdr_put_u32(xdr_put_u32(compound.end, FILE_SYNC), (uint32_t)len);
        // The data follows its length, which ends the inline arguments.
        rpcrdma_reply *reply = call(&compound, data, len, 0);
        struct xdr results = results_of(reply, &compound);
        if (read_word(&results) != len || read_word(&results) != FILE_SYNC)
            die("reply", "the server has written less, or not to its disk");
        offset += len;
        rpcrdma_free(reply);
    }
    if (ferror(stdin))
        die("standard input", strerror(errno));
}

int main(int argc, char **argv) {
    if (argc != 4 || (strcmp(argv[2], "get") && strcmp(argv[2], "put")) || strlen(argv[3]) > PATH_MAX_LEN)
        die("usage", "nfs_client ADDRESS get|put PATH");
    rpcrdma_config *config = rpcrdma_config_new();
    if (!config)
        die("start", rpcrdma_error());
    set(config, "client.auth_sys", "0:0");
    set(config, "memory.bulk_buffers", "[[131072, 4]]");
    client = rpcrdma_client_connect(argv[1], PROGRAM, VERSION, config);
    if (!client)
        die(argv[1], rpcrdma_error());
    rpcrdma_free(config);
    if (rpcrdma_client_call(client, &REQUEST(.procedure = PROC_NULL), NULL))
        die("NULL", rpcrdma_error());
    if (strcmp(argv[2], "get"))
        put_file(argv[3]);
    else
        get_file(argv[3]);
    char stats[1 << 16];
    if (rpcrdma_stats(client, stats, sizeof stats) < 0)
        die("statistics", rpcrdma_error());
    fprintf(stderr, "%s\n", stats);
    return rpcrdma_free(client) ? 1 : 0;
}
