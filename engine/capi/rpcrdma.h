// ONC RPC over RDMA (RFC 8166), protocol versions 1 and 2.
//
// The comment of a function has these sections, in this order: its purpose, Parameters, Ownership (who frees or keeps
// which memory), Threads (which thread may call it), Returns, and Safety (what the caller ensures because the library
// cannot check it).
//
// # Return values
// A function that returns int returns 0 or a count, or after a failure a negative code of errno.h. A function that
// returns a pointer returns NULL after a failure, and sets errno to the code. `rpcrdma_error` has the text. A result
// that a function writes through a pointer is not stored if that pointer is NULL. EIO is an I/O error of the device, or
// a defect of this library, which the log names.
//
// # Handles and their codes
// A handle is a pointer to one of the opaque types below. Each function that takes one may fail with a handle code, in
// addition to the codes that its own comment lists:
// - EINVAL: the handle is NULL.
// - EBADF: the handle was freed or is of another kind, as far as that can be detected.
// - EBUSY: another function uses the handle.
// - EPERM: the handle is a polled server or client of another thread.
//
// # Threads
// A thread that calls this library must have a stack of at least 128 KiB, and must not be cancelled (pthread_cancel)
// during the call: the process would end. The threads of servers and clients inherit the signal mask of the thread that
// starts them, so a program that takes signals by signalfd must block them first. A shard is a thread of a server, or
// the thread that polls it, with a device and connections of its own.
//
// # Processes
// No function unwinds, and none may be called in a signal handler. A child of fork may exec or _exit: once the process
// has had a server or client, functions fail in the child with EPERM. Until the child execs or ends, it keeps the
// connections of its parent open, even after the parent has ended. When a server or client starts, closed descriptors 0
// to 2 become /dev/null, so that printed text does not go to a peer. If the heap cannot grow (`ulimit -v`), the process
// ends.

#ifndef RPCRDMA_H
#define RPCRDMA_H

#include <stddef.h>
#include <stdint.h>


// The procedure runs on workers, so its handler may block. `server.workers` (default 0) must be at least 1.
#define RPCRDMA_ON_WORKERS 1

// Calls of the procedure have a duplicate request cache.
//
// A call that is retransmitted to the same server does not run again. A new server process starts with an empty
// cache. The cache identifies a client by its host and its credential (`client.auth_sys`). Each client of this library
// has its own stamp in the credential, so that two clients of one process are distinct. Calls without a credential run
// again. A cached procedure has no Write chunks. The cache has the default sizes of `DuplicateRequestCacheConfig` in
// `tuning.md`, which C cannot change.
#define RPCRDMA_CACHED 2

// Calls have no reply, and end once they are sent.
//
// The caller does not learn whether such a call has run. The procedure and the request both need the flag: without it
// in the request, the call ends only by its time-out. One-way calls with chunks end with EINVAL and are not sent, and
// so do all one-way calls on a connection of version 1, which does not have them.
#define RPCRDMA_ONE_WAY 4

// Write chunks are filled from the application's memory (`rpcrdma_call_result`), not the library's.
#define RPCRDMA_OWN_RESULTS 8

// The inline arguments have no length word for an argument in a Read chunk.
//
// Without this flag, the library compares the length word before each Read chunk's position with the length of the
// chunk, and refuses a call with GARBAGE_ARGS if they differ.
#define RPCRDMA_UNCOUNTED 16

// `PROG_UNAVAIL` of RFC 5531 §9: the server does not have the program.
#define RPCRDMA_PROG_UNAVAIL 1

// `PROG_MISMATCH`: the server has other versions of the program. Only in replies.
#define RPCRDMA_PROG_MISMATCH 2

// `PROC_UNAVAIL`: the program does not have the procedure.
#define RPCRDMA_PROC_UNAVAIL 3

// `GARBAGE_ARGS`: the arguments cannot be decoded.
#define RPCRDMA_GARBAGE_ARGS 4

// `SYSTEM_ERR`: the server has failed.
#define RPCRDMA_SYSTEM_ERR 5

// The call has no reply; for procedures with `RPCRDMA_ONE_WAY`.
//
// Other procedures refuse the call with `SYSTEM_ERR`.
#define RPCRDMA_NO_REPLY 6

// `AUTH_ERROR`: add the `auth_stat` of RFC 5531 §9, 0 to 255.
//
// A larger sum is `SYSTEM_ERR`.
#define RPCRDMA_AUTH_ERROR 256

// Memory that the application has mapped.
//
// Any number of threads may use it concurrently.
typedef struct rpcrdma_arena rpcrdma_arena;

// Memory of a chunk, registered with the device.
//
// One thread at a time uses it.
typedef struct rpcrdma_buffer rpcrdma_buffer;

// A call at the server.
//
// Only the handler of a call may use it. A deferred call may be used by any thread, one at a time.
typedef struct rpcrdma_call rpcrdma_call;

// A client whose connection runs on a background thread.
//
// The client has this thread for itself, or shares a server's. One application thread at a time uses the client.
typedef struct rpcrdma_client rpcrdma_client;

// Knobs of servers and clients, named as in `tuning.md`.
//
// One thread at a time uses it.
typedef struct rpcrdma_config rpcrdma_config;

// A client that the application polls.
//
// Only its thread uses it: the one that made it, or that got it by `rpcrdma_attach`.
typedef struct rpcrdma_local_client rpcrdma_local_client;

// A server that the application polls.
//
// Only its thread uses it: the one that made it, or that got it by `rpcrdma_attach`.
typedef struct rpcrdma_local_server rpcrdma_local_server;

// The reply of a call.
//
// One thread at a time uses it.
typedef struct rpcrdma_reply rpcrdma_reply;

// A server with threads of its own.
//
// Any number of threads may use it concurrently.
typedef struct rpcrdma_server rpcrdma_server;

// Procedures of a server, or of a client that takes calls.
//
// One thread at a time uses it.
typedef struct rpcrdma_services rpcrdma_services;

// Runs a call, and answers it with its return value.
//
// No exception of C++ may leave the handler: the process would end.
//
// # Parameters
// - `context`: `context` of the procedure.
// - `call`: the call.
// - `args`, `args_len`: the inline arguments, in place.
// - `results`: room for at least `max_reply` bytes of inline results, which are not initialized.
// - `results_len`: 0 at first. The handler writes all inline results at `results`, and stores their number of bytes
//   here. The number must be a multiple of 4, as XDR requires: pad with zeroes, or the caller gets SYSTEM_ERR. A
//   handler that uses `rpcrdma_call_reply` leaves the number 0.
//
// # Ownership
// The call, its arguments and the room for results are valid until the handler returns.
//
// # Threads
// The handler runs on a shard, or on a worker with `RPCRDMA_ON_WORKERS`. Several threads may run it concurrently.
//
// # Returns
// - 0: the results are complete. But if a function failed to write a part of the results, and no later function wrote
//   that part, 0 is treated as the failed function's code.
// - an `RPCRDMA_` status: refuses the call with it.
// - -EMSGSIZE, if the last function that failed to write results of this call returned it because the caller's Write
//   chunk is shorter than a result that `max_write` allows: the caller gets a transport error. In version 2 its client
//   retransmits the call with a longer chunk; in version 1 the call fails with EPROTO.
// - -ENOENT, if that function returned it because the caller does not offer a Write chunk that the procedure declares:
//   the caller gets GARBAGE_ARGS.
// - any other negative code, including one that no such function returned: the caller gets SYSTEM_ERR, and the log has
//   the cause, or the code.
// - any other number: the caller gets SYSTEM_ERR, and the log has the number.
typedef int (*rpcrdma_handler)(void *context,
                               rpcrdma_call *call,
                               const void *args,
                               size_t args_len,
                               void *results,
                               size_t *results_len);

// Takes a call that `rpcrdma_call_answer` answers, now or later.
//
// # Parameters
// - `context`: `context` of the procedure.
// - `call`: the call.
// - `args`, `args_len`: the inline arguments, in place.
//
// # Ownership
// The call is the application's, with its arguments, until `rpcrdma_call_answer`.
//
// # Threads
// The handler runs on a shard, and must not block. Any thread may answer the call.
typedef void (*rpcrdma_deferred_handler)(void *context, rpcrdma_call *call, const void *args, size_t args_len);

// A procedure of a table.
//
// For example `{.number = 1, .handler = get, .max_reply = 16}`. A procedure has either a handler or a deferred
// handler. All other fields may be 0.
typedef struct {
    // Procedure number.
    uint32_t number;
    // `RPCRDMA_ON_WORKERS` and other flags of procedures, or 0.
    uint32_t flags;
    // Answers a call by its return value.
    rpcrdma_handler handler;
    // Answers a call later.
    rpcrdma_deferred_handler deferred;
    // First argument of the handler. Any thread may use it.
    void *context;
    // Bytes that the inline results of a reply may have, up to 1 GiB; 0 means 256. The library may provide more room.
    size_t max_reply;
    // Maximum Read chunks of a call, up to 4. They are its eligible arguments (RFC 8166 §6).
    uint32_t read_chunks;
    // Maximum Write chunks of a call, up to 4. They are its eligible results.
    uint32_t write_chunks;
    // Maximum bytes of a Read chunk: up to 1 GiB, or with `reads_into` 4 GiB less 1.
    size_t max_read;
    // Maximum bytes of a Write chunk: up to 1 GiB, or with `RPCRDMA_OWN_RESULTS` 4 GiB less 1.
    size_t max_write;
    // Memory for the data of Read chunks, or NULL for the library's.
    //
    // The memory is divided into places of `max_read` bytes, rounded up to a multiple of 4096. A place is free again
    // once the call of its chunk is answered, and the buffer that took the chunk is freed. While no place is free,
    // chunks arrive in the library's memory.
    rpcrdma_arena *reads_into;
} rpcrdma_procedure;

