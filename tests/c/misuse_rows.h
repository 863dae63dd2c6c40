// Misuses of each function: ROW(function, number, result, is_certain, expression).
//
// Where `is_certain` is 1, the arguments prove the misuse, so the checked build ends the process.
// `tests/c/run` checks that each function has a row.

ROW(rpcrdma_version, 1, 0, 0, rpcrdma_version() == NULL)
ROW(rpcrdma_error, 1, 0, 0, rpcrdma_error() == NULL)
ROW(rpcrdma_error, 2, 1, 0, is_text_overwritten_in_place())

ROW(rpcrdma_log, 1, -EINVAL, 0, rpcrdma_log(NULL, NULL, 1))
ROW(rpcrdma_log, 2, -EBUSY, 0, rpcrdma_log(count_line, NULL, 1))
ROW(rpcrdma_log, 3, -EINVAL, 0, rpcrdma_log(count_line, NULL, 5))
ROW(rpcrdma_log, 4, -EINVAL, 0, rpcrdma_log(count_line, NULL, -1))

ROW(rpcrdma_free, 1, 0, 0, rpcrdma_free(NULL))
ROW(rpcrdma_free, 2, -EBADF, 1, rpcrdma_free(S.freed))
ROW(rpcrdma_free, 3, -EBADF, 1, rpcrdma_free(S.memory))
ROW(rpcrdma_free, 4, -EBADF, 1, rpcrdma_free((char *)S.memory + 1))
ROW(rpcrdma_free, 5, -EINVAL, 0, rpcrdma_free(S.call))
ROW(rpcrdma_free, 6, -EPERM, 0, run_on_other_thread(free_local_client))
ROW(rpcrdma_free, 7, -EINVAL, 0, S.freed_in_callback)

ROW(rpcrdma_config_new, 1, 0, 0, rpcrdma_free(rpcrdma_config_new()))

ROW(rpcrdma_config_set, 1, -EINVAL, 0, rpcrdma_config_set(NULL, "limits.credits", "1"))
ROW(rpcrdma_config_set, 2, -EINVAL, 0, rpcrdma_config_set(S.config, NULL, "1"))
ROW(rpcrdma_config_set, 3, -EINVAL, 0, rpcrdma_config_set(S.config, "limits.credits", NULL))
ROW(rpcrdma_config_set, 4, -EINVAL, 0, rpcrdma_config_set(S.config, "limits.nothing", "1"))
ROW(rpcrdma_config_set, 5, -EINVAL, 0, rpcrdma_config_set(S.config, "nothing", "1"))
ROW(rpcrdma_config_set, 6, -EINVAL, 0, rpcrdma_config_set(S.config, "", ""))
ROW(rpcrdma_config_set, 7, -EINVAL, 0, rpcrdma_config_set(S.config, "limits.credits", "0"))
ROW(rpcrdma_config_set, 8, -EINVAL, 0, rpcrdma_config_set(S.config, "limits.credits", "-1"))
ROW(rpcrdma_config_set, 9, -EINVAL, 0, rpcrdma_config_set(S.config, "limits.credits", "\xff"))
ROW(rpcrdma_config_set, 10, -EINVAL, 0, rpcrdma_config_set(S.config, "server.cores", "0,"))
ROW(rpcrdma_config_set, 11, -EINVAL, 0, rpcrdma_config_set(S.config, "client.auth_sys", "0"))
ROW(rpcrdma_config_set, 12, -EINVAL, 0, rpcrdma_config_set(S.config, "wire.host_key", "me:0"))
ROW(rpcrdma_config_set, 13, -EINVAL, 0, rpcrdma_config_set(S.config, "wire.host_key", "me:\xc3\xa4\xc3\xa4"))
ROW(rpcrdma_config_set, 14, -EBADF, 1, rpcrdma_config_set((rpcrdma_config *)S.services, "limits.credits", "1"))
ROW(rpcrdma_config_set, 15, -EINVAL, 0, rpcrdma_config_set(S.config, "keep_alive", "30s"))

ROW(rpcrdma_config_set, 16, -EINVAL, 0, rpcrdma_config_set(S.config, "limits.credits", "64\n[limits]\nmax_calls = 1"))

