// ONC RPC over RDMA (RFC 8166), protocol versions 1 and 2.
//
// Functions that return int return 0 or a count, or a negative code of errno.h. Those that return a pointer return NULL
// after a failure, and set errno to the code. rpcrdma_error has the text. Pointers to which functions write results may
// be NULL: these results are not stored. What `Safety` says is the caller's duty: it cannot be checked.
//
// A function that takes a handle fails with EINVAL if it is NULL, EBADF if it was freed or is of another kind, as far as
// that can be seen, EBUSY while another function uses it, and EPERM if it is a polled server or client of another
// thread. The function's own comment has further codes. EIO may also be a defect of this library, which the log names.
//
// No function unwinds, and none may be called in a signal handler. A child of fork may exec or _exit: functions fail
// there with -EPERM once the process has had a server or client. Until it execs or ends, it keeps the connections of its
// parent open, beyond the parent's end. Where a server or client starts, descriptors 0 to 2 that are closed become
// /dev/null: nothing that is printed goes to a peer.
//
// A thread that calls this library has at least 128 KiB of stack, and is not cancelled meanwhile (pthread_cancel): the
// process ends. Threads of servers and clients inherit the signal mask of the thread that starts them: a program that
// takes signals by signalfd blocks them before. Without memory for the heap, such as below `ulimit -v`, the process
// ends.

#ifndef RPCRDMA_H
#define RPCRDMA_H

#include <stddef.h>
#include <stdint.h>


// The procedure runs on workers (`server.workers`): its handler may block.
#define RPCRDMA_ON_WORKERS 1

// A call that is retransmitted to the same server does not run again. A new process has nothing of the old one's
// cache. A client is a credential, as of `client.auth_sys`, on a host: each client of this library has its own stamp.
// Calls without a credential run again. Without Write chunks. The cache has the default sizes of
// `DuplicateRequestCacheConfig` in `tuning.md`, which C cannot change.
#define RPCRDMA_CACHED 2

// Calls have no reply, and end once they are sent: nothing tells whether one has run. Procedure and request both need
// the flag: without it in the request, the call ends by its time-out alone.
#define RPCRDMA_ONE_WAY 4

// Write chunks get memory of the application (`rpcrdma_call_result`), and none of the library's.
#define RPCRDMA_OWN_RESULTS 8

// Reduced arguments have no length among the inline arguments. Without this flag, the library compares the length in
// front of each Read chunk's position with the chunk, and refuses other calls with GARBAGE_ARGS.
#define RPCRDMA_UNCOUNTED 16

// `PROG_UNAVAIL` of RFC 5531 §9.
#define RPCRDMA_PROG_UNAVAIL 1

// `PROG_MISMATCH`: the server has other versions of the program. Only in replies.
#define RPCRDMA_PROG_MISMATCH 2

// `PROC_UNAVAIL`.
#define RPCRDMA_PROC_UNAVAIL 3

// `GARBAGE_ARGS`: the arguments cannot be decoded.
#define RPCRDMA_GARBAGE_ARGS 4

// `SYSTEM_ERR`: the server has failed.
#define RPCRDMA_SYSTEM_ERR 5

// No reply, for procedures of `RPCRDMA_ONE_WAY`. From others it is `SYSTEM_ERR`.
#define RPCRDMA_NO_REPLY 6

// `AUTH_ERROR`: add the `auth_stat` of RFC 5531 §9, 0 to 255. A larger sum is SYSTEM_ERR.
#define RPCRDMA_AUTH_ERROR 256

// Memory that the application has mapped. Any thread uses it.
typedef struct rpcrdma_arena rpcrdma_arena;

// Memory of a chunk, registered with the device. One thread at a time uses it.
typedef struct rpcrdma_buffer rpcrdma_buffer;

// A call at the server. Its handler uses it; a deferred one, any one thread at a time.
typedef struct rpcrdma_call rpcrdma_call;

// A client whose connection another thread runs: one of its own, or a server's. One thread at a time uses it.
typedef struct rpcrdma_client rpcrdma_client;

// Knobs of servers and clients, by the names of `tuning.md`. One thread at a time uses it.
typedef struct rpcrdma_config rpcrdma_config;

// A client that its thread polls. Only the thread that made it uses it, or that `rpcrdma_attach` gave it to.
typedef struct rpcrdma_local_client rpcrdma_local_client;

// A server that its thread polls. Only the thread that made it uses it, or that `rpcrdma_attach` gave it to.
typedef struct rpcrdma_local_server rpcrdma_local_server;

// The reply of a call. One thread at a time uses it.
typedef struct rpcrdma_reply rpcrdma_reply;

// A server with threads of its own. Any thread uses it.
typedef struct rpcrdma_server rpcrdma_server;

// Procedures of a server, or of a client that takes calls. One thread at a time uses it.
typedef struct rpcrdma_services rpcrdma_services;

// Answers a call at once: writes its results, and returns 0.
//
// `args` are the inline arguments, in place. `results` has room for `max_reply` bytes of inline results, which are not
// initialized. `*results_len` is 0: the handler writes them all, and their number there, which is a multiple of 4 as
// XDR requires: the handler pads with zeroes. With another number the caller gets SYSTEM_ERR. Or it uses
// `rpcrdma_call_reply`.
//
// It runs on a shard, or on a worker, and several threads may run it at once. The call is valid until it returns.
// Another result refuses the call: an `RPCRDMA_` status, or the negative code of the last function that has failed to
// write results of this call, which the caller gets as follows:
//
// - -EMSGSIZE of a Write chunk of the caller that is shorter than the result, which `max_write` allows: an error of
//   the transport, by which a client of version 2 sends the call again with a longer chunk; in version 1 the call
//   fails with EPROTO;
// - -ENOENT of a Write chunk that the procedure declares, and the caller does not offer: GARBAGE_ARGS;
// - any other negative code, also one of no such function: SYSTEM_ERR, and the log has the cause, or the code.
//
// So is 0 if a function that writes results has failed for this call, and none has written that part of them since.
// Other numbers are SYSTEM_ERR, and the log has the number. No exception of C++ may leave it: the process ends.
typedef int (*rpcrdma_handler)(void *context,
                               rpcrdma_call *call,
                               const void *args,
                               size_t args_len,
                               void *results,
                               size_t *results_len);

// Takes a call, to be answered by `rpcrdma_call_answer`, now or later, on any thread. `args` are the inline arguments,
// in place until then.
//
// It runs on a shard and must not block.
typedef void (*rpcrdma_deferred_handler)(void *context, rpcrdma_call *call, const void *args, size_t args_len);