// Does work on a shard's thread, in each turn of the shard.
//
// The task must not block.
//
// # Parameters
// - `context`: the argument of `rpcrdma_services_task`.
// - `shard`: the number of the shard.
//
// # Returns
// - 0: there was no work.
// - any other number: there was work.
typedef int (*rpcrdma_task)(void *context, unsigned int shard);

// The beginning or the end of a client's connection to a server.
typedef struct {
    // Bytes that this version of the library has written, as in `rpcrdma_completion`.
    size_t size;
    // Number of the connection, as in `rpcrdma_call_info`: unique for this shard of this server.
    uint64_t connection;
    // The peer, as `rpcrdma_call_peer` writes it.
    //
    // With `wire.host_key`, a connection begins before its peer has proven its identity: then this text is the IP
    // address at the beginning, and the identity at the end.
    const char *peer;
    // Why the connection has ended; NULL if it has begun.
    const char *reason;
    // Number of the shard, as in `rpcrdma_call_info`.
    unsigned int shard;
} rpcrdma_peer_event;

// Reports that a connection to a server has begun or ended.
//
// The hook reports the beginning before the first call of the connection, and the end once, after its last handler.
// Deferred calls may still be open, and `rpcrdma_call_is_disconnected` is 1 for them. The hook may answer calls. The
// end of the server ends all connections: `rpcrdma_free` waits for these reports, and so does `rpcrdma_server_drain`
// unless it times out.
//
// # Parameters
// - `context`: the argument of `rpcrdma_services_peers`.
// - `event`: the connection, and why it has ended.
//
// # Ownership
// The event is valid until the function returns.
//
// # Threads
// The hook runs on the shard, or on a worker while the server ends, and must not block.
typedef void (*rpcrdma_peer_hook)(void *context, const rpcrdma_peer_event *event);

// The header of a call.
typedef struct {
    // Transaction ID.
    uint32_t xid;
    // Program number.
    uint32_t program;
    // Program version.
    uint32_t version;
    // Procedure number.
    uint32_t procedure;
    // Number of Read chunks of the call.
    uint32_t read_chunks;
    // Shard that took the call, as the task of `rpcrdma_services_task` gets it; 0 if there is only one.
    uint32_t shard;
    // Flavor of the credential (RFC 5531 §8.2).
    uint32_t credential_flavor;
    // Body of the credential, in place.
    const void *credential;
    // Bytes at `credential`.
    size_t credential_len;
    // Inline arguments, in place.
    const void *args;
    // Bytes at `args`.
    size_t args_len;
    // Number of the connection: no other connection of `shard` has had it.
    uint64_t connection;
} rpcrdma_call_info;

// A Read chunk: an argument that the server reads by RDMA.
//
// A chunk of 0 bytes is refused with EINVAL.
typedef struct {
    // Offset of the argument in the unreduced arguments, in bytes. The bytes of earlier chunks count.
    size_t position;
    // A buffer of `rpcrdma_alloc` whose bytes are the argument, without XDR round-up. NULL: `data` is copied.
    rpcrdma_buffer *buffer;
    // Bytes to be copied to the client's memory, if `buffer` is NULL.
    const void *data;
    // Bytes at `data`.
    size_t len;
} rpcrdma_read_chunk;

// A Write chunk: room for a result that the server writes by RDMA.
//
// The chunk is for the next eligible result. A chunk of 0 bytes is refused with EINVAL.
typedef struct {
    // A buffer of `rpcrdma_alloc`. NULL: `len` bytes of the client's memory.
    rpcrdma_buffer *buffer;
    // Bytes of the chunk, if `buffer` is NULL.
    size_t len;
} rpcrdma_write_chunk;

// A call to make.
//
// For example `{.size = sizeof(rpcrdma_request), .procedure = 1, .args = &number, .args_len = sizeof number}`, or in
// C++17 `rpcrdma_request q{}; q.size = sizeof q;`. All fields but `size` may be 0.
//
// # Ownership
// The functions that take a request copy it and the arguments. If the call starts, they also take the buffers of its
// chunks, and the handles of these buffers become invalid. After the call, `rpcrdma_reply_take_read_chunk` and
// `rpcrdma_reply_take_write_chunk` return the buffers. The exception is a call of version 2 that the library
// retransmits because the server accepts no chunks or fewer Read chunks, or wants a longer Write chunk: the lent
// buffers return to the pool, and the results are in other buffers.
typedef struct {
    // `sizeof(rpcrdma_request)`.
    //
    // Later versions of this library have more fields at the end, and take requests of earlier versions. This version
    // takes requests of later versions if the further fields are 0.
    size_t size;
    // Procedure number.
    uint32_t procedure;
    // `RPCRDMA_ONE_WAY`, or 0.
    uint32_t flags;
    // A number that the completion of the call repeats.
    uint64_t token;
    // XDR encoded arguments, without those in chunks.
    const void *args;
    // Bytes at `args`, a multiple of 4 as XDR requires.
    size_t args_len;
    // Read chunks, at most 4, in the order of their positions. All have buffers, or none has.
    const rpcrdma_read_chunk *read_chunks;
    // Number of Read chunks.
    size_t read_count;
    // Write chunks, at most 4, in the order of the results.
    const rpcrdma_write_chunk *write_chunks;
    // Number of Write chunks.
    size_t write_count;
    // Bytes to reserve for inline results. With 0, the results must fit into one message; 256 bytes always do.
    //
    // More may arrive, so check the length of the results.
    size_t max_reply;
    // Time-out in milliseconds; 0 or less: none.
    //
    // The thread that runs the connection ends the call. For a polled server that calls back, that is the
    // application's own thread, and the time-out comes with the next poll. A call that timed out or was cancelled
    // keeps its credit and the memory of its chunks until the server answers it, or the connection ends. The
    // connection ends after `timeouts.progress` in which such calls held all credits, or in which
    // `limits.max_abandoned` (32) of them were unanswered.
    int timeout;
} rpcrdma_request;

// A completed call.
typedef struct {
    // Bytes that this version of the library has written.
    //
    // A program that may run with an earlier version than it was built with compares this number with
    // `sizeof(rpcrdma_completion)`, because later versions have more fields at the end.
    size_t size;
    // `token` of the request.
    uint64_t token;
    // The inline results, in place. NULL for a call that has failed.
    const void *results;
    // Bytes at `results`.
    size_t results_len;
    // The reply. It holds the buffers of the chunks: take them (`rpcrdma_reply_take_read_chunk`) for the next call.
    rpcrdma_reply *reply;
    // 0, or a negative code, as `rpcrdma_client_call` returns it.
    int error;
} rpcrdma_completion;

// Reports a completed call.
//
// The function may start calls, and free the client. If it polls this client, completions that this poll finds are
// reported after the function returns.
// For a failed call, `rpcrdma_error` has its text here until another function fails. No exception of C++ may leave the
// function, nor pthread_exit: the process would end. Nor may longjmp leave it: the client would report no more calls.
//
// # Parameters
// - `context`: the argument of the poll.
// - `completion`: the completed call.
//
// # Ownership
// `completion`, its results and its reply are valid until the function returns. `rpcrdma_reply_keep` keeps the reply
// and its results longer.
//
// # Threads
// The function runs on the thread that polls the client, within the poll.
typedef void (*rpcrdma_done)(void *context, const rpcrdma_completion *completion);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Returns the version of the library, such as `0.1.0`.
//
// # Ownership
// The text is static.
//
// # Threads
// Any thread.
//
// # Returns
// The version; never NULL.
const char *rpcrdma_version(void);

// Returns the text of the calling thread's last failure.
//
// The text has at most 1023 bytes. A failing call and this function must not be arguments of one `printf`, because C
// may run them in either order.
//
// # Ownership
// The text is in a buffer of the thread, which the thread's next failure overwrites.
//
// # Threads
// Any thread; each has its own text.
//
// # Returns
// The text; never NULL.
const char *rpcrdma_error(void);

// Passes each line of the log to a function.
//
// Each line is passed on immediately. A process can set the function once.
//
// Lines that peers or calls can cause are limited: a shard passes at most 8 lines of a kind in 10 seconds, and then one
// line with the number of those left out, such as `17 more: connect requests refused`.
//
// # Parameters
// - `function`: gets `context`, the level of the line (1 error, 2 warning, 3 information, 4 debug), and the line. It
//   must not call this library, nor block, because it runs within functions of this library while they use their
//   handles, and on the threads of servers and clients.
// - `context`: first argument of `function`.
// - `max_level`: highest level of the lines that are written, 0 (none) to 4.
//
// # Ownership
// The library keeps `function` and `context` until the process ends. A line is valid until `function` returns.
//
// # Threads
// Any thread. Any thread may run `function`.
//
// # Returns
// - 0: the function gets the log.
// - -EINVAL: `function` is NULL, or `max_level` is not 0 to 4.
// - -EBUSY: the process has a log already.
//
// # Safety
// `function` may be called with `context` on any thread, until the process ends.
int rpcrdma_log(void (*function)(void *context, int level, const char *line), void *context, int max_level);