ROW(rpcrdma_config_set, 17, -EINVAL, 0, rpcrdma_config_set(S.config, "server.shards", "0"))
ROW(rpcrdma_config_set, 18, -EINVAL, 0, rpcrdma_config_set(S.config, "server.shards", "1025"))
ROW(rpcrdma_config_set, 19, -EINVAL, 0, rpcrdma_config_set(S.config, "server.cores", "0,1024"))
ROW(rpcrdma_config_set, 20, -EINVAL, 0, rpcrdma_config_set(S.config, "server.workers", "1025"))
ROW(rpcrdma_config_set, 21, -EINVAL, 0, rpcrdma_config_set(S.config, "accept.setup", "0s"))
ROW(rpcrdma_config_set, 22, -EINVAL, 0, rpcrdma_config_set(S.config, "connect.timeout", "0s"))
ROW(rpcrdma_config_set, 23, 0, 0, rpcrdma_config_set(S.config, "connect.timeout", "5s"))
ROW(rpcrdma_config_set, 24, -EINVAL, 0, rpcrdma_config_set(S.config, "poll.core", "1024"))
ROW(rpcrdma_config_set, 25, -EINVAL, 0, rpcrdma_config_set(S.config, "memory.budget", "256TiB"))
ROW(rpcrdma_config_set, 26, -EINVAL, 0,
    rpcrdma_config_set(S.config, "memory.bulk_buffers", "[[1073741824, 16777216]]"))

ROW(rpcrdma_config_load, 1, -EINVAL, 0, rpcrdma_config_load(NULL, "/dev/null"))
ROW(rpcrdma_config_load, 2, -EINVAL, 0, rpcrdma_config_load(S.config, NULL))
ROW(rpcrdma_config_load, 3, -ENOENT, 0, rpcrdma_config_load(S.config, "/nowhere/at.all"))
ROW(rpcrdma_config_load, 4, -EINVAL, 0, rpcrdma_config_load(S.config, "/proc/self/cmdline"))

ROW(rpcrdma_config_callbacks, 1, -EINVAL, 0, rpcrdma_config_callbacks(NULL, S.services))
ROW(rpcrdma_config_callbacks, 2, -EINVAL, 0, rpcrdma_config_callbacks(S.config, NULL))
ROW(rpcrdma_config_callbacks, 3, -EBADF, 1, rpcrdma_config_callbacks(S.config, (rpcrdma_services *)S.config2))

ROW(rpcrdma_config_arena, 1, -EINVAL, 0, rpcrdma_config_arena(NULL, S.arena))
ROW(rpcrdma_config_arena, 2, -EINVAL, 0, rpcrdma_config_arena(S.config, NULL))

ROW(rpcrdma_config_arena, 3, 0, 0, add_arena_twice())

ROW(rpcrdma_services_new, 1, 0, 0, rpcrdma_free(rpcrdma_services_new()))

ROW(rpcrdma_services_add, 1, -EINVAL, 0, rpcrdma_services_add(NULL, 1, 1, TABLE, 1, sizeof *TABLE))
ROW(rpcrdma_services_add, 2, -EINVAL, 0, rpcrdma_services_add(S.services, 1, 1, NULL, 1, sizeof *TABLE))
ROW(rpcrdma_services_add, 3, -EINVAL, 0, rpcrdma_services_add(S.services, 1, 1, TABLE, 0, sizeof *TABLE))
ROW(rpcrdma_services_add, 4, -EINVAL, 0, rpcrdma_services_add(S.services, 1, 1, TABLE, 1, sizeof *TABLE - 1))
ROW(rpcrdma_services_add, 5, -EINVAL, 0, add((rpcrdma_procedure){.number = 1}))
ROW(rpcrdma_services_add, 6, -EINVAL, 0, add((rpcrdma_procedure){.handler = empty, .deferred = keep_first_call}))
ROW(rpcrdma_services_add, 7, -EINVAL, 0, add((rpcrdma_procedure){.handler = empty, .number = 100000}))
ROW(rpcrdma_services_add, 8, -EINVAL, 0, add((rpcrdma_procedure){.handler = empty, .read_chunks = 99}))
ROW(rpcrdma_services_add, 9, -EINVAL, 0, add((rpcrdma_procedure){.handler = empty, .flags = 1u << 31}))
ROW(rpcrdma_services_add, 10, -EINVAL, 0,
    add((rpcrdma_procedure){.deferred = keep_first_call, .flags = RPCRDMA_ON_WORKERS}))
ROW(rpcrdma_services_add, 11, -EINVAL, 0,
    add((rpcrdma_procedure){.handler = empty, .flags = RPCRDMA_CACHED, .write_chunks = 1, .max_write = 1}))
ROW(rpcrdma_services_add, 12, -EINVAL, 0, add((rpcrdma_procedure){.handler = empty, .reads_into = S.for_reads}))
ROW(rpcrdma_services_add, 13, -EINVAL, 0,
    add((rpcrdma_procedure){.handler = empty, .read_chunks = 1, .max_read = 1 << 21, .reads_into = S.for_reads}))