// A procedure of a table: `{.number = 1, .handler = get, .max_reply = 16}`.
//
// It has a handler, or a deferred one. All else may be 0.
typedef struct {
    // Procedure number.
    uint32_t number;
    // `RPCRDMA_ON_WORKERS` and others, or 0.
    uint32_t flags;
    // Answers at once.
    rpcrdma_handler handler;
    // Answers later.
    rpcrdma_deferred_handler deferred;
    // First argument of both. Any thread may use it.
    void *context;
    // Bytes of inline results that there is at least room for, at most 1 GiB; 0: 256.
    size_t max_reply;
    // Most Read chunks of a call, at most 4: eligible arguments (RFC 8166 §6).
    uint32_t read_chunks;
    // Most Write chunks of a call, at most 4: eligible results.
    uint32_t write_chunks;
    // Most bytes of a Read chunk: at most 1 GiB, and with `reads_into` 4 GiB less 1.
    size_t max_read;
    // Most bytes of a Write chunk: at most 1 GiB, and with `RPCRDMA_OWN_RESULTS` 4 GiB less 1.
    size_t max_write;
    // Memory that Read chunks arrive in, or NULL for the library's. It has a place for each `max_read` bytes, rounded
    // up to 4096. A place is free again once its chunk's call is answered, and the buffer freed that took the chunk.
    // While none is free, chunks arrive in the library's memory.
    rpcrdma_arena *reads_into;
} rpcrdma_procedure;

// Does work on a shard's thread, in each of its turns, without blocking. Not 0 if there was any.
typedef int (*rpcrdma_task)(void *context, unsigned int shard);

// A client's connection to a server has begun, or ended.
typedef struct {
    // Bytes that this version of the library has written, as in `rpcrdma_completion`.
    size_t size;
    // Number of the connection, as in `rpcrdma_call_info`: no other one of this shard of this server has had it.
    uint64_t connection;
    // Its peer, as of `rpcrdma_call_peer`. With `wire.host_key`, a connection begins before its peer has proven its
    // identity: `peer` is then its IP address, and the identity at the end.
    const char *peer;
    // Why it has ended; NULL if it has begun.
    const char *reason;
    // Its shard, as in `rpcrdma_call_info`.
    unsigned int shard;
} rpcrdma_peer_event;

// Gets the beginning of a connection, before its first call, and its end once, after its last handler. Deferred calls
// may still be open: `rpcrdma_call_is_disconnected` is 1 for them. It may answer calls.
//
// The event is valid until the function returns. It runs on the shard, or on a worker while the server ends, and must
// not block. The end of the server ends all connections: `rpcrdma_free` waits for it, and `rpcrdma_server_drain`
// unless it times out.
typedef void (*rpcrdma_peer_hook)(void *context, const rpcrdma_peer_event *event);

// What a call's header says.
typedef struct {
    // Transaction ID.
    uint32_t xid;
    // Program number.
    uint32_t program;
    // Program version.
    uint32_t version;
    // Procedure number.
    uint32_t procedure;
    // Read chunks of the call.
    uint32_t read_chunks;
    // Shard that took the call, as the task of `rpcrdma_services_task` gets it; 0 without several.
    uint32_t shard;
    // Flavor of the credential (RFC 5531 §8.2).
    uint32_t credential_flavor;
    // Body of the credential, in place.
    const void *credential;
    // Its bytes.
    size_t credential_len;
    // Inline arguments, in place.
    const void *args;
    // Their bytes.
    size_t args_len;
    // Number of the connection: no other one of `shard` has had it.
    uint64_t connection;
} rpcrdma_call_info;

// A Read chunk: an argument that the server reads by RDMA. One of 0 bytes is refused: EINVAL.
typedef struct {
    // Byte of the arguments where it belongs. The bytes of chunks before it count.
    size_t position;
    // A buffer of `rpcrdma_alloc`: its bytes are the argument, without XDR round-up. NULL: `data` is copied.
    rpcrdma_buffer *buffer;
    // Bytes to be copied to the client's memory, if `buffer` is NULL.
    const void *data;
    // Their number.
    size_t len;
} rpcrdma_read_chunk;

// A Write chunk: room for the next eligible result, which the server writes by RDMA. One of 0 bytes is refused: EINVAL.
typedef struct {
    // A buffer of `rpcrdma_alloc`. NULL: `len` bytes of the client's memory.
    rpcrdma_buffer *buffer;
    // Bytes, if `buffer` is NULL.
    size_t len;
} rpcrdma_write_chunk;

// A call to make: `{.size = sizeof(rpcrdma_request), .procedure = 1, .args = &number, .args_len = sizeof number}`. In
// C++17: `rpcrdma_request q{}; q.size = sizeof q;`.
//
// All but `size` may be 0. The functions that take it copy it and the arguments. They take the buffers of its chunks,
// which end, but only if the call starts. `rpcrdma_reply_take_read_chunk` and `rpcrdma_reply_take_write_chunk` have
// them after the call. The exception is a call of version 2 that the library sends again because the server takes no
// chunks, fewer Read chunks, or wants a longer Write chunk: the lent buffers return to the pool, and the results are in
// others.
typedef struct {
    // `sizeof(rpcrdma_request)`. Later versions of this library have more fields at the end, and take requests of
    // earlier ones. This version takes later requests whose further fields are 0.
    size_t size;
    // Procedure number.
    uint32_t procedure;
    // `RPCRDMA_ONE_WAY`, or 0.
    uint32_t flags;
    // Comes back in the completion.
    uint64_t token;
    // XDR encoded arguments, without those in chunks.
    const void *args;
    // Their bytes, a multiple of 4 as XDR requires.
    size_t args_len;
    // Read chunks, at most 4, in the order of their positions. All have buffers, or none.
    const rpcrdma_read_chunk *read_chunks;
    // Their number.
    size_t read_count;
    // Write chunks, at most 4, in the order of the results.
    const rpcrdma_write_chunk *write_chunks;
    // Their number.
    size_t write_count;
    // Bytes of inline results that there is room for; 0: what fits into one message, of which rely on 256 only. More
    // may arrive: check the length of the results.
    size_t max_reply;
    // Time-out in milliseconds; 0 or less: none. The thread that runs the connection ends the call: the application's
    // own, for a polled server that calls back, where the time-out comes with the next poll. A call that timed out, or
    // was cancelled, keeps its credit and the memory of its chunks until the server answers it, or the connection ends.
    // With `limits.max_abandoned` (32) of these, or all credits, unanswered for `timeouts.progress`, the connection
    // ends.
    int timeout;
} rpcrdma_request;