// Frees a handle of any kind but a call.
//
// A server or client closes its connections immediately; `rpcrdma_server_drain` lets calls finish first. The function
// blocks until the threads of the server or client have ended, so a handler or task cannot free its own server. Calls
// of a polled client that is freed are not reported any more.
//
// # Parameters
// - `handle`: the handle. NULL is ignored.
//
// # Ownership
// The handle becomes invalid. A configuration, services, and an arena may be freed before the servers and clients that
// were started with them. Buffers and replies may outlive their client or server: their contents stay as they are
// until they are freed.
//
// # Threads
// Any thread. A polled server or client is freed on its own thread, or on any thread once it is detached, by
// `rpcrdma_detach` or by the end of its thread.
//
// # Returns
// - 0: the handle is freed.
// - -EPERM: another thread has the polled server or client.
// - -EINVAL: the handle is a call, which `rpcrdma_call_answer` ends, or a reply that a callback got.
// - -EDEADLK: a handler or task frees its own server, which has threads.
// - -EBUSY: a handler frees its own polled server, or another function uses the handle.
// - another negative handle code.
//
// # Safety
// `handle` is NULL or came from this library, and nobody uses it any more.
int rpcrdma_free(void *handle);

// Creates a configuration with the defaults of all knobs.
//
// # Ownership
// The caller frees the configuration (`rpcrdma_free`).
//
// # Threads
// Any thread.
//
// # Returns
// The configuration, or NULL after a failure.
rpcrdma_config *rpcrdma_config_new(void);

// Sets a knob, as a TOML file or `--set` does.
//
// A knob that is set again has its last value. `memory.budget` determines receives and all buffers that are not set.
//
// Each call checks the knob, and those that depend on it: set `memory.receives` before a `limits.credits` that needs
// it. A call takes some microseconds. A value that no host can have is refused. A value that depends on the host, such
// as a core, is checked when a server or client starts. A client has smaller defaults, such as 1024 receives: its
// connect checks the knobs with those defaults, and may fail.
//
// `wire.host_key` (`wire.host_auth` in Rust) is `ID:KEY`, with the key in hexadecimal digits (`openssl rand -hex 32`).
// Both ends need the same key: peers without it are refused, and so is protocol version 1. A key and
// `wire.credit_mode` v1 contradict each other, so the one that is set later is refused.
//
// The ID names the key, not the host, so all hosts with one key have the same name. `rpcrdma_call_peer` writes this
// name. In `blockstore` it is always `blockstore`.
//
// The connect of a client without the key fails with EKEYREJECTED. A client of version 1 connects, but its calls end
// with -EPROTO, because the server tells it only the supported versions, as if `wire.version_1` were false. Such calls
// were not executed, and a retry fails in the same way.
//
// A server creates the socket file of `server.stats` when it starts, and removes it when it ends. It replaces the
// socket of a server that has crashed. It never replaces or removes any other file: with such a file at the path, its
// start fails with EADDRNOTAVAIL.
//
// # Parameters
// - `config`: the configuration.
// - `name`: `group.knob`, such as `memory.receives`, or the knob alone if one group has it, such as `credits`.
//   `tuning.md` lists all knobs. The C interface also has `server.shards`, `server.cores` (`0,2` or `0-3`),
//   `server.workers` (threads), `server.stats` (path of a socket for `rpcrdma top`, such as `/run/NAME/stats`),
//   `client.auth_sys` (`UID:GID:GID,…`, the credential of all calls) and `wire.host_key`.
// - `value`: the value, written as in `tuning.md`: `64`, `"30s"`, or `[[65536, 32], [1048576, 8]]` for
//   `memory.bulk_buffers`.
//
// # Ownership
// The texts are copied.
//
// # Threads
// One thread at a time.
//
// # Returns
// - 0: the knob is set.
// - -EINVAL: the text begins with the knob, and names its value, the valid values, and the other knob if one sets the
//   limit. For a name of an earlier version, the text has the current name.
// - a negative handle code.
//
// # Safety
// `config` is NULL or came from this library; `name` and `value` are NULL, or end with a zero byte.
int rpcrdma_config_set(rpcrdma_config *config, const char *name, const char *value);

// Reads knobs from a TOML file, as programs do with `--config`.
//
// The file may set all knobs of `rpcrdma_config_set`, in their groups, and has at most 4 MiB. The values are checked
// together after the whole file was read. A file with `wire.host_key` is a secret: it is refused if any user except
// root and the process's own user may read or replace it (`chmod 600 FILE`), as the programs of this project refuse
// the file of their key.
//
// # Parameters
// - `config`: the configuration.
// - `path`: path of the file.
//
// # Ownership
// The path is copied.
//
// # Threads
// One thread at a time.
//
// # Returns
// After a failure the configuration is as before.
// - 0: the knobs of the file are set.
// - -ENOENT or another code of the system: the file cannot be read.
// - -EINVAL: the text names the file, and the line, the knob or the limit.
// - a negative handle code.
//
// # Safety
// `config` is NULL or came from this library; `path` is NULL, or ends with a zero byte.
int rpcrdma_config_load(rpcrdma_config *config, const char *path);

// Lets a client take calls from its server.
//
// This is the reverse direction of RFC 8167. The procedures run on the thread of the client's connection, including
// those with `RPCRDMA_ON_WORKERS`.
//
// # Parameters
// - `config`: the configuration of the client.
// - `services`: the procedures.
//
// # Ownership
// The services are copied; the caller still frees its handle.
//
// # Threads
// One thread at a time.
//
// # Returns
// - 0: clients of this configuration take calls.
// - a negative handle code.
//
// # Safety
// `config` and `services` are NULL or came from this library.
int rpcrdma_config_callbacks(rpcrdma_config *config, rpcrdma_services *services);

// Registers the application's memory with the devices of servers and clients.
//
// An arena that the configuration has already is ignored.
//
// # Parameters
// - `config`: the configuration.
// - `arena`: the memory.
//
// # Ownership
// The servers and clients of the configuration share the arena; the caller still frees its handle.
//
// # Threads
// One thread at a time for `config`.
//
// # Returns
// - 0: the configuration has the arena.
// - a negative handle code.
//
// # Safety
// `config` and `arena` are NULL or came from this library.
int rpcrdma_config_arena(rpcrdma_config *config, rpcrdma_arena *arena);

// Creates services without procedures.
//
// # Ownership
// The caller frees the services (`rpcrdma_free`).
//
// # Threads
// Any thread.
//
// # Returns
// The services, or NULL after a failure.
rpcrdma_services *rpcrdma_services_new(void);

// Adds the procedures of a program's version.
//
// Procedure 0 is answered without results if no table has it.
//
// # Parameters
// - `services`: the services.
// - `program`, `version`: the program and its version.
// - `table`: the procedures.
// - `count`: number of entries.
// - `size`: `sizeof *table`.
//
// # Ownership
// The table is copied. Its contexts stay the application's. An arena of `reads_into` is shared; the caller still frees
// its handle.
//
// # Threads
// One thread at a time.
//
// # Returns
// The text of a failure names procedure, program, version and cause. The procedures before the refused one are added.
// - 0: all procedures are added.
// - -EEXIST: the procedure was added before.
// - -EINVAL: the entry is invalid, or the table has no entry.
// - -EBUSY: `reads_into` has parts (`rpcrdma_arena_part`).
// - -EBADF: `reads_into` is not an arena.
// - a negative handle code.
//
// # Safety
// `services` and the arenas are NULL or came from this library; `table` has `count` entries, whose functions may be
// called with their contexts on any thread.
int rpcrdma_services_add(rpcrdma_services *services,
                         uint32_t program,
                         uint32_t version,
                         const rpcrdma_procedure *table,
                         size_t count,
                         size_t size);

// Gives each shard of a server a task.
//
// The task submits I/O, checks for completions, and answers deferred calls, whose replies are sent in the same turn. A
// server with a task has no workers. A client's task does not run. A second call replaces the task.
//
// # Parameters
// - `services`: the services.
// - `poll`: runs in each turn, and must not block.
// - `descriptor`: returns a descriptor (such as an io_uring or an eventfd) that wakes a sleeping shard when it is
//   readable; -1 if there is none. The shard calls it before each sleep, after a last `poll`. NULL: the task has no
//   descriptor. The shard ignores a closed descriptor, and one of a file or directory, which the log then reports.
// - `context`: first argument of both functions.
//
// # Ownership
// The descriptor is the application's, and stays open while the server lives.
//
// # Threads
// One thread at a time. `poll` and `descriptor` run on the shard's thread.
//
// # Returns
// - 0: the task is set.
// - -EINVAL: `poll` is NULL.
// - a negative handle code.
//
// # Safety
// `services` is NULL or came from this library; `poll` and `descriptor` may be called with `context` on any thread.
int rpcrdma_services_task(rpcrdma_services *services, rpcrdma_task poll, rpcrdma_task descriptor, void *context);