ROW(rpcrdma_services_add, 14, -EBUSY, 0,
    add((rpcrdma_procedure){.handler = empty, .read_chunks = 1, .max_read = 1, .reads_into = S.arena}))
ROW(rpcrdma_services_add, 15, -EBADF, 1,
    add((rpcrdma_procedure){.handler = empty, .read_chunks = 1, .max_read = 1, .reads_into = (rpcrdma_arena *)S.config}))
ROW(rpcrdma_services_add, 16, -EINVAL, 0, rpcrdma_services_add(S.services, 1, 1, TABLE, SIZE_MAX, sizeof *TABLE))
ROW(rpcrdma_services_add, 17, -EINVAL, 0,
    rpcrdma_services_add(S.services, 1, 1, TABLE, SIZE_MAX / sizeof *TABLE, sizeof *TABLE))
ROW(rpcrdma_services_add, 18, -EINVAL, 0,
    rpcrdma_services_add(S.services, 1, 1, (void *)((char *)S.memory + 1), 1, sizeof *TABLE))
ROW(rpcrdma_services_add, 19, -EEXIST, 0, rpcrdma_services_add(S.services, PROGRAM, 1, TABLE + 1, 1, sizeof *TABLE))
ROW(rpcrdma_services_add, 20, -EEXIST, 0,
    rpcrdma_services_add(S.services2, 1, 1, (rpcrdma_procedure[]){TABLE[0], TABLE[0]}, 2, sizeof *TABLE))
// The first of the two procedures was added.
ROW(rpcrdma_services_add, 28, -EEXIST, 0, rpcrdma_services_add(S.services2, 1, 1, TABLE, 1, sizeof *TABLE))
ROW(rpcrdma_services_add, 21, -EINVAL, 0, add((rpcrdma_procedure){.handler = empty, .read_chunks = 1}))
ROW(rpcrdma_services_add, 22, -EINVAL, 0, add((rpcrdma_procedure){.handler = empty, .max_read = 1}))
ROW(rpcrdma_services_add, 23, -EINVAL, 0, add((rpcrdma_procedure){.handler = empty, .write_chunks = 1}))
ROW(rpcrdma_services_add, 24, -EINVAL, 0, add((rpcrdma_procedure){.handler = empty, .max_write = 1}))
ROW(rpcrdma_services_add, 25, -EINVAL, 0, add((rpcrdma_procedure){.handler = empty, .max_reply = SIZE_MAX}))
ROW(rpcrdma_services_add, 26, -EINVAL, 0,
    add((rpcrdma_procedure){.handler = empty, .read_chunks = 1, .max_read = SIZE_MAX}))
ROW(rpcrdma_services_add, 27, -EINVAL, 0,
    add((rpcrdma_procedure){.handler = empty, .write_chunks = 1, .max_write = SIZE_MAX}))

ROW(rpcrdma_services_task, 1, -EINVAL, 0, rpcrdma_services_task(NULL, no_work, NULL, NULL))
ROW(rpcrdma_services_task, 2, -EINVAL, 0, rpcrdma_services_task(S.services, NULL, NULL, NULL))

ROW(rpcrdma_services_peers, 1, -EINVAL, 0, rpcrdma_services_peers(NULL, no_peers, NULL))
ROW(rpcrdma_services_peers, 2, -EINVAL, 0, rpcrdma_services_peers(S.services, NULL, NULL))
ROW(rpcrdma_services_peers, 3, -EBADF, 1, rpcrdma_services_peers((rpcrdma_services *)S.config, no_peers, NULL))

ROW(rpcrdma_server_start, 1, 0, 0, rpcrdma_server_start(NULL, S.services, S.config))
ROW(rpcrdma_server_start, 2, 0, 0, rpcrdma_server_start("", S.services, S.config))
ROW(rpcrdma_server_start, 3, 0, 0, rpcrdma_server_start("nothing:here", S.services, S.config))
ROW(rpcrdma_server_start, 4, 0, 0, rpcrdma_server_start("soft:a,", S.services, S.config))
ROW(rpcrdma_server_start, 5, 0, 0, rpcrdma_server_start(ADDRESS, NULL, S.config))
ROW(rpcrdma_server_start, 6, 0, 0, rpcrdma_server_start(ADDRESS, S.services, S.config))
ROW(rpcrdma_server_start, 7, 0, 1, rpcrdma_server_start("soft:b", S.services, (rpcrdma_config *)S.services2))