// The end of a call.
typedef struct {
    // Bytes that this version of the library has written. A program that may run with an earlier version than it was
    // built with compares it with `sizeof(rpcrdma_completion)`: later versions have more fields at the end.
    size_t size;
    // Of the request.
    uint64_t token;
    // The inline results, in place. NULL for a call that has failed.
    const void *results;
    // Their bytes.
    size_t results_len;
    // The reply, which holds the buffers of chunks: take them (`rpcrdma_reply_take_read_chunk`) for the next call.
    rpcrdma_reply *reply;
    // 0, or negative, as `rpcrdma_client_call` returns it.
    int error;
} rpcrdma_completion;

// Gets the end of a call. `completion`, its results and its reply are valid until the function returns, or
// `rpcrdma_reply_keep`. For a failed call, `rpcrdma_error` has its text here until another function fails.
//
// The function may start calls, and end the client. If it polls this client, the ends of calls wait until it returns.
// No exception of C++ may leave it, nor pthread_exit: the process ends. Nor may longjmp: the client would report no
// more.
typedef void (*rpcrdma_done)(void *context, const rpcrdma_completion *completion);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Version of the library, such as `0.1.0`.
const char *rpcrdma_version(void);

// Text of this thread's last failure: at most 1023 bytes. Never NULL.
//
// It is in a buffer of the thread, which the next failure overwrites. A failing call and this one are not arguments of
// one `printf`: C may run them in either order.
const char *rpcrdma_error(void);

// Passes each line of the log to `function`, from any thread, as soon as it is written.
//
// `level` is 1 (error) to 4 (debug); lines above `most`, 0 to 4, are not written. Once per process. `context` is its
// first argument.
//
// It runs within functions of this library while they use their handles, and on the threads of servers and clients: it
// must not call this library, nor block.
//
// Returns 0; -EINVAL if `function` is NULL, or `most` not 0 to 4; or -EBUSY if the process has a log already.
//
// # Safety
// `function` may be called with `context` on any thread, until the process ends.
int rpcrdma_log(void (*function)(void *context, int level, const char *line), void *context, int most);

// Ends a handle of any kind, but not a call's. NULL is ignored.
//
// A server or client closes its connections at once; `rpcrdma_server_drain` lets calls finish first. It blocks until
// their threads have ended, so a handler or task cannot end its own server. A configuration, services, and an arena
// may end before the servers and clients that were started with them. Buffers and replies may outlive their client or
// server: what they hold stays as it is until they are freed. Calls of a polled client that ends are not reported any
// more.
//
// A polled server or client ends on its own thread, or on any one once it is detached: by `rpcrdma_detach`, or by the
// end of its thread.
//
// Returns 0; -EPERM for a polled one that another thread has; -EINVAL for a call, which `rpcrdma_call_answer` ends,
// and for a reply that a callback got; -EDEADLK for a server in one of its handlers or tasks.
//
// # Safety
// `handle` is NULL or came from this library, and nobody uses it any more.
int rpcrdma_free(void *handle);

// A configuration with the defaults of all knobs. `rpcrdma_free` ends it.
rpcrdma_config *rpcrdma_config_new(void);

// Sets a knob to the value that `value` says, as in a TOML file or behind `--set`.
//
// `name` is `group.knob`, such as `memory.receives`, or a knob that one group has, such as `credits`. `tuning.md` has
// all. Values are as there: `64`, `"30s"`, `[[65536, 32], [1048576, 8]]` for `memory.bulk_buffers`. Beside those,
// there are `server.shards`, `server.cores` (`0,2` or `0-3`), `server.workers` (threads), `server.stats` (a socket for
// `rpcrdma top`), `client.auth_sys` (`UID:GID:GID,…`, the credential of all calls) and `wire.host_key`. A knob that is
// set again has its last value. `memory.budget` determines receives and all buffers that are not set.
//
// Each call checks the knob, and those that depend on it: set `memory.receives` before a `limits.credits` that needs
// it. It takes some microseconds. A file of `rpcrdma_config_load` is checked at its end. A value that no host can have
// is refused. What depends on the host, such as the number of its cores, is checked at the start. A client has smaller
// defaults, such as 1024 receives: its connect checks with those, and may fail.
//
// `wire.host_key` (`wire.host_auth` in Rust) is `ID:KEY`, the key in hexadecimal digits (`openssl rand -hex 32`). Both
// ends need the same: peers without it are refused, and so is version 1. Such a client's connect fails with
// EKEYREJECTED. A client of version 1 connects, and its calls end with -EPROTO: they were not executed, and a retry
// fails in the same way. The code is not EKEYREJECTED, because the server names only its versions: calls to a server
// whose `wire.version_1` is false end with the same error. ID names the key, not the host: `rpcrdma_call_peer` says
// it. All hosts with one key have one name; that of `blockstore` is `blockstore`.
//
// Returns 0, or -EINVAL: the text names the knob, the value, and what it takes, with the other knob if that is a
// limit. For a name of an earlier version it gives the present one.
//
// # Safety
// `config` as for `rpcrdma_free`; `name` and `value` end with a zero byte.
int rpcrdma_config_set(rpcrdma_config *config, const char *name, const char *value);

// Reads a TOML file of knobs, as programs do with `--config`: all that `rpcrdma_config_set` takes, in their groups.
// A file has at most 4 MiB.
//
// A file with `wire.host_key` is a secret: it is refused if a user other than root and that of this process may read
// or replace it (`chmod 600 FILE`), as the programs of this project refuse the file of their key.
//
// Returns 0; -ENOENT or another code of a file that cannot be read; -EINVAL, and the text names the file, and the
// line, the knob or the limit. After a failure the configuration is as before.
//
// # Safety
// As for `rpcrdma_config_set`.
int rpcrdma_config_load(rpcrdma_config *config, const char *path);

// Has a client take calls from its server, in the reverse direction (RFC 8167). The services are copied. Their
// procedures run on the thread of the client's connection, those of `RPCRDMA_ON_WORKERS`, too.
//
// Returns 0 or a negative code of a handle.
//
// # Safety
// As for `rpcrdma_config_set`.
int rpcrdma_config_callbacks(rpcrdma_config *config, rpcrdma_services *services);