// Sets a hook that reports the connections of a server's clients.
//
// In the hook, an application can free its state of a client. A second call replaces the hook. The hook of a client's
// services (`rpcrdma_config_callbacks`) is ignored.
//
// # Parameters
// - `services`: the services.
// - `hook`: the hook.
// - `context`: first argument of `hook`.
//
// # Ownership
// `context` stays the application's.
//
// # Threads
// One thread at a time.
//
// # Returns
// - 0: the hook is set.
// - -EINVAL: `hook` is NULL.
// - a negative handle code.
//
// # Safety
// `services` is NULL or came from this library; `hook` may be called with `context` on any thread.
int rpcrdma_services_peers(rpcrdma_services *services, rpcrdma_peer_hook hook, void *context);

// Starts a server with threads of its own.
//
// The function blocks for some milliseconds. Each shard is a thread, and serves one of the addresses. `server.shards`
// is the number of shards, by default one for each address.
//
// Calls may arrive before this function returns. A handler that needs the server's handle, to call back, waits for it
// on a worker (`RPCRDMA_ON_WORKERS`), or defers the call.
//
// # Parameters
// - `address`: one or several addresses, separated by commas: `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`.
//   The system chooses a port for `PORT` 0, but no function returns it.
// - `services`: the procedures.
// - `config`: the knobs, or NULL for the defaults.
//
// # Ownership
// The caller frees the server, by `rpcrdma_free` or `rpcrdma_server_drain`. Services and configuration may be freed
// before the server.
//
// # Threads
// Any thread. No other thread uses `services` or `config` at the same time.
//
// # Returns
// The server, or NULL after a failure: the text names the system call, the limit and the remedy.
// - EINVAL: an argument or a knob is invalid, such as a core or a NUMA node that this process may not use.
// - EADDRINUSE: another server has the address, or `server.stats`; or `address` lists one address twice.
// - EADDRNOTAVAIL: this host cannot serve the address, or the path of `server.stats` or `soft:` is not that of a socket.
// - ENOENT: the directory of `server.stats` does not exist.
// - ENOMEM: the server needs more memory than the host has left, or than the control group, RLIMIT_AS (`ulimit -v`),
//   RLIMIT_MEMLOCK (`ulimit -l`, for devices) or `vm.max_map_count` permits.
// - EAGAIN: a thread exceeds RLIMIT_NPROC (`ulimit -u`), RLIMIT_AS (for its stack) or the limit of the control group.
// - EFBIG: memory of the library, which the kernel treats as a file, exceeds RLIMIT_FSIZE (`ulimit -f`).
// - EMFILE, ENFILE: the process has no descriptor left (RLIMIT_NOFILE, `ulimit -n`), or the host has none
//   (`fs.file-max`).
// - ENOSPC: there are too many watched sockets (`fs.epoll.max_user_watches`) or objects of the device.
// - ENODEV: the device lacks a capability, or there is no device.
// - EIO: another system call failed.
// - a handle code.
//
// # Safety
// `address` is NULL, or ends with a zero byte; `services` and `config` are NULL or came from this library.
rpcrdma_server *rpcrdma_server_start(const char *address, rpcrdma_services *services, rpcrdma_config *config);

// Makes a client that calls back the caller of a call.
//
// Its calls use the connection of `call` (RFC 8167). A handler on a shard must not block on such a call. Instead, it
// uses `rpcrdma_client_start`, runs on workers (`RPCRDMA_ON_WORKERS`), or defers `call`, which another thread answers.
// The function does not ask the peer whether it accepts calls. If the peer does not, the first call ends with
// EOPNOTSUPP.
//
// # Parameters
// - `server`: the server.
// - `call`: a call that was not answered.
// - `program`, `version`: program of the calls, and its version.
// - `config`: the knobs, or NULL for the defaults.
//
// # Ownership
// The caller frees the client (`rpcrdma_free`). The client may outlive the call.
//
// # Threads
// Any thread that may use `call`.
//
// # Returns
// The client, or NULL after a failure.
// - EINVAL: the call is of another server, or a knob is invalid.
// - EBADF, EBUSY: the handle code of `server`, `call` or `config`.
//
// # Safety
// The handles are NULL or came from this library; the call was not answered.
rpcrdma_client *rpcrdma_server_call_back(rpcrdma_server *server,
                                         rpcrdma_call *call,
                                         uint32_t program,
                                         uint32_t version,
                                         rpcrdma_config *config);

// Stops a server gracefully, and frees it.
//
// The server takes no new calls, and answers those under way. The function blocks for at most `milliseconds`: calls
// have nine tenths of that time, or all but one second of it if that is more. Meanwhile, handlers may use the server,
// and may call back the clients whose calls they have not answered yet.
//
// After -ETIMEDOUT, handlers that still run return later, on the server's threads. After they have returned, the hook
// of `rpcrdma_services_peers` is called for the ends of their connections, and the server releases arenas. Until then,
// memory that these functions use must stay valid, their code, including this library, must stay loaded, and another
// server cannot listen at the address (EADDRINUSE).
//
// # Parameters
// - `server`: the server.
// - `milliseconds`: the maximum time of the drain. With 0, calls are cut off immediately.
//
// # Ownership
// The server ends, and is freed, unless the result is -EDEADLK.
//
// # Threads
// Any thread, except in a handler or task of the server.
//
// # Returns
// - 0: no call and no connection was cut off.
// - -ETIMEDOUT: calls, or connections that clients kept open, were cut off, as with 0 milliseconds. The text names
//   them.
// - -EDEADLK: a handler or task drains its own server.
// - a negative handle code.
//
// # Safety
// `server` is NULL or came from this library, and nobody frees it at the same time.
int rpcrdma_server_drain(rpcrdma_server *server, uint32_t milliseconds);

// Starts a server on one address that the calling thread polls.
//
// The server has no threads except those of `server.workers`, and at times threads that unmap large chunk memory of
// clients on this host, which may outlive the server by up to a second. The log does not report a handler that blocks
// its thread, as it does for servers with threads ("shard was blocked").
//
// # Parameters
// - `address`: one address: `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`.
// - `services`: the procedures, without a task.
// - `config`: the knobs, or NULL for the defaults.
//
// # Ownership
// The caller frees the server (`rpcrdma_free`). Services and configuration may be freed before it.
//
// # Threads
// Any thread, which polls the server from then on.
//
// # Returns
// The server, or NULL after a failure.
// - EINVAL: an argument or a knob is invalid. `server.shards` above 1, `server.cores`, `server.stats` and `poll.core`
//   are for servers with threads, and so are services with a task.
// - the other codes of `rpcrdma_server_start`.
//
// # Safety
// `address` is NULL, or ends with a zero byte; `services` and `config` are NULL or came from this library.
rpcrdma_local_server *rpcrdma_local_server_start(const char *address,
                                                 rpcrdma_services *services,
                                                 rpcrdma_config *config);

// Makes a client that calls back a caller of a polled server.
//
// Its calls use the connection of `call` (RFC 8167). The thread that polls the server uses `rpcrdma_client_start`, and
// `rpcrdma_client_poll` after each poll of the server. Other threads may also use `rpcrdma_client_call`. The thread
// that polls the server cannot make a call with Read chunks, because `rpcrdma_alloc` and a copy of
// `rpcrdma_read_chunk::data` wait for a poll of the server (EDEADLK).
//
// # Parameters
// - `server`: the server.
// - `call`: a deferred call. A handler of this server cannot use the function, because the server is in use (EBUSY).
// - `program`, `version`: program of the calls, and its version.
// - `config`: the knobs, or NULL for the defaults.
//
// # Ownership
// The caller frees the client (`rpcrdma_free`). The client may outlive the call, and also the server: its calls fail
// then.
//
// # Threads
// The thread of the server. Any thread may use the client, one at a time.
//
// # Returns
// The client, or NULL after a failure.
// - EPERM: the calling thread is not that of the server.
// - EINVAL: the call is of another server, or a knob is invalid.
// - EBADF, EBUSY: the handle code of `server`, `call` or `config`.
//
// # Safety
// The handles are NULL or came from this library; the call was not answered.
rpcrdma_client *rpcrdma_local_server_call_back(rpcrdma_local_server *server,
                                               rpcrdma_call *call,
                                               uint32_t program,
                                               uint32_t version,
                                               rpcrdma_config *config);

// Polls a server once, with bounded work.
//
// The function never blocks.
//
// # Parameters
// - `server`: the server.
//
// # Ownership
// No memory changes hands.
//
// # Threads
// The thread of the server. Handlers run on it, within the poll.
//
// # Returns
// - 1: there was work.
// - 0: there was none.
// - a negative handle code.
//
// # Safety
// `server` is NULL or came from this library.
int rpcrdma_local_server_poll(rpcrdma_local_server *server);

// Starts to drain a polled server, and returns whether it is drained.
//
// The server takes no new calls, and answers those under way while it is polled. Until it is drained, it may call back
// the clients that wait for their answers. A drain has no time limit: `rpcrdma_free` ends the server immediately.
//
// # Parameters
// - `server`: the server.
//
// # Ownership
// The caller still frees the server.
//
// # Threads
// The thread of the server.
//
// # Returns
// - 1: the server is drained.
// - 0: the server is not drained yet.
// - a negative handle code.
//
// # Safety
// `server` is NULL or came from this library.
int rpcrdma_local_server_drain(rpcrdma_local_server *server);

