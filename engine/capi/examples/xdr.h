// XDR (RFC 4506) functions of the examples: unsigned integers and opaque data.

#ifndef EXAMPLE_XDR_H
#define EXAMPLE_XDR_H

#include <stddef.h>
#include <stdint.h>

// Bytes that are decoded from the front.
struct xdr {
    const unsigned char *at;
    size_t left;
};

// Rounds a length up to whole words.
static inline size_t xdr_padded(size_t len) {
    return (len + 3) & ~(size_t)3;
}

static inline unsigned char *xdr_put_u32(unsigned char *to, uint32_t value) {
    for (int i = 0; i < 4; i++)
        to[i] = (unsigned char)(value >> (24 - 8 * i));
    return to + 4;
}

static inline unsigned char *xdr_put_u64(unsigned char *to, uint64_t value) {
    return xdr_put_u32(xdr_put_u32(to, (uint32_t)(value >> 32)), (uint32_t)value);
}

// Takes `len` bytes and their padding, in place. Returns NULL if there are fewer.
static inline const unsigned char *xdr_bytes(struct xdr *from, size_t len) {
    const unsigned char *at = from->at;
    // The first test avoids an overflow in xdr_padded.
    if (len > from->left || xdr_padded(len) > from->left)
        return NULL;
    from->at += xdr_padded(len);
    from->left -= xdr_padded(len);
    return at;
}

// Returns 0, or -1 if fewer than four bytes are left.
static inline int xdr_u32(struct xdr *from, uint32_t *value) {
    const unsigned char *at = xdr_bytes(from, 4);
    if (!at)
        return -1;
    *value = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
    return 0;
}

static inline int xdr_u64(struct xdr *from, uint64_t *value) {
    uint32_t high, low;
    if (xdr_u32(from, &high) || xdr_u32(from, &low))
        return -1;
    *value = (uint64_t)high << 32 | low;
    return 0;
}

// Takes opaque data of at most `max` bytes, in place. Returns 0, or -1 if the data is longer or incomplete.
static inline int xdr_opaque(struct xdr *from, size_t max, const unsigned char **data, uint32_t *len) {
    if (xdr_u32(from, len) || *len > max)
        return -1;
    *data = xdr_bytes(from, *len);
    return *data ? 0 : -1;
}

#endif