// Registers the application's memory with the devices of servers and clients. An arena that it has already is ignored.
//
// Returns 0 or a negative code of a handle.
//
// # Safety
// As for `rpcrdma_config_set`.
int rpcrdma_config_arena(rpcrdma_config *config, rpcrdma_arena *arena);

// Services without procedures. `rpcrdma_free` ends them.
rpcrdma_services *rpcrdma_services_new(void);

// Adds the procedures of a program's version. `size` is `sizeof *table`. The table is copied. Procedure 0 is answered
// without results if no table has it.
//
// Returns 0; -EEXIST for a procedure that was added before; -EINVAL for an entry that no server can have, or for no
// entry; -EBUSY for a `reads_into` with parts (`rpcrdma_arena_part`), -EBADF for one that is no arena. The text names
// procedure, program, version and cause. The procedures before it are added.
//
// # Safety
// `services` and arenas as for `rpcrdma_free`; `table` has `count` entries, whose functions may be called with their
// contexts on any thread.
int rpcrdma_services_add(rpcrdma_services *services,
                         uint32_t program,
                         uint32_t version,
                         const rpcrdma_procedure *table,
                         size_t count,
                         size_t size);

// Gives each shard of a server a task: `poll` runs in each turn, on the shard's thread.
//
// It submits I/O, checks for completions, and answers deferred calls, whose replies go out in the same turn. It does
// not block. A shard that sleeps wakes when the descriptor is readable that `descriptor` returns, such as of an
// io_uring or an eventfd; -1 or NULL: the task has none. `descriptor` is called on the shard's thread, too, after a
// last `poll` before each sleep. The descriptor stays open while the server lives. The shard ignores a closed
// descriptor, and that of a file or directory, and the log says so. A server with a task has no workers. A client's
// task does not run.
//
// Returns 0, or -EINVAL if `poll` is NULL. A second call replaces the task.
//
// # Safety
// As for `rpcrdma_services_add`.
int rpcrdma_services_task(rpcrdma_services *services, rpcrdma_task poll, rpcrdma_task descriptor, void *context);

// Tells `hook` of the connections of a server's clients: an application frees then what it has of a client.
//
// Returns 0, or -EINVAL if it is NULL. A second call replaces it. That of a client (`rpcrdma_config_callbacks`) is
// ignored.
//
// # Safety
// As for `rpcrdma_services_add`, with `hook` and `context`.
int rpcrdma_services_peers(rpcrdma_services *services, rpcrdma_peer_hook hook, void *context);

// Starts a server on one or several addresses, separated by commas; blocks for some milliseconds.
//
// An address is `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`. Each shard, a thread, serves one of them;
// `server.shards` says how many there are, by default one for each address. `config` may be NULL.
//
// NULL after a failure: the text names the call, the limit and the remedy.
//
// - EINVAL: an argument, or a knob, such as a core or a NUMA node that this process may not use;
// - EADDRINUSE: another server has the address, or `server.stats`;
// - EADDRNOTAVAIL: this host cannot serve the address;
// - ENOENT: no folder for `server.stats`;
// - ENOMEM: memory exceeds what the host has left, the control group, RLIMIT_AS (`ulimit -v`), RLIMIT_MEMLOCK
//   (`ulimit -l`, for devices) or `vm.max_map_count`;
// - EAGAIN: a thread exceeds RLIMIT_NPROC (`ulimit -u`), RLIMIT_AS (for its stack) or the control group;
// - EFBIG: memory of the library, which is a file to the kernel, exceeds RLIMIT_FSIZE (`ulimit -f`);
// - EMFILE, ENFILE: the process has no descriptor left (RLIMIT_NOFILE, `ulimit -n`), or the host (`fs.file-max`);
// - ENOSPC: too many watched sockets (`fs.epoll.max_user_watches`), or objects of the device;
// - ENODEV: the device lacks something, or there is none;
// - EIO: another system call.
//
// # Safety
// `address` ends with a zero byte; the handles as for `rpcrdma_free`.
rpcrdma_server *rpcrdma_server_start(const char *address, rpcrdma_services *services, rpcrdma_config *config);

// A client for calls to the client that made `call`, on the same connection (RFC 8167). It outlives the call.
//
// A handler on a shard must not block for such a call: it uses `rpcrdma_client_start`, runs on workers
// (`RPCRDMA_ON_WORKERS`), or is a deferred one that another thread answers.
//
// `config` may be NULL. `rpcrdma_free` ends the client. NULL after a failure: EINVAL (the call is of another server,
// or a knob), EBADF or EBUSY for one of the handles. It does not ask the peer: one that takes no calls is found by the
// first call, which ends with EOPNOTSUPP.
//
// # Safety
// The handles as for `rpcrdma_free`; the call was not answered.
rpcrdma_client *rpcrdma_server_call_back(rpcrdma_server *server,
                                         rpcrdma_call *call,
                                         uint32_t program,
                                         uint32_t version,
                                         rpcrdma_config *config);

// Stops a server gracefully: no new calls, and those under way are answered. Blocks for at most `milliseconds`: calls
// have nine tenths of it, and all but a second of a longer time. The server ends, and is freed, unless the result is
// -EDEADLK. Its handlers may use it until then, and may call back the clients whose calls they have not answered yet.
//
// Returns 0; -ETIMEDOUT if it cut off calls, or connections that clients kept open, as 0 milliseconds do: the text
// says which; -EDEADLK as for `rpcrdma_free`.
//
// After -ETIMEDOUT, handlers that still run return later, on the server's threads. Then the hook of
// `rpcrdma_services_peers` hears of the end of their connections, and the server gives up arenas. What these functions
// use must stay until then, the library included.
//
// # Safety
// `server` as for `rpcrdma_free`.
int rpcrdma_server_drain(rpcrdma_server *server, uint32_t milliseconds);

// Starts a server on one address that the calling thread polls.
//
// It has no thread, but those of `server.workers`, and, for up to a second after it, one that has unmapped large chunk
// memory of a client of this host.
//
// As for `rpcrdma_server_start`. `server.shards` above 1, `server.cores`, `server.stats` and `poll.core` are for
// servers with threads: EINVAL. So are services with a task.
//
// The log does not report a handler that blocks its thread, as it does for servers with threads ("shard was blocked").
//
// # Safety
// As for `rpcrdma_server_start`.
rpcrdma_local_server *rpcrdma_local_server_start(const char *address,
                                                 rpcrdma_services *services,
                                                 rpcrdma_config *config);