// Returns the descriptor of a polled server or client, for epoll.
//
// It is readable while the handle is armed (`rpcrdma_arm`) and has work.
//
// # Parameters
// - `handle`: a polled server or client.
//
// # Ownership
// The descriptor closes with the handle.
//
// # Threads
// The thread of the handle.
//
// # Returns
// - the descriptor.
// - -EINVAL: the server or client has threads.
// - a negative handle code.
//
// # Safety
// `handle` is NULL or came from this library.
int rpcrdma_fd(void *handle);

// Prepares a polled server or client for a sleep in epoll.
//
// Work that arrives after this call makes the descriptor readable. Call `rpcrdma_disarm` after each call of this
// function, even if it returned -EAGAIN.
//
// # Parameters
// - `handle`: a polled server or client.
// - `milliseconds`: the longest sleep; negative: the caller has no limit.
//
// # Ownership
// No memory changes hands.
//
// # Threads
// The thread of the handle.
//
// # Returns
// - the milliseconds to sleep, rounded up.
// - -EAGAIN: there is work, or `milliseconds` is 0, so poll instead.
// - -EINVAL: the server or client has threads.
// - a negative handle code.
//
// # Safety
// `handle` is NULL or came from this library.
int rpcrdma_arm(void *handle, int milliseconds);

// Ends the preparation of `rpcrdma_arm`.
//
// # Parameters
// - `handle`: a polled server or client.
//
// # Ownership
// No memory changes hands.
//
// # Threads
// The thread of the handle.
//
// # Returns
// - 0: the handle is disarmed.
// - -EINVAL: the server or client has threads.
// - a negative handle code.
//
// # Safety
// `handle` is NULL or came from this library.
int rpcrdma_disarm(void *handle);

// Writes the statistics of a server or client as JSON.
//
// The text is an array with an object for each shard. `tuning.md` has the units of the fields, and what to do about
// their values. `peers` lists at most 64 connections of each shard of a server, with about 1 KiB for each. The
// function blocks until each shard has answered, so a handler or task that blocks a shard delays it.
//
// # Parameters
// - `handle`: a server or client of any kind.
// - `buf`: gets the text, cut off to fit into `len` bytes with its final zero byte. NULL: only the length is
//   returned.
// - `len`: bytes of `buf`. 0: only the length is returned.
//
// # Ownership
// `buf` stays the caller's.
//
// # Threads
// Any thread for a server with threads, one thread at a time for a client, and the thread of a polled server or
// client.
//
// # Returns
// - the length of the whole text. A polled server that is drained still has its statistics. For a client that calls back
//   on a connection of a server that was freed, the array is empty.
// - -EBADF: the server was freed or drained, or another thread is freeing or draining it.
// - -EDEADLK: the caller is a handler or task of the same server, or the thread that runs the connection of a client,
//   and would wait for itself. A handler on a worker (`RPCRDMA_ON_WORKERS`) may call the function.
// - -EBUSY: a handler of a polled server calls the function. Call it between polls instead.
// - a negative handle code.
//
// # Safety
// `handle` is NULL or came from this library; `buf` is NULL, or has `len` bytes.
int rpcrdma_stats(void *handle, char *buf, size_t len);

// Writes the header of a call to a struct.
//
// # Parameters
// - `call`: the call.
// - `info`: gets the header.
// - `size`: `sizeof *info`.
//
// # Ownership
// The credential and the arguments are in the call's memory, until it is answered.
//
// # Threads
// The handler's thread; for a deferred call any thread, one at a time.
//
// # Returns
// - 0: the header is in `info`.
// - a negative handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered; `info` is NULL, or has `size` writable bytes.
int rpcrdma_call_header(rpcrdma_call *call, rpcrdma_call_info *info, size_t size);

// Writes the identity or address of a call's peer as text.
//
// The text is the authenticated identity (`wire.host_key`), or else the IP address. Over `soft:`, which has no
// addresses, it is empty without an identity.
//
// # Parameters
// - `call`: the call.
// - `buf`: gets the text, cut off to fit into `len` bytes with its final zero byte. The pointer may be NULL.
// - `len`: bytes of `buf`. It may be 0.
//
// # Ownership
// `buf` stays the caller's.
//
// # Threads
// The handler's thread; for a deferred call any thread, one at a time.
//
// # Returns
// - the length of the whole text.
// - a negative handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered; `buf` is NULL, or has `len` bytes.
int rpcrdma_call_peer(rpcrdma_call *call, char *buf, size_t len);

// Returns the data of a Read chunk, in place.
//
// The data is an argument that the client sent by RDMA. Its length is among the inline arguments, and `position`
// counts it. Empty data has no chunk, and data in a call without chunks is inline.
//
// # Parameters
// - `call`: the call.
// - `index`: index of the chunk. `read_chunks` of `rpcrdma_call_header` is the number of chunks.
// - `len`: gets the length of the data.
// - `position`: gets the offset of the data in the unreduced arguments, in bytes.
//
// # Ownership
// The data is in the call's memory, until it is answered.
//
// # Threads
// The handler's thread; for a deferred call any thread, one at a time.
//
// # Returns
// The data, or NULL after a failure.
// - EINVAL: the call has no such chunk.
// - a handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered; `len` and `position` are NULL or writable.
const void *rpcrdma_call_read_chunk(rpcrdma_call *call, unsigned int index, size_t *len, size_t *position);

// Takes the memory of a Read chunk out of a call.
//
// The buffer may be kept beyond the call, or lent as a result. The buffer is read-only. It is memory of the call's
// shard, and can be a result only of calls of that shard (`shard` of `rpcrdma_call_header`), unless the chunk arrived
// in `reads_into`.
//
// # Parameters
// - `call`: the call.
// - `index`: index of the chunk.
//
// # Ownership
// The caller frees the buffer (`rpcrdma_free`).
//
// # Threads
// The handler's thread; for a deferred call any thread, one at a time.
//
// # Returns
// The buffer, or NULL after a failure.
// - EINVAL: the call has no such chunk.
// - a handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered.
rpcrdma_buffer *rpcrdma_call_take_read_chunk(rpcrdma_call *call, unsigned int index);

// Returns room for inline results, in the memory that is sent.
//
// The room holds zeroes. A second call changes the length, keeps the bytes that were written, and returns the same
// address. There is room for at least the `max_reply` bytes of the procedure. A room of 0 bytes has an address, too.
// After a failure the handler may write other results. Otherwise the caller gets SYSTEM_ERR, whatever the handler
// returns.
//
// # Parameters
// - `call`: the call.
// - `len`: bytes of the results, a multiple of 4 as XDR requires: pad with zeroes.
//
// # Ownership
// The room is in the call's memory, until it is answered.
//
// # Threads
// The handler's thread; for a deferred call any thread, one at a time.
//
// # Returns
// The room, or NULL after a failure.
// - EMSGSIZE: `len` exceeds the room.
// - EINVAL: `len` is not a multiple of 4.
// - a handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered.
void *rpcrdma_call_reply(rpcrdma_call *call, size_t len);

// Copies inline results into the reply, instead of `rpcrdma_call_reply`.
//
// After a failure the handler may write other results. Otherwise the caller gets SYSTEM_ERR, whatever the handler
// returns.
//
// # Parameters
// - `call`: the call.
// - `results`: the results.
// - `len`: bytes at `results`, a multiple of 4 as XDR requires: pad with zeroes.
//
// # Ownership
// The results are copied.
//
// # Threads
// The handler's thread; for a deferred call any thread, one at a time.
//
// # Returns
// - 0: the results are in the reply.
// - -EMSGSIZE: `len` exceeds the room.
// - -EINVAL: `len` is not a multiple of 4, or `results` is NULL for more than 0 bytes.
// - a negative handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered; `results` is NULL, or has `len` bytes.
int rpcrdma_call_reply_with(rpcrdma_call *call, const void *results, size_t len);

// Returns the memory of a Write chunk.
//
// The memory is for a result that travels by RDMA, and is not initialized. The handler or a device writes it. Then
// `rpcrdma_call_write_chunk_filled` sets the number of written bytes; this function resets that number to 0. The
// length of the data belongs to the inline results.
//
// If the chunk is too short for the data, the handler writes nothing, and returns the result of
// `rpcrdma_call_write_chunk_filled(call, index, len)`. If it returns a code of its own, the caller gets SYSTEM_ERR.
//
// # Parameters
// - `call`: the call.
// - `index`: index of the chunk.
// - `room`: gets the length of the chunk.
//
// # Ownership
// The memory is the library's. The handler may write it until the call is answered.
//
// # Threads
// The handler's thread; for a deferred call any thread, one at a time.
//
// # Returns
// The memory, or NULL after a failure.
// - ENOENT: the caller offers no such chunk, or one of 0 bytes, which asks for the data inline (RFC 8166 §4.3.2.3).
//   Then the data itself belongs to the inline results.
// - EINVAL: the caller offers the chunk, but the handler has no memory to write, because the procedure has
//   `RPCRDMA_OWN_RESULTS`, or the chunk has a buffer of `rpcrdma_call_result`.
// - a handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered; `room` is NULL or writable.
void *rpcrdma_call_write_chunk(rpcrdma_call *call, unsigned int index, size_t *room);

