// Functions of all examples: failures, and knobs from options.

#ifndef EXAMPLE_EXAMPLE_H
#define EXAMPLE_EXAMPLE_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rpcrdma.h>

static _Noreturn void die(const char *what, const char *why) {
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, why);
    exit(1);
}

static inline void set(rpcrdma_config *config, const char *name, const char *value) {
    if (rpcrdma_config_set(config, name, value))
        die("configuration", rpcrdma_error());
}

// Sets the knob that an option's argument names: `KNOB=VALUE`.
static inline void set_knob(rpcrdma_config *config, char *argument) {
    char *value = strchr(argument, '=');
    if (!value)
        die(argument, "expected KNOB=VALUE");
    *value = '\0';
    set(config, argument, value + 1);
}

// Parses an option's argument, a whole number from `min` to `max`.
static inline unsigned long number(const char *argument, unsigned long min, unsigned long max) {
    char *end;
    errno = 0;
    unsigned long value = strtoul(argument, &end, 10);
    if (errno || end == argument || *end || value < min || value > max) {
        fprintf(stderr, "%s: %s: expected %lu to %lu\n", program_invocation_short_name, argument, min, max);
        exit(1);
    }
    return value;
}

#endif