// A client for calls to the client that made `call`, on the same connection (RFC 8167). It outlives the call.
//
// The thread that polls the server uses `rpcrdma_client_start`, and `rpcrdma_client_poll` after each poll of the
// server. Other threads may also use `rpcrdma_client_call`. `call` is a deferred one: in a handler of this server, the
// server is in use (EBUSY). `config` may be NULL. NULL after a failure: as for `rpcrdma_server_call_back`, and EPERM
// on another thread than that of the server. `rpcrdma_free` ends the client, which may outlive the server: its calls
// fail then.
//
// A call with Read chunks needs another thread than the one that polls the server: `rpcrdma_alloc` and a copy of
// `rpcrdma_read_chunk::data` wait for the server's turn (EDEADLK).
//
// # Safety
// As for `rpcrdma_server_call_back`.
rpcrdma_client *rpcrdma_local_server_call_back(rpcrdma_local_server *server,
                                               rpcrdma_call *call,
                                               uint32_t program,
                                               uint32_t version,
                                               rpcrdma_config *config);

// Turns a polled server once, with bounded work. Never blocks.
//
// Returns 1 if there was work, 0 if there was none, or a negative code of the handle.
//
// # Safety
// `server` as for `rpcrdma_free`.
int rpcrdma_local_server_poll(rpcrdma_local_server *server);

// Starts to drain a polled server: no new calls, and those under way are answered while it is polled. Until then the
// server may call back the clients that wait for them.
//
// Returns 1 once it is drained, 0 before, or a negative code. A drain has no time limit: `rpcrdma_free` ends the
// server at once.
//
// # Safety
// `server` as for `rpcrdma_free`.
int rpcrdma_local_server_drain(rpcrdma_local_server *server);

// The descriptor of a polled server or client, for epoll: readable while it is armed and has work. It closes with the
// handle.
//
// Returns the descriptor, or -EINVAL for a server or client with threads.
//
// # Safety
// `handle` as for `rpcrdma_free`.
int rpcrdma_fd(void *handle);

// Prepares a polled server or client for a sleep of at most `milliseconds` in epoll. Negative: no limit of the caller.
//
// Returns the milliseconds to sleep, rounded up; or -EAGAIN if there is work: poll instead. In either case,
// `rpcrdma_disarm` follows. Work that arrives after `rpcrdma_arm` makes the descriptor readable. -EINVAL as for
// `rpcrdma_fd`.
//
// # Safety
// `handle` as for `rpcrdma_free`.
int rpcrdma_arm(void *handle, int milliseconds);

// Ends what `rpcrdma_arm` has prepared. Returns 0, or -EINVAL as for `rpcrdma_fd`.
//
// # Safety
// `handle` as for `rpcrdma_free`.
int rpcrdma_disarm(void *handle);

// Writes the statistics of a server or client to `room` as JSON: an array with an object for each shard. At most `len`
// bytes, with the zero byte at the end.
//
// `tuning.md` has the units of its fields, and what to do about their values. `peers` has at most 64 connections of
// each shard of a server: about 1 KiB each.
//
// It blocks until each shard has answered: as long as a handler or task blocks a shard. In a handler or task of the
// same server it returns -EDEADLK, unless that runs on a worker (`RPCRDMA_ON_WORKERS`). In one of a polled server it
// returns -EBUSY: call it between polls.
//
// Returns the length of the whole, or a negative code. `room` may be NULL, or `len` 0: then only the length is
// returned. Of a client whose server or thread has ended, the array is empty.
//
// # Safety
// `handle` as for `rpcrdma_free`; `room` has `len` bytes.
int rpcrdma_stats(void *handle, char *room, size_t len);

// Writes the call's header to `info`, which has `size` bytes: `sizeof *info`. Returns 0 or a negative code of the
// handle.
//
// # Safety
// `call` is NULL, or a call that was not answered; `info` is NULL, or has `size` writable bytes.
int rpcrdma_call_header(rpcrdma_call *call, rpcrdma_call_info *info, size_t size);

// Writes the peer to `room`: its authenticated identity (`wire.host_key`), or else its IP address. At most `len`
// bytes, with the zero byte at the end. Over `soft:`, which has no addresses, it is empty without an identity.
//
// Returns the length of the whole, or a negative code of the handle. `room` may be NULL, or `len` 0.
//
// # Safety
// As for `rpcrdma_call_header`; `room` has `len` bytes.
int rpcrdma_call_peer(rpcrdma_call *call, char *room, size_t len);

// The data of Read chunk `index`, in place: an argument that the client sent by RDMA. Its bytes in `len`, its byte in
// the unreduced arguments in `position`. NULL with EINVAL if there is no such chunk: `read_chunks` of
// `rpcrdma_call_header` tells without a failure.
//
// The length of the data is among the inline arguments, and `position` counts it. Empty data has no chunk, and data in
// a call without chunks is inline.
//
// # Safety
// As for `rpcrdma_call_header`.
const void *rpcrdma_call_read_chunk(rpcrdma_call *call, unsigned int index, size_t *len, size_t *position);

// Takes the memory of Read chunk `index`, to be kept beyond the call, or lent as a result. It is only read.
//
// It is memory of the call's shard: a result of that shard's calls alone (`shard` of `rpcrdma_call_header`), unless it
// came with `reads_into`.
//
// The caller frees it. NULL with EINVAL if there is no such chunk.
//
// # Safety
// As for `rpcrdma_call_header`.
rpcrdma_buffer *rpcrdma_call_take_read_chunk(rpcrdma_call *call, unsigned int index);

// Room for `len` bytes of inline results, in the memory sent; it holds zeroes. A second call changes the length, and
// keeps what was written: it returns the same address.
//
// There is room for at least `max_reply` bytes of the procedure. 0 bytes have an address, too. NULL with EMSGSIZE if
// they exceed the room, and with EINVAL if `len` is not a multiple of 4, as XDR requires: pad with zeroes. The handler
// may then write other results. Otherwise the caller gets SYSTEM_ERR, whatever the handler returns.
//
// # Safety
// As for `rpcrdma_call_header`.
void *rpcrdma_call_reply(rpcrdma_call *call, size_t len);

// Sends `len` bytes, which are copied, as inline results, instead of `rpcrdma_call_reply`.
//
// Returns 0, -EMSGSIZE if they exceed the room, or -EINVAL if `len` is not a multiple of 4, or `results` is NULL for
// more than 0 bytes: then as for `rpcrdma_call_reply`.
//
// # Safety
// As for `rpcrdma_call_header`; `results` has `len` bytes.
int rpcrdma_call_reply_with(rpcrdma_call *call, const void *results, size_t len);