// Sends the first bytes of a Write chunk.
//
// # Parameters
// - `call`: the call.
// - `index`: index of the chunk.
// - `len`: bytes that were written for this call; 0: the result is empty.
//
// # Ownership
// The memory is the library's.
//
// # Threads
// The handler's thread; for a deferred call any thread, one at a time.
//
// # Returns
// - 0: the bytes are sent with the reply.
// - -ENOENT: the caller offers no such chunk, or one of 0 bytes.
// - -EINVAL: the handler has no memory to write, as for `rpcrdma_call_write_chunk`.
// - -EMSGSIZE: the chunk is shorter. The handler may return this code. If it returns 0 without having sent other data
//   in this chunk, that means the same. In version 2, the client then retransmits the call with a longer chunk, and
//   the handler runs again. In version 1, the call fails with EPROTO.
// - a negative handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered. All `len` bytes were written for this call, because other bytes
// would be data of another client.
int rpcrdma_call_write_chunk_filled(rpcrdma_call *call, unsigned int index, size_t len);

// Sends a buffer as the result in a Write chunk, without a copy.
//
// The buffer is memory of the application, a Read chunk that was taken, or a part of either. An arena that the server
// has not registered (`rpcrdma_config_arena`) is detected later: the caller gets SYSTEM_ERR, and the log has the
// cause.
//
// # Parameters
// - `call`: the call.
// - `index`: index of the chunk.
// - `buffer`: the result.
//
// # Ownership
// The handle of the buffer ends, also after a failure. The library has its bytes until `release` of
// `rpcrdma_arena_part` is called.
//
// # Threads
// The handler's thread; for a deferred call any thread, one at a time.
//
// # Returns
// - 0: the buffer is sent with the reply.
// - -ENOENT: the caller offers no such chunk. The data belongs to the inline results. The handle is invalid now, so
//   hold another part of this memory until the results are written.
// - -EMSGSIZE: the chunk is shorter. The handler may return this code, as for `rpcrdma_call_write_chunk_filled`.
// - -EXDEV: the buffer is a Read chunk of another shard or server, or a client's buffer: copy it.
// - a negative handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered; `buffer` is NULL or came from this library. The bytes of the buffer
// do not change until the reply was sent, which `release` of `rpcrdma_arena_part` reports.
int rpcrdma_call_result(rpcrdma_call *call, unsigned int index, rpcrdma_buffer *buffer);

// Answers a deferred call.
//
// If the connection has closed, no reply is sent.
//
// # Parameters
// - `call`: the call.
// - `status`: 0 for the results that were written, an `RPCRDMA_` status, or the negative code of a function that has
//   failed for this call. The status means the same as the result of an `rpcrdma_handler`.
//
// # Ownership
// The handle of the call ends, with its arguments and its room for results.
//
// # Threads
// Any thread, one at a time.
//
// # Returns
// - 0: the call is answered.
// - -EBADF: the call was answered before, as far as that can be detected.
// - -EINVAL: the handler of the call answers it by its result.
// - another negative handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered. Nobody writes its results any more.
int rpcrdma_call_answer(rpcrdma_call *call, int status);

// Tells whether the connection of a deferred call has closed.
//
// Nobody awaits the reply of a call whose connection has closed, but the call must still be answered.
//
// # Parameters
// - `call`: the call.
//
// # Ownership
// The caller still answers the call.
//
// # Threads
// Any thread, one at a time.
//
// # Returns
// - 1: the connection has closed.
// - 0: it has not.
// - a negative handle code.
//
// # Safety
// `call` is NULL, or a call that was not answered.
int rpcrdma_call_is_disconnected(rpcrdma_call *call);

// Allocates a buffer for a chunk of a client's call.
//
// The buffer is registered with the client's device. It has zeroes, or data of earlier calls to this server.
//
// # Parameters
// - `client`: a `rpcrdma_client` or a `rpcrdma_local_client`.
// - `len`: bytes of the buffer.
//
// # Ownership
// The caller frees the buffer (`rpcrdma_free`), or lends it to a call, which takes it.
//
// # Threads
// The thread that may use the client.
//
// # Returns
// The buffer, or NULL after a failure.
// - EINVAL: `len` is 0, as for mmap: no chunk is empty.
// - ENOBUFS: the client has no such buffer left now (`memory.bulk_buffers`).
// - EMSGSIZE: no buffer of the client is that long.
// - ENOMEM, EMFILE, ENFILE, EFBIG: the memory of all the client's buffers could not be allocated. The text names the
//   limit. The next call requests the memory again.
// - ENOTCONN: the connection has ended.
// - EDEADLK: the calling thread runs the client's connection, as for `rpcrdma_client_call`.
// - a handle code.
//
// # Safety
// `client` is NULL or came from this library.
rpcrdma_buffer *rpcrdma_alloc(void *client, size_t len);

// Returns the bytes of a buffer.
//
// Buffers of `rpcrdma_call_take_read_chunk` and of `rpcrdma_arena_part` are read-only. A buffer of 0 bytes has an
// address, too.
//
// # Parameters
// - `buffer`: the buffer.
// - `len`: gets the number of bytes.
//
// # Ownership
// The bytes belong to the buffer, and are valid until its handle becomes invalid.
//
// # Threads
// One thread at a time.
//
// # Returns
// The bytes, or NULL with a handle code.
//
// # Safety
// `buffer` is NULL or came from this library; `len` is NULL or writable.
void *rpcrdma_buffer_data(rpcrdma_buffer *buffer, size_t *len);

// Restricts a buffer to a part of its bytes.
//
// The part is taken from the buffer's whole memory, or from its present bytes if the buffer is read-only. A buffer of
// 0 bytes is an empty result (`rpcrdma_call_result`), and cannot be a chunk of a request.
//
// # Parameters
// - `buffer`: the buffer.
// - `start`: first byte.
// - `len`: number of bytes.
//
// # Ownership
// The caller still frees the buffer.
//
// # Threads
// One thread at a time.
//
// # Returns
// - 0: the buffer has these bytes.
// - -EINVAL: the memory has fewer bytes.
// - a negative handle code.
//
// # Safety
// `buffer` is NULL or came from this library.
int rpcrdma_buffer_window(rpcrdma_buffer *buffer, size_t start, size_t len);

// Adopts memory that the application has mapped.
//
// The memory is either sent as results (`rpcrdma_arena_part`), or takes Read chunks (`reads_into` of a procedure), not
// both. From 4 GiB on, it is only for Read chunks. A server registers the memory if its configuration
// (`rpcrdma_config_arena`) or one of its procedures has the arena.
//
// # Parameters
// - `base`: first byte, at a multiple of 4096.
// - `len`: number of bytes, a multiple of 4096.
// - `release`: is called once, with `context`, when no server, client, services or buffer uses the memory any more. It
//   may be NULL.
// - `context`: argument of `release`.
//
// # Ownership
// The caller frees the arena (`rpcrdma_free`). The memory stays the application's, which keeps it mapped until
// `release` is called. After a failure `release` is called, too.
//
// # Threads
// Any thread. `release` may be called on any thread.
//
// # Returns
// The arena, or NULL after a failure.
// - EINVAL: `base` is NULL, `base` or `len` is not a multiple of 4096, `len` is 0, or the memory would end beyond the
//   address space.
//
// # Safety
// The memory stays mapped until `release` is called, and no part of it changes while it is lent.
rpcrdma_arena *rpcrdma_arena_new(void *base, size_t len, void (*release)(void *context), void *context);

// Makes a buffer of a part of the application's memory.
//
// Parts may overlap. A part of 0 bytes is an empty result.
//
// `release` is called once nobody uses the part any more. From then on, the bytes of the part may change. After
// `rpcrdma_call_result`, that is when the reply was sent, or its connection has ended. A peer that takes no data
// delays the release for `timeouts.progress`, and a slow peer as long as it keeps to `limits.min_rate`. The `release`
// of the arena comes after those of all parts.
//
// # Parameters
// - `arena`: the memory.
// - `start`: first byte.
// - `len`: number of bytes.
// - `release`: is called once, with `context`, or is NULL. The function is short, and does not wait. It may write the
//   part's bytes, answer calls, and lend parts.
// - `context`: argument of `release`.
//
// # Ownership
// The caller frees the buffer (`rpcrdma_free`), or sends it (`rpcrdma_call_result`). After a failure `release` is
// called, too.
//
// # Threads
// Any thread. `release` is called on any thread, within any function of this library, so hold no lock that it takes
// while you call this library.
//
// # Returns
// The buffer, or NULL after a failure.
// - EINVAL: the arena has fewer bytes.
// - EBUSY: the arena is for Read chunks, as it is from 4 GiB on.
// - a handle code.
//
// # Safety
// `arena` is NULL or came from this library. The bytes do not change while they are lent.
rpcrdma_buffer *rpcrdma_arena_part(rpcrdma_arena *arena,
                                   size_t start,
                                   size_t len,
                                   void (*release)(void *context),
                                   void *context);

