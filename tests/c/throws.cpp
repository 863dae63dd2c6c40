// An exception that leaves a callback ends the process, because it must not pass through the library.
//
//   throws done|handler|task|release|peers ADDRESS
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <rpcrdma.h>
#include <sys/mman.h>

#define CHECK(x)                                                                                                       \
    do                                                                                                                 \
        if (!(x)) {                                                                                                    \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, rpcrdma_error());                          \
            std::_Exit(1);                                                                                             \
        }                                                                                                              \
    while (0)

static const char *throwing_callback;

static void throw_if_at(const char *name) {
    if (!std::strcmp(throwing_callback, name))
        throw 1;
}

static int handler(void *, rpcrdma_call *, const void *, size_t, void *, size_t *) {
    throw_if_at("handler");
    return 0;
}

static int task(void *, unsigned) {
    throw_if_at("task");
    return 0;
}

static void peers(void *, const rpcrdma_peer_event *) {
    throw_if_at("peers");
}

static void release(void *) {
    throw_if_at("release");
}

static void done(void *context, const rpcrdma_completion *) {
    throw_if_at("done");
    *static_cast<bool *>(context) = true;
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    throwing_callback = argv[1];
    try {
        void *memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED);
        CHECK(!rpcrdma_free(rpcrdma_arena_new(memory, 4096, release, nullptr)));
        rpcrdma_config *config = rpcrdma_config_new();
        CHECK(config && !rpcrdma_config_set(config, "prefault", "false"));
        rpcrdma_procedure procedure = {};
        procedure.number = 1;
        procedure.handler = handler;
        rpcrdma_services *services = rpcrdma_services_new();
        CHECK(services && !rpcrdma_services_add(services, 0x20000001, 1, &procedure, 1, sizeof procedure));
        CHECK(!rpcrdma_services_task(services, task, nullptr, nullptr));
        CHECK(!rpcrdma_services_peers(services, peers, nullptr));
        CHECK(rpcrdma_server_start(argv[2], services, config));
        rpcrdma_local_client *client = rpcrdma_local_client_connect(argv[2], 0x20000001, 1, config);
        CHECK(client);
        rpcrdma_request request = {};
        request.size = sizeof request, request.procedure = 1;
        bool is_done = false;
        CHECK(!rpcrdma_local_client_start(client, &request, nullptr));
        while (!is_done)
            CHECK(rpcrdma_local_client_poll(client, done, &is_done) >= 0);
    } catch (int) {
        std::puts("caught");
        std::_Exit(2);
    }
    std::puts("nothing thrown");
    std::_Exit(3);
}