// The memory of Write chunk `index`, for a result that travels by RDMA; its bytes in `room`.
//
// It is not initialized. The handler or a device writes it; `rpcrdma_call_write_chunk_filled` says how much, after the
// last call of this function, which forgets what was filled. The length of the data belongs to the inline results.
// NULL with ENOENT if the caller offers no such chunk, or one of 0 bytes, which asks for the data inline (RFC 8166
// §4.3.2.3): then the data belongs there, too. NULL with EINVAL if it offers the chunk, and the handler has no memory
// to write: the procedure has `RPCRDMA_OWN_RESULTS`, or the chunk has a buffer of `rpcrdma_call_result`.
//
// If `room` is too short for the data, the handler writes nothing, and returns what
// `rpcrdma_call_write_chunk_filled(call, index, len)` returns. A code of its own would be SYSTEM_ERR.
//
// # Safety
// As for `rpcrdma_call_header`.
void *rpcrdma_call_write_chunk(rpcrdma_call *call, unsigned int index, size_t *room);

// Sends the first `len` bytes of Write chunk `index`: with 0, an empty result.
//
// Returns 0, -ENOENT or -EINVAL as for `rpcrdma_call_write_chunk`, or -EMSGSIZE if the chunk is shorter. The handler
// may return that; if it returns 0 without having sent other data in this chunk, that means the same. In version 2,
// the client then retransmits the call with a longer chunk, and the handler runs again. In version 1, the call fails
// with EPROTO.
//
// # Safety
// As for `rpcrdma_call_header`. The bytes were written for this call, completely: others would be another client's.
int rpcrdma_call_write_chunk_filled(rpcrdma_call *call, unsigned int index, size_t len);

// Sends a buffer as the result in Write chunk `index`, without a copy: memory of the application, a Read chunk that
// was taken, or a part of either. The buffer ends, also after a failure.
//
// Returns 0, -ENOENT if the caller offers no such chunk, -EMSGSIZE if it is shorter (as for
// `rpcrdma_call_write_chunk_filled`), or -EXDEV for a Read chunk of another shard or server, and for a client's
// buffer: copy those. With -ENOENT the data belongs to the inline results: have a further part of it while they are
// written. An arena that the server has not registered (`rpcrdma_config_arena`) is seen later: the caller gets
// SYSTEM_ERR, and the log has the cause.
//
// # Safety
// As for `rpcrdma_call_header`; `buffer` as for `rpcrdma_free`. Its bytes do not change until the reply was sent:
// `release` of `rpcrdma_arena_part` tells.
int rpcrdma_call_result(rpcrdma_call *call, unsigned int index, rpcrdma_buffer *buffer);

// Answers a deferred call, from any thread. The call ends.
//
// `status` is 0 for the results written, an `RPCRDMA_` status, or the negative code of a function that has failed for
// this call. Nothing happens if the connection has closed.
//
// Returns 0; -EBADF if it was answered before, as far as that can be seen; -EINVAL for a call that its handler answers
// by its result.
//
// # Safety
// As for `rpcrdma_call_header`. Nobody writes its results any more.
int rpcrdma_call_answer(rpcrdma_call *call, int status);

// 1 if the connection of a deferred call has closed, so that nobody awaits the reply; else 0, or a negative code. Such
// a call is answered all the same.
//
// # Safety
// As for `rpcrdma_call_header`.
int rpcrdma_call_is_disconnected(rpcrdma_call *call);

// A buffer of `len` bytes for a chunk of a call of this client, registered with its device.
//
// `client` is a `rpcrdma_client` or a `rpcrdma_local_client`. The buffer has zeroes, or data of earlier calls to this
// server. `rpcrdma_free` ends it, or the call that it is lent to.
//
// NULL after a failure:
// - EINVAL: `len` is 0, as for mmap: no chunk is empty;
// - ENOBUFS: the client has no such buffer left now (`memory.bulk_buffers`);
// - EMSGSIZE: it never has one so long;
// - ENOMEM, EMFILE, ENFILE or EFBIG: the system refuses the memory of all its buffers, by the limit that the text
//   names; the next call asks again;
// - ENOTCONN: the connection has ended;
// - EDEADLK: as for `rpcrdma_client_call`.
//
// # Safety
// `client` as for `rpcrdma_free`.
rpcrdma_buffer *rpcrdma_alloc(void *client, size_t len);

// The bytes of a buffer; their number in `len`. NULL with a code of the handle. Those of
// `rpcrdma_call_take_read_chunk` and of `rpcrdma_arena_part` are only read. 0 bytes have an address, too.
//
// # Safety
// `buffer` as for `rpcrdma_free`.
void *rpcrdma_buffer_data(rpcrdma_buffer *buffer, size_t *len);

// Restricts a buffer to `len` bytes from byte `start`: of its whole memory, or of its present bytes if it is only
// read. A buffer of 0 bytes is an empty result (`rpcrdma_call_result`), and no chunk of a request.
//
// Returns 0, or -EINVAL if it has fewer.
//
// # Safety
// `buffer` as for `rpcrdma_free`.
int rpcrdma_buffer_window(rpcrdma_buffer *buffer, size_t start, size_t len);

// Adopts memory that the application has mapped: to send it as results (`rpcrdma_arena_part`), or for Read chunks
// (`reads_into` of a procedure), not both. From 4 GiB on, it is for Read chunks alone.
//
// `base` and `len` are multiples of 4096. `release` is called once when no server, client, services or buffer uses it
// any more, on any thread, with `context`; it may be NULL. Servers register it: `rpcrdma_config_arena`, or because
// their procedures have it.
//
// NULL with EINVAL if `base` is NULL, if one of them is not such a multiple, if `len` is 0, or if the memory would end
// beyond the address space; `release` is called then, too.
//
// # Safety
// The memory stays mapped until `release` is called, and no part of it changes while it is lent.
rpcrdma_arena *rpcrdma_arena_new(void *base, size_t len, void (*release)(void *context), void *context);