ROW(rpcrdma_server_start, 8, -EADDRINUSE, 0, start_server(ADDRESS, "limits.credits", "8"))
ROW(rpcrdma_server_start, 9, -ENOENT, 0, start_server("soft:b", "server.stats", "/nowhere/at.all"))
ROW(rpcrdma_server_start, 10, -EINVAL, 0, start_server("soft:a,soft:b", "server.shards", "1"))
ROW(rpcrdma_server_start, 11, -EINVAL, 0, start_server("soft:a,soft:b", "server.cores", "0"))
ROW(rpcrdma_server_start, 12, -EINVAL, 0, start_server("soft:a", "memory.numa_node", "1023"))

ROW(rpcrdma_server_call_back, 1, 0, 0, rpcrdma_server_call_back(NULL, S.call, 1, 1, NULL))
ROW(rpcrdma_server_call_back, 2, 0, 0, rpcrdma_server_call_back(S.server, NULL, 1, 1, NULL))
ROW(rpcrdma_server_call_back, 3, 0, 1, rpcrdma_server_call_back(S.server, S.answered, 1, 1, NULL))

ROW(rpcrdma_server_drain, 1, -EINVAL, 0, rpcrdma_server_drain(NULL, 1))
ROW(rpcrdma_server_drain, 2, -EBADF, 1, rpcrdma_server_drain((rpcrdma_server *)S.client, 1))
ROW(rpcrdma_server_drain, 3, -EBADF, 1, rpcrdma_server_drain(S.drained, 1))

ROW(rpcrdma_local_server_start, 1, 0, 0, rpcrdma_local_server_start(NULL, S.services, S.config))
ROW(rpcrdma_local_server_start, 2, 0, 0, rpcrdma_local_server_start("soft:a,soft:b", S.services, S.config))
ROW(rpcrdma_local_server_start, 3, 0, 0, rpcrdma_local_server_start("soft:c", NULL, S.config))
ROW(rpcrdma_local_server_start, 4, 0, 0, rpcrdma_local_server_start("soft:d", S.with_task, S.config))

ROW(rpcrdma_local_server_start, 5, -EINVAL, 0, start_local_server("server.shards", "2"))
ROW(rpcrdma_local_server_start, 6, -EINVAL, 0, start_local_server("server.cores", "0"))
ROW(rpcrdma_local_server_start, 7, -EINVAL, 0, start_local_server("server.stats", "/tmp/stats"))
ROW(rpcrdma_local_server_start, 8, -EINVAL, 0, start_local_server("poll.core", "0"))

ROW(rpcrdma_local_server_poll, 1, -EINVAL, 0, rpcrdma_local_server_poll(NULL))
ROW(rpcrdma_local_server_poll, 2, -EPERM, 0, run_on_other_thread(poll_local_server))
ROW(rpcrdma_local_server_poll, 3, -EBADF, 1, rpcrdma_local_server_poll((rpcrdma_local_server *)S.server))

ROW(rpcrdma_local_server_drain, 1, -EINVAL, 0, rpcrdma_local_server_drain(NULL))
ROW(rpcrdma_local_server_drain, 2, -EPERM, 0, run_on_other_thread(drain_local_server))

ROW(rpcrdma_fd, 1, -EINVAL, 0, rpcrdma_fd(NULL))
ROW(rpcrdma_fd, 2, -EINVAL, 0, rpcrdma_fd(S.server))
ROW(rpcrdma_fd, 3, -EBADF, 1, rpcrdma_fd(S.config))

ROW(rpcrdma_arm, 1, -EINVAL, 0, rpcrdma_arm(NULL, 1))
ROW(rpcrdma_arm, 2, -EINVAL, 0, rpcrdma_arm(S.client, 1))

ROW(rpcrdma_disarm, 1, -EINVAL, 0, rpcrdma_disarm(NULL))
ROW(rpcrdma_disarm, 2, 0, 0, rpcrdma_disarm(S.local_server))

ROW(rpcrdma_stats, 1, -EINVAL, 0, rpcrdma_stats(NULL, NULL, 0))
ROW(rpcrdma_stats, 2, -EBADF, 1, rpcrdma_stats(S.services, NULL, 0))
ROW(rpcrdma_stats, 3, 1, 0, rpcrdma_stats(S.server, NULL, 99) > 99)
ROW(rpcrdma_stats, 4, -EBADF, 1, rpcrdma_stats(S.drained, NULL, 0))

