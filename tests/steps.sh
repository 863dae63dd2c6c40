# The steps of tests/run and their order. Sourced by tests/run. A step is a function step_NAME. It counts through
# check_command, run_tests or run_nextest, and runs its prerequisites through ensure_step.

# Cargo options for the features of the builds: $verbs, or none if the libraries of the verbs fabric are missing.
features=

# run_schedule: runs the steps in order. The virtual machines take longest and wait for a third of their time, so the
# steps that mostly compute run beside them, at the lowest priority.
run_schedule() {
    run_step format
    local name
    for name in build tests tcp vm sim doc documents schemas; do ! is_chosen $name || ensure_step build; done
    if is_chosen loom || is_chosen fuzz || is_chosen embed || is_chosen instructions; then start_builds_ahead; fi
    run_step tests
    run_step tcp
    if is_chosen vm; then start_vms; fi
    run_step lints
    run_step oldest
    run_step semver
    run_step doctests
    run_step doc
    run_step dependencies
    run_step sim
    run_step embed
    run_step instructions
    if is_chosen packages; then start_packages; fi
    if is_chosen c; then start_c; fi
    run_step memcheck
    run_step loom
    run_step fuzz
    run_step vm
    run_step documents
    run_step schemas
    run_step c
    run_step packages
    collect_vms
}

# start_builds_ahead: starts builds that have their own directories, at the lowest priority, while tests run. A build
# that fails here fails again in its step, where it counts.
start_builds_ahead() {
    start_background ahead 1800 nice -n 19 bash -c '
        for profile in release "lto --workspace"; do
            CARGO_TARGET_DIR=$1/embed cargo build --locked --manifest-path tests/instructions/Cargo.toml \
                --profile $profile
        done
        if $2; then
            CARGO_TARGET_DIR=$1/embed cargo test --locked --manifest-path tests/embed/Cargo.toml --release --no-run
            "${@:3}" --no-run
            ! command -v c++ || tests/fuzz/run --build
        fi' ahead "$target" "$all" "${loom[@]}"
}

# ---------------------------------------------------------------------------------------------------------------------
# fetch_prometheus: unpacks the package without installing it, because an installation would start a service.
fetch_prometheus() {
    local work=$target/prometheus
    rm -rf "$work"
    mkdir -p "$work"
    (cd "$work" && timeout 200 apt-get download prometheus) || { apt_update && cd "$work" &&
        timeout 200 apt-get download prometheus; } || return
    dpkg-deb -x "$work"/prometheus_*.deb "$work" && rm "$work"/*.deb
}

# fetch_program NAME: installs a cargo subcommand from a prebuilt package of PyPI. If that fails, builds it from source,
# which takes minutes.
fetch_program() {
    local work=$target/programs
    mkdir -p "$work/bin"
    if python3 -m pip --version || apt_install python3-pip; then
        timeout 200 python3 -m pip install --quiet --no-deps --target "$work/$1" --upgrade \
            "astral-dev-toolchain-$1" && cp "$work/$1/bin/$1" "$work/bin/" && rm -rf "${work:?}/$1" && return
    fi
    CARGO_TARGET_DIR="$work/build" timeout 1500 cargo install --locked --root "$work" "$1"
    rm -rf "$work/build"
}

# ensure_program NAME: fetches a cargo subcommand unless it is installed. Succeeds if it then exists.
ensure_program() {
    command -v "$1" >/dev/null || run_interruptibly fetch_program "$1" >"$logs/$1.log" 2>&1
    command -v "$1" >/dev/null
}

# find_missing_verbs_packages: sets verbs_missing to the missing packages for builds of the verbs fabric. The default
# build needs none of them.
find_missing_verbs_packages() {
    verbs_missing=()
    local package
    for package in libibverbs librdmacm; do
        pkg-config --exists "$package" 2>/dev/null || verbs_missing+=("$package-dev")
    done
    command -v pkg-config >/dev/null || verbs_missing+=(pkg-config)
    # This pattern excludes libclang-cpp, which belongs to LLVM.
    compgen -G '/usr/lib/llvm-*/lib/libclang[-.][0-9s]*' >/dev/null || verbs_missing+=(libclang-dev)
}