// A buffer of `len` bytes from byte `start` of the application's memory. Parts may overlap. One of 0 bytes is an empty
// result.
//
// `release` is called once when nobody uses the part any more, with `context`; it may be NULL. The part's bytes may
// change from then on. After `rpcrdma_call_result`, that is when the reply was sent, or its connection has ended. A
// peer that takes nothing delays it for `timeouts.progress`, a slow one as long as it keeps to `limits.min_rate`.
//
// It is called on any thread, within any function of this library: it is short, and does not wait. Hold no lock that
// it takes while you call this library. It may write the part's bytes, answer calls, and lend parts. The arena's own
// `release` comes after those of all parts.
//
// NULL with EINVAL if the arena has fewer bytes, or with EBUSY if it is for Read chunks, as it is from 4 GiB on;
// `release` is called then, too.
//
// # Safety
// `arena` as for `rpcrdma_free`. The bytes do not change while they are lent.
rpcrdma_buffer *rpcrdma_arena_part(rpcrdma_arena *arena,
                                   size_t start,
                                   size_t len,
                                   void (*release)(void *context),
                                   void *context);

// Detaches a polled server or client from the calling thread: `rpcrdma_attach` gives it to another one. Until then
// only that function and `rpcrdma_free` may be used with it. The end of a thread detaches all that it has.
//
// A detached handle is not polled: attach it soon, as a loop polls 20 times a second. Until then its connections stand
// still: calls and allocations through its server's clients (`rpcrdma_local_server_call_back`) wait, whatever their
// time-outs.
//
// Returns 0, or -EPERM on another thread than its own; -EBUSY in its own functions: a handler of the server, or one
// that gets the ends of the client's calls.
//
// # Safety
// `handle` as for `rpcrdma_free`.
int rpcrdma_detach(void *handle);

// Gives a polled server or client to the calling thread: one that was detached by `rpcrdma_detach`, or by the end of
// its thread.
//
// Returns 0, also if the calling thread has it already, or -EPERM if another thread has it. Of several threads that
// attach it at once, one wins.
//
// # Safety
// `handle` as for `rpcrdma_free`.
int rpcrdma_attach(void *handle);

// Connects to a server, for calls of `program` and `version`; blocks. The client has a thread of its own.
//
// `address` is `soft:NAME`, `iwarp:HOST[:PORT]` or `verbs:HOST[:PORT]`. `config` may be NULL. NULL after a failure:
//
// - ECONNREFUSED: nobody listens at the address, there is no such host, or the server takes no more connections;
// - ETIMEDOUT: the server did not answer in time (the text names the knob);
// - EAGAIN: the server has no receives left for one more connection: try again later, or raise its `memory.receives`;
// - ECONNRESET: the server closed the connection before it was established;
// - EKEYREJECTED: a host key is missing or wrong (`wire.host_key`, at this side or at the server): no call was
//   executed, and a retry fails in the same way;
// - EPROTO: the peer broke the protocol;
// - EINVAL: an argument or a knob;
// - EADDRNOTAVAIL, ENOMEM, EAGAIN, EFBIG, EMFILE, ENFILE, ENOSPC, ENODEV and EIO as for `rpcrdma_server_start`; the
//   text tells which EAGAIN it is.
//
// # Safety
// `address` ends with a zero byte; `config` as for `rpcrdma_free`.
rpcrdma_client *rpcrdma_client_connect(const char *address, uint32_t program, uint32_t version, rpcrdma_config *config);

// A handle of the same connection for another thread, or NULL. The connection closes when the last one is freed.
//
// The thread that uses `client` calls this function, and passes the new handle on. NULL after a failure: EINVAL,
// EBADF, or EBUSY because another thread uses `client` now.
//
// # Safety
// `client` as for `rpcrdma_free`.
rpcrdma_client *rpcrdma_client_share(rpcrdma_client *client);

// Makes a call, and blocks until its end.
//
// Returns 0 or a negative code: ETIMEDOUT, ECONNRESET (the connection was lost), EKEYREJECTED (the server has
// restarted and refuses the host key: not executed, and a retry is pointless), ENOTCONN, EAGAIN (`limits.max_calls`),
// ENOBUFS and EMSGSIZE (a knob that the text names), ENOMEM, EMFILE, ENFILE and EFBIG (the system refuses memory for
// chunks, by the limit that the text names), EREMOTEIO (the server refused it: `rpcrdma_reply_status`), EACCES (it
// refused the credential), EBUSY (it drains, or has no memory), EPROTO (a malformed reply, a server that refuses
// version 1, or another transport error), EOPNOTSUPP (a call back to a client that takes none: it has no
// `rpcrdma_config_callbacks`, or its `debug.reverse` is `none`), EINVAL.
//
// EDEADLK: a handler or task on the shard of the connection would wait for itself, as would the thread that polls its
// server (`rpcrdma_local_server_call_back`). Use `rpcrdma_client_start` there.
//
// A server that answers EBUSY has not run the call, unless the reply itself found no memory: try again later. EBUSY
// without a reply: another thread uses `client` now.
//
// ETIMEDOUT does not tell whether the call was sent: the text does. A call that waited in vain for a credit was not
// sent, and its text says that all credits are in use.
//
// `*reply` is the reply if the call has started, also if it failed then, and else NULL. `rpcrdma_free` ends it.
// `reply` may be NULL.
//
// The buffers of its chunks stay with the caller if `*reply` is NULL, as after each EINVAL, EBADF, EPERM and EDEADLK.
// Otherwise the reply has them, also of a call that ended with EAGAIN, ENOTCONN, ENOBUFS or EMSGSIZE without being
// sent; without `reply` they are freed. A caller with buffers in its request passes `reply`, because other codes alone
// do not tell.
//
// # Safety
// As for `rpcrdma_local_client_start`; `reply` is writable.
int rpcrdma_client_call(rpcrdma_client *client, const rpcrdma_request *request, rpcrdma_reply **reply);

// Starts a call without blocking; `rpcrdma_client_poll` reports its end, once. A Read chunk that is to be copied waits
// for the connection's thread to allocate its memory.
//
// Also on the thread that runs the connection: in handlers of a server that calls back, and where a server is polled.
// There a Read chunk cannot be copied (EDEADLK).
//
// Returns 0, or a negative code if it does not start: EAGAIN (`limits.max_calls`; for calls of a server
// `debug.reverse_credits`), ENOTCONN (the thread of the connection has stopped), EINVAL, EMSGSIZE; and for a Read
// chunk to be copied those of `rpcrdma_alloc`. Then the buffers of its chunks stay with the caller.
//
// The connection's thread finds other causes, which the poll reports, and the buffers are in that reply: such is
// ENOTCONN without a connection, or EINVAL for the position of a chunk, a buffer of another client, or a one-way call
// that has chunks.
//
// # Safety
// As for `rpcrdma_local_client_start`.
int rpcrdma_client_start(rpcrdma_client *client, const rpcrdma_request *request);