ROW(rpcrdma_call_header, 1, -EINVAL, 0, rpcrdma_call_header(NULL, NULL, 0))
ROW(rpcrdma_call_header, 2, 0, 0, rpcrdma_call_header(S.call, NULL, 0))
ROW(rpcrdma_call_header, 3, -EBADF, 1, rpcrdma_call_header(S.answered, NULL, 0))
ROW(rpcrdma_call_header, 4, 0, 0, shard_of(S.call))
ROW(rpcrdma_call_header, 5, 0, 0, check_info_sizes(S.call))

ROW(rpcrdma_call_peer, 1, -EINVAL, 0, rpcrdma_call_peer(NULL, NULL, 0))
ROW(rpcrdma_call_peer, 2, 0, 0, rpcrdma_call_peer(S.call, NULL, 0))

ROW(rpcrdma_call_read_chunk, 1, 0, 0, rpcrdma_call_read_chunk(NULL, 0, NULL, NULL))
ROW(rpcrdma_call_read_chunk, 2, 0, 0, rpcrdma_call_read_chunk(S.call, 0, NULL, NULL))
ROW(rpcrdma_call_read_chunk, 3, 0, 0, rpcrdma_call_read_chunk(S.call, ~0u, NULL, NULL))

ROW(rpcrdma_call_take_read_chunk, 1, 0, 0, rpcrdma_call_take_read_chunk(NULL, 0))
ROW(rpcrdma_call_take_read_chunk, 2, 0, 0, rpcrdma_call_take_read_chunk(S.call, 0))

ROW(rpcrdma_call_reply, 1, 0, 0, rpcrdma_call_reply(NULL, 4))
ROW(rpcrdma_call_reply, 2, 0, 0, rpcrdma_call_reply(S.call, 1 << 30))
ROW(rpcrdma_call_reply, 3, 0, 0, rpcrdma_call_reply(S.call, SIZE_MAX))
ROW(rpcrdma_call_reply, 4, 1, 0, rpcrdma_call_reply(S.call, 0) != NULL)

ROW(rpcrdma_call_reply_with, 1, -EINVAL, 0, rpcrdma_call_reply_with(NULL, "", 1))
ROW(rpcrdma_call_reply_with, 2, -EINVAL, 0, rpcrdma_call_reply_with(S.call, NULL, 1))
ROW(rpcrdma_call_reply_with, 3, -EMSGSIZE, 0, rpcrdma_call_reply_with(S.call, S.memory, 1 << 20))
ROW(rpcrdma_call_reply_with, 4, -EBADF, 1, rpcrdma_call_reply_with(S.answered, "", 1))

ROW(rpcrdma_call_reply_with, 5, -EINVAL, 0, rpcrdma_call_reply_with(S.call, S.memory, SIZE_MAX))

ROW(rpcrdma_call_write_chunk, 1, 0, 0, rpcrdma_call_write_chunk(NULL, 0, NULL))
ROW(rpcrdma_call_write_chunk, 2, 0, 0, rpcrdma_call_write_chunk(S.call, 7, NULL))

ROW(rpcrdma_call_write_chunk_filled, 1, -EINVAL, 0, rpcrdma_call_write_chunk_filled(NULL, 0, 0))
ROW(rpcrdma_call_write_chunk_filled, 2, -ENOENT, 0, rpcrdma_call_write_chunk_filled(S.call, 7, 0))
ROW(rpcrdma_call_write_chunk_filled, 3, -EMSGSIZE, 0, rpcrdma_call_write_chunk_filled(S.call, 0, 65))
ROW(rpcrdma_call_write_chunk_filled, 4, -EMSGSIZE, 0, rpcrdma_call_write_chunk_filled(S.call, 0, SIZE_MAX))

ROW(rpcrdma_call_result, 1, -EINVAL, 0, rpcrdma_call_result(NULL, 0, rpcrdma_arena_part(S.arena, 0, 4, NULL, NULL)))
ROW(rpcrdma_call_result, 2, -EINVAL, 0, rpcrdma_call_result(S.call, 0, NULL))
ROW(rpcrdma_call_result, 3, -ENOENT, 0, rpcrdma_call_result(S.call, 7, rpcrdma_arena_part(S.arena, 0, 4, NULL, NULL)))
ROW(rpcrdma_call_result, 4, -EMSGSIZE, 0, rpcrdma_call_result(S.call, 0, rpcrdma_arena_part(S.arena, 0, 65, NULL, NULL)))

ROW(rpcrdma_call_result, 5, -EXDEV, 0, rpcrdma_call_result(S.call, 0, rpcrdma_alloc(S.client, 4)))

