// A client of kv_server that asks for a value inline by an empty Write chunk (RFC 8166 §4.3.2.3).
//
//   kv_inline PORT
#include <rpcrdma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "raw_peer.h"

enum { PROGRAM = 0x20004b56, VERSION = 1, KV_GET = 1, KV_PUT = 2, XID = 0x1234, MAX_WORDS = 64 };
// Strings of XDR: their length, then their bytes.
#define KEY 3, 0x6b657900
#define VALUE 5, 0x76616c75, 0x65000000

// Makes a call on a new connection. `has_chunk`: the call and the answer have an empty Write chunk. `results` gets the
// words of the results, and their number is returned.
static size_t call(int port, uint32_t procedure, int has_chunk, const uint32_t *args, size_t count, uint32_t *results) {
    const uint32_t header[] = {XID, 1, 4, 0, 0}, empty[] = {1, 0}, list_ends[] = {0, 0};
    const uint32_t rpc[] = {XID, 0, 2, PROGRAM, VERSION, procedure, 0, 0, 0, 0}, accepted[] = {XID, 1, 0, 0, 0, 0};
    uint32_t words[MAX_WORDS], answer[MAX_WORDS], expected[MAX_WORDS];
    size_t len = 0, start = 0;
#define PUT(to, at, from, n) (memcpy((to) + (at), from, 4 * (n)), (at) += (n))
#define PUT_ALL(to, at, from) PUT(to, at, from, sizeof(from) / 4)
    PUT_ALL(words, len, header);
    PUT_ALL(expected, start, header);
    if (has_chunk) {
        PUT_ALL(words, len, empty);
        PUT_ALL(expected, start, empty);
    }
    PUT_ALL(words, len, list_ends);
    PUT_ALL(expected, start, list_ends);
    PUT_ALL(words, len, rpc);
    PUT_ALL(expected, start, accepted);
    PUT(words, len, args, count);
    int crc, fd = raw_connect(port, &crc);
    size_t got = raw_exchange(fd, crc, words, len, answer, MAX_WORDS);
    CHECK(!close(fd) && got >= start);
    expected[2] = answer[2]; // The credits that the server grants are not compared.
    CHECK(!memcmp(answer, expected, 4 * start));
    memcpy(results, answer + start, 4 * (got - start));
    return got - start;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    static const uint32_t entry[] = {KEY, VALUE}, key[] = {KEY}, found[] = {1, VALUE};
    uint32_t results[MAX_WORDS];
    int port = atoi(argv[1]);
    CHECK(call(port, KV_PUT, 0, entry, 5, results) == 0);
    CHECK(call(port, KV_GET, 1, key, 2, results) == 4 && !memcmp(results, found, sizeof found));
    printf("an empty Write chunk is returned, and the value is inline\n");
    return 0;
}