// Passes each started call that has ended to `done`. Never blocks. If `done` is NULL, ended calls are left to the next
// poll with a function.
//
// Calls of `rpcrdma_local_server_call_back` end in polls of the server: poll the client after each. The function may
// start calls, whose ends are for later polls, and end the client. The calls that this poll has found are reported all
// the same. Calls of a client that ends are not reported any more.
//
// Returns 1 if a call has ended, 0 if not, or a negative code of the handle.
//
// # Safety
// `client` as for `rpcrdma_free`; `done` may be called with `context`.
int rpcrdma_client_poll(rpcrdma_client *client, rpcrdma_done done, void *context);

// Writes to `room` why a client's connection has closed, as text with a zero byte, of at most `len` bytes.
//
// `client` is a `rpcrdma_client` or a `rpcrdma_local_client`. Returns the length of the whole; 0 while it is open, and
// while the client reconnects; or a negative code of the handle. `room` may be NULL, or `len` 0.
//
// # Safety
// `client` as for `rpcrdma_free`; `room` has `len` bytes.
int rpcrdma_close_reason(void *client, char *room, size_t len);

// Connects to a server, for calls of `program` and `version`; blocks until connected. The client has no thread:
// nothing happens unless it is polled.
//
// As for `rpcrdma_client_connect`.
//
// # Safety
// As for `rpcrdma_client_connect`.
rpcrdma_local_client *rpcrdma_local_client_connect(const char *address,
                                                   uint32_t program,
                                                   uint32_t version,
                                                   rpcrdma_config *config);

// As `rpcrdma_local_client_connect`, but does not block: poll it until `rpcrdma_local_client_is_established` is not 0.
//
// The first connect is tried once. If it fails, this returns NULL, or `rpcrdma_local_client_is_established` -ENOTCONN.
//
// # Safety
// As for `rpcrdma_client_connect`.
rpcrdma_local_client *rpcrdma_local_client_begin(const char *address,
                                                 uint32_t program,
                                                 uint32_t version,
                                                 rpcrdma_config *config);

// 1 once calls may be started, 0 while the client connects, -ENOTCONN if its connection has ended: the text says why.
//
// `rpcrdma_local_client_poll` does not tell: it returns 0 then. Calls that are started while the client reconnects
// (`connect.reconnect_attempts`) are sent once it has.
//
// # Safety
// `client` as for `rpcrdma_free`.
int rpcrdma_local_client_is_established(rpcrdma_local_client *client);

// Starts a call; `rpcrdma_local_client_poll` reports its end, once.
//
// Returns 0, or a negative code if it does not start: ENOBUFS (poll, and try again) and EMSGSIZE, for lack of memory
// for the call, its chunks or its reply (the text names the knob); ENOMEM, EMFILE, ENFILE and EFBIG as for
// `rpcrdma_alloc`; EINVAL; and ENOTCONN for a Read chunk that it would copy. The poll reports no end of such a call,
// and the buffers of its chunks stay with the caller. `xid`, unless it is NULL, gets the call's number, for
// `rpcrdma_local_client_cancel`, or 0 if it has ended already.
//
// The poll reports other causes, and this function returns 0: ENOTCONN, EAGAIN (`limits.max_calls`), and what a call
// meets that waits for a reconnect. The buffers are in that reply.
//
// # Safety
// `client` and the buffers of `request` as for `rpcrdma_free`; its pointers have what it says; `xid` is writable.
int rpcrdma_local_client_start(rpcrdma_local_client *client, const rpcrdma_request *request, uint32_t *xid);

// Cancels a call: it ends with -ECANCELED, if it is still under way. The server may have run it.
//
// Returns 0, also if there is no such call, or a negative code of the handle. The call keeps its credit, as after a
// time-out.
//
// # Safety
// `client` as for `rpcrdma_free`.
int rpcrdma_local_client_cancel(rpcrdma_local_client *client, uint32_t xid);

// Turns the client once, and passes each call that has ended to `done`. Never blocks. Calls that `done` starts, and
// that end at once, are reported by the next poll. If `done` is NULL, ended calls are left to the next poll with a
// function.
//
// All functions of a poll together are the time between two polls: a loop polls at least 20 times a second.
//
// Returns 1 if there was work or a call has ended, 0 if not, or a negative code of the handle.
//
// # Safety
// `client` as for `rpcrdma_free`; `done` may be called with `context`.
int rpcrdma_local_client_poll(rpcrdma_local_client *client, rpcrdma_done done, void *context);

// The inline results, in place; their bytes in `len`. NULL for a call that has failed, with its code, as
// `rpcrdma_client_call` returns it.
//
// # Safety
// `reply` as for `rpcrdma_free`.
const void *rpcrdma_reply_results(rpcrdma_reply *reply, size_t *len);

// Why the server refused the call: `RPCRDMA_PROG_UNAVAIL` and others, as handlers return them. 0 if it did not.
//
// Negative for a call that has failed otherwise, as `rpcrdma_client_call` returns it. So is a refusal for another
// version of RPC itself.
//
// # Safety
// `reply` as for `rpcrdma_free`.
int rpcrdma_reply_status(rpcrdma_reply *reply);

// Takes the buffer of Write chunk `index`, as long as its data. Also of a failed call, where the server can no longer
// reach it.
//
// NULL with EINVAL if there is none; so after a time-out or a cancel, while the server may still answer.
//
// # Safety
// `reply` as for `rpcrdma_free`.
rpcrdma_buffer *rpcrdma_reply_take_write_chunk(rpcrdma_reply *reply, unsigned int index);

// Takes the buffer of Read chunk `index`, for the next call. As for `rpcrdma_reply_take_write_chunk`.
//
// # Safety
// `reply` as for `rpcrdma_free`.
rpcrdma_buffer *rpcrdma_reply_take_read_chunk(rpcrdma_reply *reply, unsigned int index);

// Keeps the reply that a callback got, beyond the callback. `rpcrdma_free` ends it. NULL with EINVAL if it was kept
// already.
//
// It holds a buffer of the client, which has at least `memory.receives`. While none is left, no reply arrives: the
// calls time out, and the server ends the connection. Copy results to keep them long.
//
// # Safety
// `reply` is the callback's.
rpcrdma_reply *rpcrdma_reply_keep(rpcrdma_reply *reply);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* RPCRDMA_H */