ROW(rpcrdma_call_answer, 1, -EINVAL, 0, rpcrdma_call_answer(NULL, 0))
ROW(rpcrdma_call_answer, 2, -EBADF, 1, rpcrdma_call_answer(S.answered, 0))
ROW(rpcrdma_call_answer, 3, -EINVAL, 0, S.answered_in_handler)
ROW(rpcrdma_call_answer, 4, -EBADF, 1, answer_again())

ROW(rpcrdma_call_is_disconnected, 1, -EINVAL, 0, rpcrdma_call_is_disconnected(NULL))
ROW(rpcrdma_call_is_disconnected, 2, 0, 0, rpcrdma_call_is_disconnected(S.call))

ROW(rpcrdma_alloc, 1, 0, 0, rpcrdma_alloc(NULL, 1))
ROW(rpcrdma_alloc, 2, 0, 0, rpcrdma_alloc(S.client, SIZE_MAX))
ROW(rpcrdma_alloc, 3, 0, 1, rpcrdma_alloc(S.server, 1))
ROW(rpcrdma_alloc, 4, -EINVAL, 0, rpcrdma_alloc(S.client, 0) ? 0 : -errno)
ROW(rpcrdma_alloc, 5, -EINVAL, 0, rpcrdma_alloc(S.local_client, 0) ? 0 : -errno)

ROW(rpcrdma_buffer_data, 1, 0, 0, rpcrdma_buffer_data(NULL, NULL))
ROW(rpcrdma_buffer_data, 2, 0, 1, rpcrdma_buffer_data((rpcrdma_buffer *)S.freed, NULL))

ROW(rpcrdma_buffer_window, 1, -EINVAL, 0, rpcrdma_buffer_window(NULL, 0, 1))
ROW(rpcrdma_buffer_window, 2, -EINVAL, 0, rpcrdma_buffer_window(S.buffer, 1, SIZE_MAX))
ROW(rpcrdma_buffer_window, 3, -EINVAL, 0, rpcrdma_buffer_window(S.buffer, SIZE_MAX, 1))
ROW(rpcrdma_buffer_window, 4, -EINVAL, 0, rpcrdma_buffer_window(S.part, 0, 5))
ROW(rpcrdma_buffer_window, 5, -EINVAL, 0, call_with_empty_buffer())

ROW(rpcrdma_arena_new, 1, 0, 0, rpcrdma_arena_new(NULL, 4096, NULL, NULL))
ROW(rpcrdma_arena_new, 2, 0, 0, rpcrdma_arena_new((char *)S.memory + 8, 4096, NULL, NULL))
ROW(rpcrdma_arena_new, 3, 0, 0, rpcrdma_arena_new(S.memory, 0, NULL, NULL))
ROW(rpcrdma_arena_new, 4, 0, 0, rpcrdma_arena_new(S.memory, 100, NULL, NULL))
ROW(rpcrdma_arena_new, 5, -EINVAL, 0, rpcrdma_arena_new(S.memory, SIZE_MAX - 4095, NULL, NULL) ? 0 : -errno)

ROW(rpcrdma_arena_part, 1, 0, 0, rpcrdma_arena_part(NULL, 0, 1, NULL, NULL))
ROW(rpcrdma_arena_part, 2, 0, 0, rpcrdma_arena_part(S.arena, 0, SIZE_MAX, NULL, NULL))
ROW(rpcrdma_arena_part, 3, 0, 0, rpcrdma_arena_part(S.arena, SIZE_MAX, 1, NULL, NULL))
ROW(rpcrdma_arena_part, 4, 0, 0, rpcrdma_arena_part(S.for_reads, 0, 1, NULL, NULL))
ROW(rpcrdma_arena_part, 5, 0, 0, rpcrdma_free(rpcrdma_arena_part(S.arena, 1 << 20, 0, NULL, NULL)))

ROW(rpcrdma_client_connect, 1, 0, 0, rpcrdma_client_connect(NULL, 1, 1, NULL))
ROW(rpcrdma_client_connect, 2, 0, 0, rpcrdma_client_connect("soft:nobody-is-here", 1, 1, S.config))
ROW(rpcrdma_client_connect, 4, -EINVAL, 0, connect_to("iwarp:127.0.0.1:99999"))
ROW(rpcrdma_client_connect, 6, -EINVAL, 0, connect_on_core())
ROW(rpcrdma_client_connect, 5, -ECONNREFUSED, 0, connect_to("soft:nobody-is-here"))
ROW(rpcrdma_client_connect, 3, 0, 1, rpcrdma_client_connect(ADDRESS, 1, 1, (rpcrdma_config *)S.services))