// Detaches a polled server or client from the calling thread.
//
// `rpcrdma_attach` gives it to another thread. Until then, only that function and `rpcrdma_free` may use it. The end
// of a thread detaches all its servers and clients.
//
// A detached handle is not polled, so attach it soon: an event loop must poll at least 20 times a second. Until then,
// its connections make no progress. Calls and allocations through clients that call back the server's callers
// (`rpcrdma_local_server_call_back`) wait, even beyond their time-outs.
//
// # Parameters
// - `handle`: a polled server or client.
//
// # Ownership
// No memory changes hands.
//
// # Threads
// The thread of the handle.
//
// # Returns
// - 0: the handle is detached.
// - -EPERM: the calling thread is not that of the handle.
// - -EBUSY: a handler of the server, or a function that gets the ends of the client's calls, calls `rpcrdma_detach`.
// - another negative handle code.
//
// # Safety
// `handle` is NULL or came from this library.
int rpcrdma_detach(void *handle);

// Gives a detached polled server or client to the calling thread.
//
// The handle was detached by `rpcrdma_detach`, or by the end of its thread. If several threads attach it
// concurrently, one succeeds.
//
// # Parameters
// - `handle`: a polled server or client.
//
// # Ownership
// No memory changes hands.
//
// # Threads
// Any thread, which polls the handle from then on.
//
// # Returns
// - 0: the calling thread has the handle, or had it already.
// - -EPERM: another thread has it.
// - another negative handle code.
//
// # Safety
// `handle` is NULL or came from this library.
int rpcrdma_attach(void *handle);

// Connects to a server, and blocks until connected.
//
// The client has a thread of its own.
//
// # Parameters
// - `address`: `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`.
// - `program`, `version`: program of the calls, and its version.
// - `config`: the knobs, or NULL for the defaults.
//
// # Ownership
// The caller frees the client (`rpcrdma_free`). The configuration may be freed before it.
//
// # Threads
// Any thread. One thread at a time uses the client.
//
// # Returns
// The client, or NULL after a failure.
// - ECONNREFUSED: the address has no listener, there is no such host, or the server is about to end.
// - ETIMEDOUT: the server did not answer in time (the text names the knob). A server without free descriptors answers
//   nobody, and its log says so.
// - EAGAIN: the server has no receives or connections left for one more client: try again later, or raise its
//   `memory.receives` or `limits.max_connections`. Or this host has too few resources, as for `rpcrdma_server_start`.
//   The text names the cause.
// - ECONNRESET: the server closed the connection before it was established.
// - EKEYREJECTED: a host key is missing or wrong (`wire.host_key`, at this side or at the server). No call was
//   executed, and a retry fails in the same way.
// - EPROTO: the peer broke the protocol.
// - EINVAL: an argument or a knob is invalid.
// - EADDRNOTAVAIL, ENOMEM, EFBIG, EMFILE, ENFILE, ENOSPC, ENODEV, EIO: as for `rpcrdma_server_start`.
// - a handle code.
//
// # Safety
// `address` is NULL, or ends with a zero byte; `config` is NULL or came from this library.
rpcrdma_client *rpcrdma_client_connect(const char *address, uint32_t program, uint32_t version, rpcrdma_config *config);

// Makes another handle of a client's connection, for another thread.
//
// # Parameters
// - `client`: the client.
//
// # Ownership
// The caller frees both handles (`rpcrdma_free`). The connection closes when the last one is freed.
//
// # Threads
// The thread that uses `client`. This thread passes the new handle to the other thread.
//
// # Returns
// The new handle, or NULL after a failure.
// - EINVAL: `client` is NULL.
// - EBADF: `client` was freed or is of another kind.
// - EBUSY: another thread uses `client` now.
//
// # Safety
// `client` is NULL or came from this library.
rpcrdma_client *rpcrdma_client_share(rpcrdma_client *client);

// Makes a call, and blocks until it completes.
//
// # Parameters
// - `client`: the client.
// - `request`: the call.
// - `reply`: `*reply` gets the reply if the call started, even if it failed later, else NULL. `reply` may be NULL, but
//   then the buffers of a call that started are freed, and the codes do not always tell whether it started.
//
// # Ownership
// The caller frees the reply (`rpcrdma_free`). The buffers of the request's chunks stay with the caller if `*reply` is
// NULL, as after each EINVAL, EBADF, EPERM and EDEADLK. Otherwise the reply has them, even if the call ended with
// EAGAIN, ENOTCONN, ENOBUFS or EMSGSIZE without being sent.
//
// # Threads
// One thread at a time. Handlers and tasks on the shard of the connection, and the thread that polls its server, use
// `rpcrdma_client_start` instead.
//
// # Returns
// - 0: the server has answered.
// - -ETIMEDOUT: the time-out has passed. The code does not tell whether the call was sent: the text does. A call that
//   got no credit was not sent, and its text says that all credits are in use.
// - -ECONNRESET: the connection was lost.
// - -EKEYREJECTED: the server has restarted and refuses the host key. The call was not executed, and a retry is
//   pointless. Later calls fail with -ENOTCONN.
// - -ENOTCONN: there is no connection. `rpcrdma_close_reason` has the cause.
// - -EAGAIN: too many calls are outstanding (`limits.max_calls`).
// - -ENOBUFS, -EMSGSIZE: the text names the knob.
// - -ENOMEM, -EMFILE, -ENFILE, -EFBIG: memory for chunks could not be allocated. The text names the limit.
// - -EREMOTEIO: the server refused the call (`rpcrdma_reply_status`).
// - -EACCES: the server refused the credential.
// - -EBUSY with a reply: the server drains, or has no memory: try again later. The call was not run, unless only its
//   reply lacked memory.
// - -EBUSY without a reply: another thread uses `client` now.
// - -EPROTO: a malformed reply, a server that refuses version 1, or another transport error.
// - -EOPNOTSUPP: a call back to a client that accepts no calls: it has no `rpcrdma_config_callbacks`, or its
//   `debug.reverse` is `none`.
// - -EINVAL: the request is invalid.
// - -EDEADLK: a handler or task on the shard of the connection would wait for itself, as would the thread that polls
//   its server (`rpcrdma_local_server_call_back`).
// - another negative handle code.
//
// # Safety
// `client` and the buffers of `request` are NULL or came from this library; `request` is NULL, or points to `size`
// readable bytes, and each of its arrays has its stated length; `reply` is NULL or writable.
int rpcrdma_client_call(rpcrdma_client *client, const rpcrdma_request *request, rpcrdma_reply **reply);

// Starts a call without blocking; `rpcrdma_client_poll` reports its completion, once.
//
// Exception: with a Read chunk to be copied, it blocks until the connection's thread has allocated the memory.
//
// # Parameters
// - `client`: the client.
// - `request`: the call.
//
// # Ownership
// If the call starts, it has the buffers of its chunks, which its reply returns. If it does not start, they stay with
// the caller.
//
// # Threads
// One thread at a time. It may be the connection's own thread, that is, in a handler, or the thread that polls the
// server. On that thread a Read chunk cannot be copied (EDEADLK).
//
// # Returns
// - 0: the call has started. The poll reports failures that the connection's thread finds later, with a reply that has
//   the buffers: ENOTCONN without a connection, and EINVAL for the position of a chunk, a buffer of another client, or
//   a one-way call that has chunks.
// - -EAGAIN: too many calls are outstanding (`limits.max_calls`; for calls of a server `debug.reverse_credits`).
// - -ENOTCONN: the thread of the connection has stopped.
// - -EINVAL, -EMSGSIZE: the request is invalid.
// - the codes of `rpcrdma_alloc`: for a Read chunk to be copied.
// - another negative handle code.
//
// # Safety
// `client` and the buffers of `request` are NULL or came from this library; `request` is NULL, or points to `size`
// readable bytes, and each of its arrays has its stated length.
int rpcrdma_client_start(rpcrdma_client *client, const rpcrdma_request *request);

// Reports completed calls.
//
// The function never blocks. Calls of `rpcrdma_local_server_call_back` complete in polls of the server: poll the
// client after each.
//
// # Parameters
// - `client`: the client.
// - `done`: gets each completed call. It may start calls, which a later poll reports. It may also free the client; the
//   calls that this poll has found are reported even then. NULL: completed calls are left to the next poll with a
//   function.
// - `context`: first argument of `done`.
//
// # Ownership
// The reply of a completion is the library's until `rpcrdma_reply_keep`. Calls of a client that is freed are not
// reported any more.
//
// # Threads
// One thread at a time. `done` runs on it.
//
// # Returns
// - 1: a call has completed.
// - 0: no call has completed.
// - a negative handle code.
//
// # Safety
// `client` is NULL or came from this library; `done` may be called with `context`.
int rpcrdma_client_poll(rpcrdma_client *client, rpcrdma_done done, void *context);

// Writes why a client's connection has closed, as text.
//
// # Parameters
// - `client`: a `rpcrdma_client` or a `rpcrdma_local_client`.
// - `buf`: gets the text, cut off to fit into `len` bytes with its final zero byte. The pointer may be NULL.
// - `len`: bytes of `buf`. It may be 0.
//
// # Ownership
// `buf` stays the caller's.
//
// # Threads
// The thread that may use the client.
//
// # Returns
// - the length of the whole text.
// - 0: the connection is open, or the client reconnects.
// - a negative handle code.
//
// # Safety
// `client` is NULL or came from this library; `buf` is NULL, or has `len` bytes.
int rpcrdma_close_reason(void *client, char *buf, size_t len);

