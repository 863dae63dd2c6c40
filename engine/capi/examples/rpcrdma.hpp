// RAII wrappers of rpcrdma.h. Handles are freed with their owners, and failures are exceptions.

#ifndef RPCRDMA_HPP
#define RPCRDMA_HPP

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <rpcrdma.h>

namespace rpcrdma {

// Failure of a function of the library: its text, and its negative code, or 0 if the function returns a pointer.
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

// Knobs, named as in tuning.md.
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
    Buffer take_write_chunk(unsigned index) { return Buffer(rpcrdma_reply_take_write_chunk(handle.get(), index)); }
};

// A call to make.
struct Request {
    std::uint32_t procedure;
    std::string args;
    int timeout = 0; // Milliseconds; 0: none.
    std::vector<rpcrdma_read_chunk> read_chunks = {}; // Their data must outlive the call.
    std::vector<rpcrdma_write_chunk> write_chunks = {};
};

// A client whose calls block. One thread at a time uses it.
struct Client {
    Handle<rpcrdma_client> handle;

    Client(const char *address, std::uint32_t program, std::uint32_t version, const Config &config)
        : handle(check(rpcrdma_client_connect(address, program, version, config.handle.get()))) {}
    Reply call(const Request &request) {
        rpcrdma_request call{};
        call.size = sizeof call, call.procedure = request.procedure;
        call.args = request.args.data(), call.args_len = request.args.size();
        call.read_chunks = request.read_chunks.data(), call.read_count = request.read_chunks.size();
        call.write_chunks = request.write_chunks.data(), call.write_count = request.write_chunks.size();
        call.timeout = request.timeout;
        rpcrdma_reply *reply = nullptr;
        int error = rpcrdma_client_call(handle.get(), &call, &reply);
        Reply owner{Handle<rpcrdma_reply>(reply)};
        check(error);
        return owner;
    }
};

} // namespace rpcrdma

#endif