ROW(rpcrdma_client_share, 1, 0, 0, rpcrdma_client_share(NULL))
ROW(rpcrdma_client_share, 2, 0, 1, rpcrdma_client_share((rpcrdma_client *)S.server))

ROW(rpcrdma_client_call, 1, -EINVAL, 0, rpcrdma_client_call(NULL, &REQUEST(.procedure = 1), NULL))
ROW(rpcrdma_client_call, 2, -EINVAL, 0, rpcrdma_client_call(S.client, NULL, NULL))
ROW(rpcrdma_client_call, 3, -EREMOTEIO, 0, call(REQUEST(.procedure = 99)))
ROW(rpcrdma_client_call, 4, -EINVAL, 0, call(REQUEST(.args_len = 4)))
ROW(rpcrdma_client_call, 5, -EINVAL, 0, call_with_own_read_chunk(rpcrdma_alloc(S.local_client, 64), 0))
ROW(rpcrdma_client_call, 6, -ETIMEDOUT, 0, call(REQUEST(.procedure = 3, .timeout = 50)))
ROW(rpcrdma_client_call, 7, -EINVAL, 0, call(REQUEST(.flags = 1u << 31)))
ROW(rpcrdma_client_call, 8, -EINVAL, 0, call(REQUEST(.flags = RPCRDMA_CACHED)))
ROW(rpcrdma_client_call, 9, -EINVAL, 0, call(REQUEST(.read_count = 1)))
ROW(rpcrdma_client_call, 10, -EINVAL, 0, call(REQUEST(.write_count = SIZE_MAX)))
ROW(rpcrdma_client_call, 11, -EINVAL, 0, call_with_read_chunk(NULL, 0))
ROW(rpcrdma_client_call, 12, -EINVAL, 0, call_with_read_chunk(S.part, 0))
ROW(rpcrdma_client_call, 13, -EINVAL, 0, call_with_own_read_chunk(rpcrdma_alloc(S.client, 4), SIZE_MAX))
ROW(rpcrdma_client_call, 14, -EBADF, 1, call_with_write_chunk((rpcrdma_buffer *)S.services))
ROW(rpcrdma_client_call, 15, -EINVAL, 0, call_with_write_chunk(S.part))
ROW(rpcrdma_client_call, 16, -EINVAL, 0, call_with_two_buffers(S.part))
ROW(rpcrdma_client_call, 17, -EINVAL, 0, call_with_two_buffers(NULL))
ROW(rpcrdma_client_call, 21, -EINVAL, 0, call_with_shared_buffer(1))
ROW(rpcrdma_client_call, 22, -EINVAL, 0, call_with_shared_buffer(5))

ROW(rpcrdma_client_call, 18, -EINVAL, 0, call(REQUEST(.args = S.memory, .args_len = SIZE_MAX)))
ROW(rpcrdma_client_call, 19, -EINVAL, 0, call(REQUEST(.read_chunks = S.memory, .read_count = SIZE_MAX / 4)))
ROW(rpcrdma_client_call, 20, -EINVAL, 0, call(REQUEST(.write_chunks = S.memory, .write_count = SIZE_MAX)))

ROW(rpcrdma_close_reason, 1, -EINVAL, 0, rpcrdma_close_reason(NULL, NULL, 0))
ROW(rpcrdma_close_reason, 2, 0, 0, rpcrdma_close_reason(S.client, NULL, 0))
ROW(rpcrdma_close_reason, 3, -EBADF, 1, rpcrdma_close_reason(S.server, NULL, 0))

ROW(rpcrdma_local_client_connect, 1, 0, 0, rpcrdma_local_client_connect("here", 1, 1, NULL))
ROW(rpcrdma_local_client_connect, 2, 0, 0, rpcrdma_local_client_connect("soft:nobody-is-here", 1, 1, S.config))
ROW(rpcrdma_local_client_connect, 3, -EINVAL, 0, connect_pinned())

ROW(rpcrdma_local_client_begin, 1, 0, 0, rpcrdma_local_client_begin(NULL, 1, 1, NULL))
ROW(rpcrdma_local_client_begin, 2, 0, 1, rpcrdma_local_client_begin(ADDRESS, 1, 1, (rpcrdma_config *)S.services))

ROW(rpcrdma_local_client_is_established, 1, -EINVAL, 0, rpcrdma_local_client_is_established(NULL))
ROW(rpcrdma_local_client_is_established, 2, 1, 0, rpcrdma_local_client_is_established(S.local_client))

