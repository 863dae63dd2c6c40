// A client for one call of RPC-over-RDMA version 1 over iWARP (RFC 5044, 5041, 5040). It can send messages that the
// library's clients never send.

#ifndef TEST_RAW_PEER_H
#define TEST_RAW_PEER_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"

// Returns an unused port of 127.0.0.1.
static inline int free_port(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0 && !bind(fd, (struct sockaddr *)&at, sizeof at) && !getsockname(fd, (struct sockaddr *)&at, &len));
    CHECK(!close(fd));
    return ntohs(at.sin_port);
}

static inline void raw_receive(int fd, void *to, size_t len) {
    for (char *at = to; len;) {
        ssize_t got = recv(fd, at, len, 0);
        CHECK(got > 0);
        at += got, len -= (size_t)got;
    }
}

static inline uint32_t raw_crc32c(const unsigned char *bytes, size_t len) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < len; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
    }
    return ~crc;
}

// Connects to a server. Sets `*crc` to true if the server requires CRCs.
static inline int raw_connect(int port, int *crc) {
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0 && !connect(fd, (struct sockaddr *)&to, sizeof to));
    // CRC, revision 1, and 8 bytes of private data: the inline thresholds (RFC 8797).
    static const unsigned char request[] = "MPA ID Req Frame\x40\x01\x00\x08\xf6\xab\x0e\x18\x01\x00\x03\x03";
    CHECK(send(fd, request, 28, 0) == 28);
    unsigned char reply[20], data[512];
    raw_receive(fd, reply, sizeof reply);
    CHECK(!memcmp(reply, "MPA ID Rep Frame", 16) && !(reply[16] & 0x20));
    raw_receive(fd, data, (size_t)(reply[18] << 8 | reply[19]));
    *crc = (reply[16] & 0x40) != 0;
    return fd;
}

// Sends `count` words as the first message. Stores at most `max_words` words of the answer, and returns their number.
// Skips RDMA Writes.
static inline size_t raw_exchange(int fd, int crc, const uint32_t *words, size_t count, uint32_t *answer,
                                  size_t max_words) {
    unsigned char frame[2048] = {0};
    // Send, last segment, queue 0, message 1.
    static const unsigned char header[18] = {0x41, 0x43, [13] = 1};
    size_t len = sizeof header + 4 * count, padded = (2 + len + 3) / 4 * 4, got = 0;
    CHECK(padded + 4 <= sizeof frame);
    frame[0] = (unsigned char)(len >> 8), frame[1] = (unsigned char)len;
    memcpy(frame + 2, header, sizeof header);
    for (size_t i = 0; i < count; i++) {
        uint32_t word = htonl(words[i]);
        memcpy(frame + 2 + sizeof header + 4 * i, &word, 4);
    }
    uint32_t sum = crc ? raw_crc32c(frame, padded) : 0;
    for (int i = 0; i < 4; i++)
        frame[padded + (size_t)i] = (unsigned char)(sum >> 8 * i);
    CHECK(send(fd, frame, padded + 4, 0) == (ssize_t)padded + 4);
    for (int is_last = 0; !is_last;) {
        unsigned char size[2], received[65536 + 8];
        raw_receive(fd, size, 2);
        size_t bytes = (size_t)(size[0] << 8 | size[1]);
        raw_receive(fd, received, (2 + bytes + 3) / 4 * 4 - 2 + 4);
        if (received[0] & 0x80)
            continue;
        CHECK((received[1] & 15) != 7); // Terminate.
        for (size_t at = sizeof header; at < bytes && got < max_words; at += 4) {
            uint32_t word;
            memcpy(&word, received + at, 4);
            answer[got++] = ntohl(word);
        }
        is_last = received[0] & 0x40;
    }
    return got;
}

#endif
