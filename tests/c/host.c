// A host program that loads the library by dlopen, blocks signals, ignores SIGPIPE, has no standard input and output,
// forks, and unloads the library.
//
//   host LIBRARY
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <rpcrdma.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static FILE *out;

#define CHECK(x)                                                                                                       \
    do                                                                                                                 \
        if (!(x)) {                                                                                                    \
            fprintf(out, "%s:%d: %s\n", __FILE__, __LINE__, #x);                                                       \
            fflush(out);                                                                                               \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    while (0)

#define FUNCTIONS(F)                                                                                                   \
    F(rpcrdma_config_new) F(rpcrdma_config_set) F(rpcrdma_services_new) F(rpcrdma_services_add) F(rpcrdma_server_start) \
    F(rpcrdma_server_drain) F(rpcrdma_client_connect) F(rpcrdma_client_call) F(rpcrdma_error)                           \
    F(rpcrdma_reply_results) F(rpcrdma_free)

static struct {
#define F(name) __typeof__(name) *name;
    FUNCTIONS(F)
#undef F
} lib;

static int succeed(void *context, rpcrdma_call *call, const void *args, size_t len, void *results,
                   size_t *results_len) {
    (void)context, (void)call, (void)args, (void)len, (void)results, (void)results_len;
    return 0;
}

static void use_library(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library);
#define F(name) CHECK(*(void **)&lib.name = dlsym(library, #name));
    FUNCTIONS(F)
#undef F
    const rpcrdma_procedure table[] = {{.number = 1, .handler = succeed}};
    rpcrdma_config *config = lib.rpcrdma_config_new();
    CHECK(config && !lib.rpcrdma_config_set(config, "poll.idle", "event"));
    CHECK(!lib.rpcrdma_config_set(config, "prefault", "false"));
    rpcrdma_services *services = lib.rpcrdma_services_new();
    CHECK(services && !lib.rpcrdma_services_add(services, 0x20000001, 1, table, 1, sizeof *table));
    rpcrdma_server *server = lib.rpcrdma_server_start("iwarp:127.0.0.1:20987", services, config);
    CHECK(server);
    rpcrdma_client *client = lib.rpcrdma_client_connect("iwarp:127.0.0.1:20987", 0x20000001, 1, config);
    CHECK(client);
    static const rpcrdma_request request = {.size = sizeof request, .procedure = 1};
    CHECK(!lib.rpcrdma_client_call(client, &request, NULL));
    // The library has opened /dev/null in place of the closed standard descriptors, so that no printed text reaches a
    // peer.
    for (int fd = 0; fd < 3; fd++)
        CHECK(!isatty(fd) && lseek(fd, 0, SEEK_CUR) == 0);
    // A forked child has the handles, but not the library's threads, so their use fails.
    pid_t child = fork();
    if (!child)
        _exit(lib.rpcrdma_client_call(client, NULL, NULL) != -EPERM || lib.rpcrdma_free(server) != -EPERM);
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    // The server ends first. The end of the client's connection must cause no SIGPIPE.
    CHECK(!lib.rpcrdma_server_drain(server, 1000));
    rpcrdma_reply *reply = NULL;
    CHECK(lib.rpcrdma_client_call(client, &request, &reply) < 0 && *lib.rpcrdma_error());
    CHECK(!lib.rpcrdma_free(reply) && !lib.rpcrdma_free(client));
    CHECK(!lib.rpcrdma_free(services) && !lib.rpcrdma_free(config));
    CHECK(!dlclose(library));
}

int main(int argc, char **argv) {
    out = fdopen(fcntl(1, F_DUPFD_CLOEXEC, 100), "w");
    if (argc != 2 || !out)
        return 2;
    for (int fd = 0; fd < 3; fd++)
        close(fd);
    sigset_t all;
    sigfillset(&all);
    CHECK(!sigprocmask(SIG_SETMASK, &all, NULL));
    CHECK(signal(SIGPIPE, SIG_IGN) != SIG_ERR);
    for (int round = 0; round < 3; round++)
        use_library(argv[1]);
    fprintf(out, "3 rounds\n");
    return fclose(out) != 0;
}