step_tools() {
    : >"$logs/fetch.log"
    local tool wanted=(tshark valgrind strace tmux fio) optional=()
    PATH=$target/programs/bin:$PATH:$target/prometheus/usr/bin
    command -v cargo >/dev/null || exit_with_error "cargo is missing: install Rust from https://rustup.rs"
    cargo fmt --version >/dev/null 2>&1 || exit_with_error "rustfmt is missing: rustup component add rustfmt"
    cargo clippy --version >/dev/null 2>&1 || exit_with_error "clippy is missing: rustup component add clippy"
    command -v cc >/dev/null || apt_install gcc libc6-dev ||
        exit_with_error "a C linker is missing: apt-get install gcc libc6-dev"
    local manifest
    for manifest in Cargo.toml tests/embed/Cargo.toml tests/instructions/Cargo.toml tests/fuzz/Cargo.toml; do
        run_interruptibly timeout 300 cargo fetch --locked --manifest-path "$manifest" >>"$logs/fetch.log" 2>&1 ||
            exit_with_error "crates cannot be fetched: $(grep -m 1 '^error' "$logs/fetch.log" ||
                tail -n 1 "$logs/fetch.log"): see $logs/fetch.log"
    done
    ensure_program cargo-nextest ||
        exit_with_error "cargo-nextest is missing: cargo install --locked cargo-nextest; see $logs/cargo-nextest.log"
    ! is_chosen fuzz || command -v c++ >/dev/null || apt_install g++ ||
        echo "no C++ compiler: the fuzz targets are skipped"
    for tool in "${wanted[@]}"; do command -v "$tool" >/dev/null || optional+=("$tool"); done
    # Tests compare with rpcgen, and compile specifications (`.x` files) of these packages.
    [[ -e /usr/include/rpcsvc/nis.x && -e /usr/include/rpcsvc/rex.x ]] && command -v rpcgen >/dev/null ||
        optional+=(rpcsvc-proto libnsl-dev libtirpc-dev)
    if ((${#optional[@]})); then
        apt_install "${optional[@]}" || echo "continuing without ${optional[*]}; checks that need them are skipped"
    fi
    if ! command -v prometheus >/dev/null; then
        run_interruptibly fetch_prometheus >"$logs/prometheus.log" 2>&1 ||
            echo "continuing without prometheus; checks that need it are skipped"
    fi
    find_missing_verbs_packages
    if ((${#verbs_missing[@]})); then
        apt_install "${verbs_missing[@]}" || true
        find_missing_verbs_packages
    fi
    if ((${#verbs_missing[@]})); then
        skip "the verbs fabric: ${verbs_missing[*]} missing"
    else
        features=$verbs
    fi
    # Downloads packages and builds a kernel module, while the test programs are built.
    if is_chosen vm; then start_background vm-prepare 900 tests/vm/run --prepare; fi
    crates=$(cargo metadata --no-deps --format-version 1 | grep -o '"manifest_path":"[^"]*"' | sort -u | wc -l) ||
        exit_with_error "cargo metadata names no crates"
    cargo --version
}

step_format() {
    check_command format 60 "$(find bench engine mempool tests tools -name '*.rs' | wc -l)" files bash -c '
        cargo fmt --check && for crate in fuzz embed; do
            cargo fmt --check --manifest-path "tests/$crate/Cargo.toml" || exit
        done'
    check_command mutations 60 "$(grep -c ^rule tests/mutations/rules)" rules tests/mutations/run --check
}

# This step also builds the programs for the virtual machine, because their crates have tests. Cargo lists the built
# programs as JSON.
step_build() {
    # shellcheck disable=SC2086
    check_command build 1800 "$crates" crates \
        bash -c 'cargo build --workspace --tests "${@:2}" --message-format=json >"$1"' build "$logs/programs.json" $features
}

# find_executable CRATE NAME: prints the path of a built test program.
find_executable() {
    sed -n 's/.*"package_id":"[^"]*#'"$1"'@.*"executable":"\([^"]*\/deps\/'"$2"'-[^"]*\)".*/\1/p' \
        "$logs/programs.json" | tail -n 1
}
# quote_word TEXT: quotes it as one word of a command line.
quote_word() { printf %q "$1"; }

# ---------------------------------------------------------------------------------------------------------------------
step_tests() { run_nextest tests 1200 'not (binary(documents) | binary(repository) & test(face::))' SIM_SEEDS=100; }

step_tcp() { run_nextest tcp 900 'package(/^rpcrdma-(tests|blockstore)$/) & binary(it)' RPCRDMA_FABRIC=iwarp; }

step_sim() { run_nextest sim 1800 'binary(sim) & (test(every_run_upholds) | test(peers_that_withhold_progress))' SIM_FIRST=100 SIM_SEEDS=500; }

# This step runs the commands that need no device. Step vm runs the others.
step_documents() {
    run_nextest documents 1500 'binary(documents)'
    rm -rf "$target/documents" # release builds of everything
}

# This step keeps no incremental data, which needs more space than all programs. With the verbs fabric, it does not lint
# the few lines that are compiled only without that fabric: step oldest refuses warnings in them, and tests/packages
# --release runs their lints.
step_lints() {
    # shellcheck disable=SC2086
    CARGO_INCREMENTAL=0 check_command lints 900 "$crates" crates cargo clippy --workspace $features --all-targets -- \
        -D warnings
    [[ -n $features ]] || skip "lints of the verbs fabric"
}

# This step has the features of step lints, so that it can use the dependencies built there. The tests document the
# public crates again, as JSON.
step_doc() {
    # shellcheck disable=SC2086
    RUSTDOCFLAGS="-D warnings" check_command doc 600 "$crates" crates cargo doc --workspace $features --no-deps
    run_nextest face 600 'binary(repository) & test(face::)'
}

step_doctests() {
    # shellcheck disable=SC2086
    RUSTDOC=$PWD/tests/rustdoc run_tests doctests 900 cargo test --workspace $features --doc --no-fail-fast
}

# end_builds_ahead: ends the builds of start_builds_ahead, so that the step builds the rest at normal priority. With
# --all they continue, for loom and fuzz.
end_builds_ahead() { $all || abandon ahead; }

# tests/embed is a workspace with its own lock file and profiles, like a user's program. tests/packages --release runs
# its lints.
step_embed() {
    end_builds_ahead
    CARGO_TARGET_DIR=$target/embed run_tests embed 900 cargo test --locked --manifest-path tests/embed/Cargo.toml \
        --release --no-fail-fast -- --show-output
}

step_instructions() {
    end_builds_ahead
    run_command instructions 600 tests/instructions/run
    if ((status == 77)); then
        skipped=$((skipped + 1)) # the log says why
    else
        local ok bad
        ok=$(grep -c '^test .* \.\.\. ok' "$log" || true) bad=$(grep -c '^test .* \.\.\. FAILED' "$log" || true)
        grep '^test .* \.\.\. FAILED' "$log" || true
        count_results instructions "$ok" "$bad" 0 0
    fi
}

# This step builds with the minimum Rust version and refuses warnings, which detects newer features of the language. The
# lint incompatible_msrv detects newer items of the standard library, and a test checks the dependencies. tests/packages
# --release checks all published crates from their packages.
step_oldest() {
    local oldest
    oldest=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
    if ! rustup run "$oldest" cargo --version >/dev/null 2>&1 &&
        ! run_interruptibly timeout 300 rustup toolchain install "$oldest" --profile minimal --no-self-update \
            >"$logs/oldest-install.log" 2>&1; then
        skip "Rust $oldest is not installed and cannot be fetched: see $logs/oldest-install.log"
        return
    fi
    CARGO_TARGET_DIR=$target/oldest RUSTFLAGS='-D warnings' check_command oldest 900 "${#promised[@]}" crates \
        rustup run "$oldest" cargo check --locked "${promised[@]/#/--package=}"
    rm -rf "$target/oldest"
}

# Crates that promise semantic versioning: see CONTRIBUTING.md.
promised=(rpcrdma rpcrdma-mempool rpcrdma-xdr rpcrdma-xdrgen)

# This step compares the public API with the last release before this commit. The tool takes minutes to build, so it is
# fetched only if there is a release.
step_semver() {
    local release
    release=$(git describe --tags --abbrev=0 --match 'v[0-9]*' 'HEAD^' 2>/dev/null) ||
        { skip "no release yet: no tag v* before this commit"; return; }
    if ! CARGO_PROFILE_RELEASE_DEBUG=false ensure_program cargo-semver-checks; then
        skip "cargo-semver-checks is missing; see $logs/cargo-semver-checks.log"
        return
    fi
    CARGO_TARGET_DIR="$target/semver" check_command semver 1800 "${#promised[@]}" crates \
        cargo semver-checks --baseline-rev "$release" --default-features "${promised[@]/#/--package=}"
    rm -rf "$target/semver"
}

# start_c: starts step c beside the following steps, because its programs mostly wait for each other.
start_c() {
    starts[c]=$SECONDS
    [[ -e /usr/include/liburing.h ]] || apt_install liburing-dev || true
    command -v abidiff >/dev/null || apt_install abigail-tools || true
    start_background c 1800 env FEATURES="$features" tests/c/run
}

step_c() {
    finish c
    report c "$(grep -c '^ok: ' "$log")" checks
}

# start_packages: starts step packages beside the following steps, because it waits for downloads and a booting
# system.
start_packages() {
    local wanted=() program
    starts[packages]=$SECONDS
    for program in lintian mmdebstrap; do command -v "$program" >/dev/null || wanted+=("$program"); done
    command -v dpkg-shlibdeps >/dev/null || wanted+=(dpkg-dev)
    ((${#wanted[@]} == 0)) || apt_install "${wanted[@]}" || true
    start_background packages 1800 env CARGO_TARGET_DIR="$target" tests/packages
}

step_packages() { collect packages; }

step_dependencies() {
    if ! ensure_program cargo-deny; then
        skip "licences, sources, bans and advisories: cargo-deny is missing; see $logs/cargo-deny.log"
        return
    fi
    check_command deny 300 3 rules cargo deny --locked check bans licenses sources
    if run_interruptibly timeout 120 cargo deny --locked fetch db >"$logs/advisories-fetch.log" 2>&1; then
        check_command advisories 120 1 list cargo deny --locked --offline check advisories
    else
        skip "advisories: their list cannot be fetched, see $logs/advisories-fetch.log"
    fi
}

# This step checks that the `unsafe` code that passes memory between owners reads neither uninitialized words nor out of
# bounds. Mapped memory counts as initialized. Tests that query the kernel's mappings or have time limits are excluded.
step_memcheck() {
    ensure_step build
    if ! command -v valgrind >/dev/null; then skip "memcheck: valgrind is missing"; return; fi
    # Threads share one processor under valgrind. The default scheduler leaves it to a spinning thread, which takes ten
    # times as long as the fair scheduler.
    # shellcheck disable=SC2016
    run_tests memcheck 900 bash -c 'status=0
        for program; do
            echo "     Running $program"
            valgrind --quiet --error-exitcode=9 --num-callers=16 --fair-sched=yes "$program" \
                buf:: pool:: ring:: shared:: cross_thread:: || status=$?
        done
        exit $status' memcheck "$(find_executable rpcrdma-mempool rpcrdma_mempool)" "$(find_executable rpcrdma rpcrdma)"
    assert_each_has_tests memcheck
}

# assert_each_has_tests NAME: marks a run as broken if one of its programs had no tests.
assert_each_has_tests() {
    if ! grep -q '^test result: ok\. 0 passed' "$log"; then return; fi
    echo "-- a program had no tests: see $log"
    broken+=("$1")
    failed=$((failed + 1))
}

# The models are large, so they are optimized, but without the settings of the release profile that build slowly.
loom=(env RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="$target/loom" CARGO_PROFILE_RELEASE_LTO=off
    CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=false
    cargo test -p rpcrdma-mempool -p rpcrdma-fabric -p rpcrdma --release --lib --no-fail-fast)
step_loom() {
    # After this, the step builds the rest at normal priority.
    abandon ahead
    run_tests loom 1800 "${loom[@]}" -- loom_
    assert_each_has_tests loom
}

# This step builds test programs of step tests again, with more specifications, so it follows the last step that runs
# them.
step_schemas() {
    run_nextest schemas 900 'package(rpcrdma-xdrgen-tests) & (binary(oracle) | binary(every))' XDRGEN_SCHEMAS=200
}

step_fuzz() {
    abandon ahead
    if command -v c++ >/dev/null; then
        # One more target than processors runs at a time, so each has a processor to itself most of the time.
        run_tests fuzz 1500 tests/fuzz/run --seconds 10 --jobs $(($(nproc) + 1))
    else
        skipped=$((skipped + $(ls tests/fuzz/targets | wc -l)))
        echo "not run: fuzz targets: no C++ compiler"
    fi
}

# ---------------------------------------------------------------------------------------------------------------------
vm_ready=

# is_vm_available: succeeds if the virtual machine and its programs are available. Otherwise the log contains
# "not run: REASON".
is_vm_available() {
    if [[ -z $vm_ready ]]; then
        [[ -n ${children[vm-prepare]:-} ]] || start_background vm-prepare 900 tests/vm/run --prepare
        finish vm-prepare
        vm_ready=yes
        if ((status == 77)); then
            skipped=$((skipped + 1)) vm_ready=no
        elif ((status != 0)); then
            report vm-prepare 0 machines
            vm_ready=no
        elif [[ -z $features ]]; then
            echo "not run: virtual machine: the verbs fabric is missing"
            skipped=$((skipped + 1)) vm_ready=no
        fi
    fi
    [[ $vm_ready == yes ]]
}

# Modules of integration tests whose results no device can change, because they test rules of the protocol and of
# services. They run over the software fabric and TCP.
rules=(bindings characteristics decisions duplicate_requests negotiation reverse_rules rules_of_clients rules_of_servers
    stats_socket typed verifiers)

# start_vms: starts three machines. One runs the scripts that keep a processor busy. The second runs the suites over
# verbs, then the scripts that need two processors and the commands of the documents. An emulated machine has one
# processor (with --pair, two), so the first two machines together use both processors of the host. The third runs the
# scripts that mostly wait, with less memory. Starting a process is slow in an emulated machine, so the test that kills
# processes runs only 20 rounds (KILLS).
start_vms() {
    local fabric its
    starts[vm]=$SECONDS
    is_vm_available || return 0
    fabric="env RPCRDMA_VERBS=1 $(quote_word "$(find_executable rpcrdma-fabric it)") contract_verbs:: --test-threads=1"
    its="env RPCRDMA_FABRIC=verbs KILLS=20 $(quote_word "$(find_executable rpcrdma-tests it)") --test-threads=1"
    its+=$(printf -- ' --skip %s::' "${rules[@]}")
    start_background vm 3700 tests/vm/run --limit 3600 --busy
    # shellcheck disable=SC2016
    VM_MEMORY=4096 start_background vm-suites 3700 bash -c 'status=0
        tests/vm/run --limit 1800 device --program "$1" --program "$2" || status=$?
        tests/vm/run --limit 1700 --pair --program "$3" || status=$?
        exit $status' suites "$its" "$fabric" \
        "$(quote_word "$(find_executable rpcrdma-tests documents)") --test-threads=1"
    VM_MEMORY=3072 start_background vm-idle 1900 tests/vm/run --limit 1800 device --idle
    nice=(nice -n 19)
}

step_vm() {
    [[ -n ${children[vm]:-} ]] || start_vms
    nice=()
    [[ -z ${children[vm]:-} ]] || collect vm
}

# collect_vms: waits for the other machines, and counts their results.
collect_vms() {
    local name
    for name in vm-suites vm-idle; do [[ -z ${children[$name]:-} ]] || collect "$name"; done
}
