// RAII wrappers of rpcrdma.h. Handles end with their owners, and failures are exceptions.

#ifndef RPCRDMA_HPP
#define RPCRDMA_HPP

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include <rpcrdma.h>

namespace rpcrdma {

// A function of the library has failed: its text, and its negative code (0 of those that return a pointer).
struct Error : std::runtime_error {
    explicit Error(int code = 0) : std::runtime_error(rpcrdma_error()), code(code) {}
    int code;
};

inline int check(int result) { return result < 0 ? throw Error(result) : result; }
template <class T> T *check(T *handle) { return handle ? handle : throw Error(); }

struct Free {
    void operator()(void *handle) const noexcept { rpcrdma_free(handle); }
};
template <class T> using Handle = std::unique_ptr<T, Free>;

// Knobs, by the names of tuning.md.
struct Config {
    Handle<rpcrdma_config> handle{check(rpcrdma_config_new())};

    Config &set(const char *name, const std::string &value) {
        check(rpcrdma_config_set(handle.get(), name, value.c_str()));
        return *this;
    }
};

// Memory of a chunk.
struct Buffer {
    Handle<rpcrdma_buffer> handle;

    explicit Buffer(rpcrdma_buffer *buffer) : handle(check(buffer)) {}
    char *data() { return static_cast<char *>(check(rpcrdma_buffer_data(handle.get(), nullptr))); }
    std::string_view bytes() {
        std::size_t len = 0;
        auto *data = static_cast<char *>(check(rpcrdma_buffer_data(handle.get(), &len)));
        return {data, len};
    }
};

// The reply of a call.
struct Reply {
    Handle<rpcrdma_reply> handle;

    // The inline results, valid as long as the reply.
    std::string_view results() {
        std::size_t len = 0;
        auto *results = static_cast<const char *>(check(rpcrdma_reply_results(handle.get(), &len)));
        return {results, len};
    }
    Buffer take_write_chunk(unsigned index) { return Buffer(rpcrdma_reply_take(handle.get(), 1, index)); }
};

// A call that is built.
struct Request {
    Handle<rpcrdma_request> handle;

    Request(std::uint32_t procedure, std::string_view args)
        : handle(check(rpcrdma_request_new(procedure, args.data(), args.size()))) {}
    void timeout(int milliseconds) { check(rpcrdma_request_limits(handle.get(), milliseconds, 0)); }
    void read_chunk(std::size_t position, Buffer data) {
        check(rpcrdma_request_read_chunk(handle.get(), position, data.handle.release()));
    }
    void write_chunk(std::uint32_t len) { check(rpcrdma_request_write_chunk(handle.get(), nullptr, len)); }
};

// A client whose calls block. One thread at a time uses it.
struct Client {
    Handle<rpcrdma_client> handle;

    Client(const char *address, std::uint32_t program, std::uint32_t version, const Config &config)
        : handle(check(rpcrdma_client_connect(address, program, version, config.handle.get()))) {}
    Buffer alloc(std::size_t len) { return Buffer(rpcrdma_alloc(handle.get(), len)); }
    Reply call(Request request) {
        rpcrdma_reply *reply = nullptr;
        int error = rpcrdma_client_call(handle.get(), request.handle.release(), &reply);
        Reply owner{Handle<rpcrdma_reply>(reply)};
        check(error);
        return owner;
    }
};

} // namespace rpcrdma

#endif