// Connects a polled client to a server, and blocks until connected.
//
// The client has no thread: nothing happens unless it is polled.
//
// # Parameters
// - `address`: `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`.
// - `program`, `version`: program of the calls, and its version.
// - `config`: the knobs, or NULL for the defaults.
//
// # Ownership
// The caller frees the client (`rpcrdma_free`). The configuration may be freed before it.
//
// # Threads
// Any thread, which polls the client from then on.
//
// # Returns
// The client, or NULL with a code of `rpcrdma_client_connect`.
//
// # Safety
// `address` is NULL, or ends with a zero byte; `config` is NULL or came from this library.
rpcrdma_local_client *rpcrdma_local_client_connect(const char *address,
                                                   uint32_t program,
                                                   uint32_t version,
                                                   rpcrdma_config *config);

// Begins to connect a polled client to a server, without blocking.
//
// Poll the client until `rpcrdma_local_client_is_established` is not 0. The first connect is tried once. If it fails,
// this function returns NULL, or `rpcrdma_local_client_is_established` returns the code. The connect ends after
// `debug.handshake_timeout` (5 s); `connect.timeout` applies to functions that block.
//
// # Parameters
// - `address`: `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`.
// - `program`, `version`: program of the calls, and its version.
// - `config`: the knobs, or NULL for the defaults.
//
// # Ownership
// The caller frees the client (`rpcrdma_free`). The configuration may be freed before it.
//
// # Threads
// Any thread, which polls the client from then on.
//
// # Returns
// The client, or NULL with a code of `rpcrdma_client_connect`.
//
// # Safety
// `address` is NULL, or ends with a zero byte; `config` is NULL or came from this library.
rpcrdma_local_client *rpcrdma_local_client_begin(const char *address,
                                                 uint32_t program,
                                                 uint32_t version,
                                                 rpcrdma_config *config);

// Tells whether calls of a polled client may be started.
//
// `rpcrdma_local_client_poll` does not tell, because it returns 0 if the connection has ended. Calls that are started
// while the client reconnects (`connect.reconnect_attempts`) are sent once it has reconnected.
//
// # Parameters
// - `client`: the client.
//
// # Ownership
// No memory changes hands.
//
// # Threads
// The thread of the client.
//
// # Returns
// - 1: calls may be started.
// - 0: the client is still connecting.
// - -ENOTCONN: the connection was established, and has ended; the text says why.
// - -ECONNREFUSED, -ETIMEDOUT or another code of `rpcrdma_client_connect`: the connect has failed; the text says why.
// - another negative handle code.
//
// # Safety
// `client` is NULL or came from this library.
int rpcrdma_local_client_is_established(rpcrdma_local_client *client);

// Starts a call; `rpcrdma_local_client_poll` reports its completion, once.
//
// # Parameters
// - `client`: the client.
// - `request`: the call.
// - `xid`: gets the number of the call, for `rpcrdma_local_client_cancel`, or 0 if the call has ended already. The
//   pointer may be NULL.
//
// # Ownership
// If the call starts, it has the buffers of its chunks, which its reply returns. If it does not start, they stay with
// the caller, and the poll reports no completion.
//
// # Threads
// The thread of the client.
//
// # Returns
// - 0: the call has started. The poll reports other causes of failure, and the buffers are in that reply: ENOTCONN,
//   EAGAIN (`limits.max_calls`), and those of a call that waits for a reconnect.
// - -ENOBUFS: there is no memory for the call, its chunks or its reply now (the text names the knob): poll, and try
//   again.
// - -EMSGSIZE: there is never memory for the call, its chunks or its reply (the text names the knob).
// - -ENOMEM, -EMFILE, -ENFILE, -EFBIG: the system refuses memory, as for `rpcrdma_alloc`.
// - -EINVAL: the request is invalid.
// - -ENOTCONN: there is no connection, which a Read chunk to be copied needs.
// - another negative handle code.
//
// # Safety
// `client` and the buffers of `request` are NULL or came from this library; `request` is NULL, or points to `size`
// readable bytes, and each of its arrays has its stated length; `xid` is NULL or writable.
int rpcrdma_local_client_start(rpcrdma_local_client *client, const rpcrdma_request *request, uint32_t *xid);

// Cancels a call, which ends with -ECANCELED if it is still under way.
//
// The server may have run the call. The call keeps its credit, as after a time-out.
//
// # Parameters
// - `client`: the client.
// - `xid`: the number of the call, of `rpcrdma_local_client_start`.
//
// # Ownership
// The buffers of its chunks stay with the call, until the server answers it, or the connection ends.
//
// # Threads
// The thread of the client.
//
// # Returns
// - 0: the call is cancelled, or there is no such call.
// - a negative handle code.
//
// # Safety
// `client` is NULL or came from this library.
int rpcrdma_local_client_cancel(rpcrdma_local_client *client, uint32_t xid);

// Polls a client once, and reports completed calls.
//
// The function never blocks. A loop polls at least 20 times a second, and the time of the `done` functions counts
// towards the time between two polls.
//
// # Parameters
// - `client`: the client.
// - `done`: gets each completed call. Calls that it starts, and that complete immediately, are reported by the next
//   poll. NULL: completed calls are left to the next poll with a function.
// - `context`: first argument of `done`.
//
// # Ownership
// The reply of a completion is the library's until `rpcrdma_reply_keep`.
//
// # Threads
// The thread of the client. `done` runs on it.
//
// # Returns
// - 1: there was work, or a call has completed.
// - 0: neither.
// - a negative handle code.
//
// # Safety
// `client` is NULL or came from this library; `done` may be called with `context`.
int rpcrdma_local_client_poll(rpcrdma_local_client *client, rpcrdma_done done, void *context);

// Returns the inline results of a call, in place.
//
// # Parameters
// - `reply`: the reply.
// - `len`: gets the length of the results.
//
// # Ownership
// The results are in the reply, until it is freed.
//
// # Threads
// One thread at a time.
//
// # Returns
// The results, or NULL after a failure.
// - the code of a call that has failed, as `rpcrdma_client_call` returns it.
// - a handle code.
//
// # Safety
// `reply` is NULL or came from this library; `len` is NULL or writable.
const void *rpcrdma_reply_results(rpcrdma_reply *reply, size_t *len);

// Returns the status with which the server refused a call.
//
// # Parameters
// - `reply`: the reply.
//
// # Ownership
// The caller still frees the reply.
//
// # Threads
// One thread at a time.
//
// # Returns
// - 0: the server did not refuse the call.
// - an `RPCRDMA_` status, as handlers return it, such as `RPCRDMA_PROG_UNAVAIL`.
// - a negative code of a call that has failed otherwise, as `rpcrdma_client_call` returns it. A refusal for another
//   version of RPC itself is such a failure.
// - a negative handle code.
//
// # Safety
// `reply` is NULL or came from this library.
int rpcrdma_reply_status(rpcrdma_reply *reply);

// Takes the buffer of a Write chunk out of a reply.
//
// The buffer is as long as its data. The reply of a failed call also has the buffer, unless the server can still reach
// it.
//
// # Parameters
// - `reply`: the reply.
// - `index`: index of the chunk.
//
// # Ownership
// The caller frees the buffer (`rpcrdma_free`), or lends it to the next call.
//
// # Threads
// One thread at a time.
//
// # Returns
// The buffer, or NULL after a failure.
// - EINVAL: there is none, such as after a time-out or a cancel, while the server may still answer.
// - a handle code.
//
// # Safety
// `reply` is NULL or came from this library.
rpcrdma_buffer *rpcrdma_reply_take_write_chunk(rpcrdma_reply *reply, unsigned int index);

// Takes the buffer of a Read chunk out of a reply.
//
// The buffer can be lent to another call. The reply of a failed call also has the buffer, unless the server can still
// reach it.
//
// # Parameters
// - `reply`: the reply.
// - `index`: index of the chunk.
//
// # Ownership
// The caller frees the buffer (`rpcrdma_free`), or lends it to the next call.
//
// # Threads
// One thread at a time.
//
// # Returns
// The buffer, or NULL after a failure.
// - EINVAL: there is none, such as after a time-out or a cancel, while the server may still answer.
// - a handle code.
//
// # Safety
// `reply` is NULL or came from this library.
rpcrdma_buffer *rpcrdma_reply_take_read_chunk(rpcrdma_reply *reply, unsigned int index);

// Keeps the reply that a callback got, beyond the callback.
//
// The reply holds a buffer of the client, which has at least `memory.receives` of them. While none is left, no reply
// arrives: the calls time out, and the server ends the connection. Copy results to keep them long.
//
// # Parameters
// - `reply`: `reply` of a completion.
//
// # Ownership
// The caller frees the new reply (`rpcrdma_free`).
//
// # Threads
// The thread that runs the callback.
//
// # Returns
// The reply, or NULL after a failure.
// - EINVAL: the reply was kept already.
// - a handle code.
//
// # Safety
// `reply` is the one that the callback got.
rpcrdma_reply *rpcrdma_reply_keep(rpcrdma_reply *reply);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RPCRDMA_H */