ROW(rpcrdma_local_client_start, 1, -EINVAL, 0, rpcrdma_local_client_start(NULL, &(rpcrdma_request){0}, NULL))
ROW(rpcrdma_local_client_start, 2, -EINVAL, 0, rpcrdma_local_client_start(S.local_client, NULL, NULL))
ROW(rpcrdma_local_client_start, 3, -EMSGSIZE, 0, start(REQUEST(.args = S.memory, .args_len = 1 << 20)))
ROW(rpcrdma_local_client_start, 4, -EINVAL, 0, start(REQUEST(.args_len = SIZE_MAX)))

ROW(rpcrdma_local_server_call_back, 1, 0, 0, rpcrdma_local_server_call_back(NULL, S.call, 1, 1, NULL))
ROW(rpcrdma_local_server_call_back, 2, 0, 0, rpcrdma_local_server_call_back(S.local_server, NULL, 1, 1, NULL))
ROW(rpcrdma_local_server_call_back, 3, 0, 1, rpcrdma_local_server_call_back(S.local_server, S.answered, 1, 1, NULL))

ROW(rpcrdma_client_start, 1, -EINVAL, 0, rpcrdma_client_start(NULL, &REQUEST(.procedure = 1)))
ROW(rpcrdma_client_start, 2, -EINVAL, 0, rpcrdma_client_start(S.client, NULL))
ROW(rpcrdma_client_start, 3, -EINVAL, 0, rpcrdma_client_start(S.client, &(rpcrdma_request){.procedure = 1}))

ROW(rpcrdma_client_poll, 1, -EINVAL, 0, rpcrdma_client_poll(NULL, NULL, NULL))
ROW(rpcrdma_client_poll, 2, 0, 0, rpcrdma_client_poll(S.client, NULL, NULL))

ROW(rpcrdma_detach, 1, -EINVAL, 0, rpcrdma_detach(NULL))
ROW(rpcrdma_detach, 2, -EBADF, 1, rpcrdma_detach(S.client))
ROW(rpcrdma_detach, 3, -EPERM, 0, run_on_other_thread(detach_local_client))

ROW(rpcrdma_attach, 1, -EINVAL, 0, rpcrdma_attach(NULL))
ROW(rpcrdma_attach, 2, -EBADF, 1, rpcrdma_attach(S.server))
ROW(rpcrdma_attach, 3, -EPERM, 0, run_on_other_thread(attach_local_client))
ROW(rpcrdma_attach, 4, 0, 0, rpcrdma_attach(S.local_client))

ROW(rpcrdma_local_client_cancel, 1, -EINVAL, 0, rpcrdma_local_client_cancel(NULL, 1))
ROW(rpcrdma_local_client_cancel, 2, 0, 0, rpcrdma_local_client_cancel(S.local_client, 12345))
ROW(rpcrdma_local_client_cancel, 3, 0, 0, rpcrdma_local_client_cancel(S.local_client, 0))

ROW(rpcrdma_local_client_poll, 1, -EINVAL, 0, rpcrdma_local_client_poll(NULL, NULL, NULL))
ROW(rpcrdma_local_client_poll, 2, -EPERM, 0, run_on_other_thread(poll_local_client))

ROW(rpcrdma_reply_results, 1, 0, 0, rpcrdma_reply_results(NULL, NULL))
ROW(rpcrdma_reply_results, 2, 0, 0, rpcrdma_reply_results(S.failed, NULL))

ROW(rpcrdma_reply_status, 1, -EINVAL, 0, rpcrdma_reply_status(NULL))
ROW(rpcrdma_reply_status, 2, RPCRDMA_PROC_UNAVAIL, 0, rpcrdma_reply_status(S.failed))

ROW(rpcrdma_reply_take_write_chunk, 1, 0, 0, rpcrdma_reply_take_write_chunk(NULL, 0))
ROW(rpcrdma_reply_take_write_chunk, 2, 0, 0, rpcrdma_reply_take_write_chunk(S.failed, 0))

ROW(rpcrdma_reply_take_read_chunk, 1, 0, 0, rpcrdma_reply_take_read_chunk(NULL, 0))
ROW(rpcrdma_reply_take_read_chunk, 2, 0, 0, rpcrdma_reply_take_read_chunk(S.failed, ~0u))

ROW(rpcrdma_reply_keep, 1, 0, 0, rpcrdma_reply_keep(NULL))
ROW(rpcrdma_reply_keep, 2, 0, 0, S.kept_twice)
