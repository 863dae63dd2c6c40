// CHECK: unless its condition holds, prints the condition and the library's last failure, and exits with status 1.

#ifndef TEST_CHECK_H
#define TEST_CHECK_H

#include <rpcrdma.h>
#include <stdio.h>
#include <stdlib.h>

// A request with these fields.
#define REQUEST(...)                                                                                                   \
    (rpcrdma_request) {                                                                                                \
        .size = sizeof(rpcrdma_request), __VA_ARGS__                                                                   \
    }

#define CHECK(x)                                                                                                       \
    do                                                                                                                 \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, rpcrdma_error());                               \
            exit(1);                                                                                                   \
        }                                                                                                              \
    while (0)

#endif
