// Concurrent clients of a key-value store, each with a connection and keys of its own.
//
//   kv_client ADDRESS fill SEED      puts values, and verifies them
//   kv_client ADDRESS verify SEED    verifies the values
//   kv_client ADDRESS forever SEED   puts values until it or the server ends; prints `begun` after the first values
//
// Protocol: tests/embed/kv.x. The client kv-client uses the same keys and values, so each client can verify the values
// of the other.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "rpcrdma.hpp"
#include "xdr.h"

namespace {

constexpr std::uint32_t PROGRAM = 0x20004b56, VERSION = 1;
constexpr std::uint32_t GET = 1, PUT = 2, DELETE = 3, LIST = 4;
constexpr std::uint32_t MAX_VALUE = 262144;
// Longest value that travels in the message of its PUT, in bytes.
constexpr std::size_t MAX_INLINE = 256;
// Time-out of a call in milliseconds.
constexpr int TIMEOUT = 30000;
// Clients of one process, and keys of each.
constexpr std::uint32_t CLIENTS = 6, KEYS = 40;

void append_word(std::string &to, std::size_t word) {
    unsigned char bytes[4];
    xdr_put_u32(bytes, static_cast<std::uint32_t>(word));
    to.append(bytes, bytes + 4);
}

void append_opaque(std::string &to, const std::string &data) {
    append_word(to, data.size());
    to += data;
    to.append(xdr_padded(data.size()) - data.size(), '\0');
}

// Results that are decoded from the front.
class Results {
public:
    explicit Results(std::string_view bytes)
        : from_{reinterpret_cast<const unsigned char *>(bytes.data()), bytes.size()} {}
    std::uint32_t word() {
        std::uint32_t word = 0;
        return xdr_u32(&from_, &word) ? throw bad() : word;
    }
    std::string bytes(std::size_t len) {
        const unsigned char *data = xdr_bytes(&from_, len);
        return data ? std::string(data, data + len) : throw bad();
    }
    bool at_end() const { return from_.left == 0; }
    void end() const { return at_end() ? void() : throw bad(); }

private:
    static std::runtime_error bad() { return std::runtime_error("results of the wrong type"); }
    xdr from_;
};

// A connection to a store.
class Store {
public:
    explicit Store(const char *address) : client_(address, PROGRAM, VERSION, config()) {}

    void put(const std::string &key, const std::string &value) {
        std::string args;
        append_opaque(args, key);
        if (value.size() <= MAX_INLINE) {
            append_opaque(args, value);
            return Results(call({PUT, args}).results()).end();
        }
        append_word(args, value.size());
        rpcrdma::Request request{PUT, args};
        request.read_chunks.push_back({args.size(), nullptr, value.data(), value.size()});
        Results(call(request).results()).end();
    }

    std::optional<std::string> get(const std::string &key) {
        std::string args;
        append_opaque(args, key);
        rpcrdma::Request request{GET, args};
        request.write_chunks.push_back({nullptr, MAX_VALUE});
        rpcrdma::Reply reply = call(request);
        Results results(reply.results());
        if (!results.word())
            return results.end(), std::nullopt;
        std::uint32_t len = results.word();
        // If the value is in the chunk, only its length is in the message.
        if (len == 0 || !results.at_end())
            return results.bytes(len);
        rpcrdma::Buffer value = reply.take_write_chunk(0);
        return std::string(value.bytes());
    }

    bool remove(const std::string &key) {
        std::string args;
        append_opaque(args, key);
        return Results(call({DELETE, args}).results()).word() != 0;
    }

    // Keys with this prefix, in order.
    std::vector<std::string> list(const std::string &prefix) {
        std::vector<std::string> names;
        for (bool more = true; more;) {
            std::string args;
            append_opaque(args, prefix);
            append_opaque(args, names.empty() ? "" : names.back());
            rpcrdma::Reply reply = call({LIST, args});
            Results page(reply.results());
            for (std::uint32_t count = page.word(); count > 0; count--)
                names.push_back(page.bytes(page.word()));
            more = page.word() != 0;
        }
        return names;
    }

private:
    static rpcrdma::Config config() {
        rpcrdma::Config config;
        config.set("memory.bulk_buffers", "[[16384, 8], [262144, 4]]");
        return config;
    }
    rpcrdma::Reply call(rpcrdma::Request request) {
        request.timeout = TIMEOUT;
        return client_.call(request);
    }
    rpcrdma::Client client_;
};

// Value of a key: unique, of varying length.
std::string value(std::uint32_t seed, std::uint32_t client, std::uint32_t key) {
    constexpr std::uint32_t limits[] = {0, 200, 5000, 16 << 10, 256 << 10};
    std::uint64_t state = std::uint64_t(seed) << 40 | std::uint64_t(client) << 20 | key;
    auto next = [&state] {
        state = state * 6364136223846793005 + 1442695040888963407;
        return static_cast<std::uint32_t>(state >> 33);
    };
    std::uint32_t len = next(), limit = limits[key % 5];
    std::string bytes(limit ? len % limit + 1 : 0, '\0');
    for (char &byte : bytes)
        byte = static_cast<char>(next());
    return bytes;
}

std::string name(std::uint32_t seed, std::uint32_t client, std::uint32_t key) {
    char text[64];
    std::snprintf(text, sizeof text, "%u/%u/%04u", seed, client, key);
    return text;
}

// False for every seventh key, which is deleted.
bool is_kept(std::uint32_t key) { return key % 7 != 3; }

void verify(Store &store, std::uint32_t seed, std::uint32_t client) {
    std::vector<std::string> names;
    for (std::uint32_t key = 0; key < KEYS; key++) {
        std::optional<std::string> expected;
        if (is_kept(key)) {
            expected = value(seed, client, key);
            names.push_back(name(seed, client, key));
        }
        if (store.get(name(seed, client, key)) != expected)
            throw std::runtime_error("wrong value: " + name(seed, client, key));
    }
    if (store.list(std::to_string(seed) + "/" + std::to_string(client) + "/") != names)
        throw std::runtime_error("the list has other names");
}

void fill(Store &store, std::uint32_t seed, std::uint32_t client) {
    for (std::uint32_t key = 0; key < KEYS; key++) {
        std::string at = name(seed, client, key);
        // The second put replaces the first.
        store.put(at, value(seed, client, key + 1));
        store.put(at, value(seed, client, key));
        if (!is_kept(key) && (!store.remove(at) || store.remove(at)))
            throw std::runtime_error("delete: " + at);
    }
    verify(store, seed, client);
}

void forever(Store &store, std::uint32_t seed, std::uint32_t client) {
    for (std::uint32_t key = 0;; key++) {
        store.put(name(seed, client, key % KEYS), value(seed, client, key));
        if (key == 10 && client == 0) {
            std::puts("begun");
            std::fflush(stdout);
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    const std::string what = argc == 4 ? argv[2] : "";
    auto *run = what == "fill" ? fill : what == "verify" ? verify : what == "forever" ? forever : nullptr;
    if (!run) {
        std::fputs("usage: kv_client ADDRESS fill|verify|forever SEED\n", stderr);
        return 2;
    }
    try {
        auto seed = static_cast<std::uint32_t>(std::stoul(argv[3]));
        std::vector<std::future<void>> clients;
        for (std::uint32_t client = 0; client < CLIENTS; client++)
            clients.push_back(std::async(std::launch::async, [=] {
                Store store(argv[1]);
                run(store, seed, client);
            }));
        for (auto &client : clients)
            client.get();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "kv_client: %s\n", error.what());
        return 1;
    }
    return 0;
}
