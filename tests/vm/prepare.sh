# Prepares the packages, the kernel and the initramfs of virtual machines. tests/vm/run sources this file, and sets
# $cache, $vm and $logs. All created files are kept in $cache, and only one process at a time creates them.

# Packages to install on the host, whose root is also the guest's root.
packages=(qemu-system-x86 busybox-static cpio kmod rdma-core ibverbs-providers ibverbs-utils rdmacm-utils
    libibverbs-dev librdmacm-dev perftest iproute2)
# Packages for the guest only, because on the host they would start servers.
guest_packages=(nfs-common nfs-kernel-server rpcbind)

# Modules of the initramfs. modprobe finds the others. crc32_generic is listed because rdma_rxe requests it by name from
# the kernel's crypto, so that it is not among the dependencies of rdma_rxe.
boot_modules=(virtio_pci 9pnet_virtio 9p overlay veth crc32_generic ib_uverbs rdma_ucm rdma_rxe)
# Parts of the kernel package to keep. The package is ten times as large.
kept=(arch crypto fs lib net drivers/block drivers/char drivers/infiniband drivers/virtio
    drivers/net/veth.ko drivers/net/virtio_net.ko drivers/net/net_failover.ko drivers/net/dummy.ko drivers/net/bonding)

# report_unavailable WHY: reports that no virtual machine is available here, which is not a failure of the tests.
report_unavailable() {
    echo "not run: $*" >&2
    exit 77
}

# prepare: sets $kernel (its directory in $cache), $initramfs, $accelerator and $clock.
prepare() {
    [[ $(uname -m) == x86_64 ]] || report_unavailable "the virtual machine needs an x86_64 host"
    mkdir -p "$cache" "$logs"
    exec {lock}>"$cache/lock"
    flock -w 600 "$lock" || { echo "tests/vm/run: another one has held $cache/lock for 10 minutes" >&2; exit 1; }
    install_packages
    unpack_kernel
    add_siw
    build_initramfs
    choose_accelerator
    measure_tsc
    exec {lock}>&-
}

install_packages() {
    local absent=() package
    for package in "${packages[@]}"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || absent+=("$package")
    done
    ((${#absent[@]} == 0)) && return
    local output
    output=$(apt_install "${absent[@]}" 2>&1) ||
        report_unavailable "the virtual machine lacks ${absent[*]}: ${output##*$'\n'}"
    echo "$output" >&2
}

# Prints the package that linux-image-amd64 currently depends on.
find_kernel_package() {
    { apt-cache depends linux-image-amd64 2>/dev/null || true; } |
        sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -n 1
}

# Unpacks the distribution's unmodified kernel, without installing it. Sets $kernel.
unpack_kernel() {
    kernel=$(find "$cache" -maxdepth 1 -name 'kernel-*' | sort -V | tail -n 1)
    [[ -n $kernel ]] && return
    local work=$cache/unpacking name
    rm -rf "$work"
    mkdir -p "$work"/{debs/partial,extra/usr/{bin,sbin,lib,lib64}}
    name=$(find_kernel_package)
    if [[ -z $name ]]; then
        apt_update >"$logs/kernel.log" 2>&1 || true
        name=$(find_kernel_package)
    fi
    [[ -n $name ]] || report_unavailable "the package linux-image-amd64 is not known to apt"
    echo "unpacking $name" >&2
    (
        cd "$work/debs"
        # The second attempt updates outdated package lists. No lock is needed, because nothing is installed.
        fetch() {
            timeout 300 apt-get download "$name" &&
                timeout 300 apt-get install -y --download-only --no-install-recommends -o Debug::NoLocking=1 \
                    -o Dir::Cache::archives="$PWD" "${guest_packages[@]}"
        }
        fetch || { apt_update; fetch; }
    ) >"$logs/kernel.log" 2>&1 ||
        report_unavailable "the packages $name ${guest_packages[*]} cannot be downloaded: see $logs/kernel.log"

    # The same symbolic links as on the host, so that directories here hide nothing of the host's root.
    for name in bin sbin lib lib64; do ln -s "usr/$name" "$work/extra/$name"; done
    local deb tree
    for deb in "$work"/debs/*.deb; do
        tree=()
        if [[ $deb == */linux-image-* ]]; then
            tree=(--wildcards ./boot/vmlinuz-* './lib/modules/*/modules.*' "${kept[@]/#/./lib/modules/*/kernel/}")
        fi
        dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$work/extra" --keep-directory-symlink --no-same-owner "${tree[@]}"
    done
    version=$(basename "$work"/extra/lib/modules/*)
    mv "$work"/extra/boot/vmlinuz-* "$work/vmlinuz"
    rm -r "$work/debs" "$work/extra/boot"
    PATH=$PATH:/sbin:/usr/sbin depmod -b "$work/extra" "$version" 2>>"$logs/kernel.log"
    kernel=$cache/kernel-$version
    mv "$work" "$kernel"
}

# Builds the driver of soft-iWARP, and puts it where modprobe finds it in the guest. If that fails, siw.absent has the
# reason, and only the scripts that need the driver are skipped. Only --prepare tries again.
add_siw() {
    local version=${kernel##*/kernel-} work=$cache/siw place
    place=$kernel/extra/lib/modules/$version/extra
    if [[ -e $place/siw.ko || (-e $place/siw.absent && $mode != prepare) ]]; then return; fi
    echo "building siw.ko for $version" >&2
    mkdir -p "$place"
    if timeout 300 "$vm/siw-build" "$version" "$work" >"$logs/siw.log" 2>&1; then
        mv "$work/siw.ko" "$place/"
        PATH=$PATH:/sbin:/usr/sbin depmod -b "$kernel/extra" "$version" 2>>"$logs/siw.log"
        rm -f "$place/siw.absent"
    else
        tail -n 1 "$logs/siw.log" >"$place/siw.absent"
        echo "not run: siw: $(<"$place/siw.absent"); see $logs/siw.log" >&2
    fi
    rm -rf "$work"
}

build_initramfs() {
    local version=${kernel##*/kernel-} work=$cache/initramfs module
    # Each kernel and each change of the contents needs a new initramfs.
    initramfs=$kernel/initramfs-$(cat "$vm/init" "$vm/prepare.sh" | sha256sum | cut -c 1-16)
    [[ -e $initramfs ]] && return
    rm -rf "$work"
    mkdir -p "$work"/{bin,dev,proc,sys,host,extra,job,memory,root,modules}
    cp "$(command -v busybox)" "$work/bin/busybox"
    cp "$vm/init" "$work/init"
    chmod 755 "$work/init"
    # modprobe lists each module after its dependencies.
    PATH=$PATH:/sbin:/usr/sbin modprobe -d "$kernel/extra" -S "$version" --show-depends -a "${boot_modules[@]}" |
        awk '$1 == "insmod" && !seen[$2]++ { print $2 }' |
        while read -r module; do
            cp "$module" "$work/modules/"
            basename "$module"
        done >"$work/modules/order"
    (cd "$work" && find . | cpio --quiet -o -H newc) | gzip -1 >"$initramfs.new"
    mv "$initramfs.new" "$initramfs"
    rm -rf "$work"
    find "$kernel" -maxdepth 1 -name 'initramfs-*' -mmin +60 ! -path "$initramfs" -delete
}

# On a host that is itself a guest, /dev/kvm may exist without working, so it is tried once.
choose_accelerator() {
    if [[ ! -e $cache/accelerator ]]; then
        accelerator=tcg
        if [[ -r /dev/kvm && -w /dev/kvm ]]; then
            accelerator=kvm
            local command=(true) limit=10 boot_limit=15
            new_job
            boot >/dev/null 2>&1 || accelerator=tcg
        fi
        echo "$accelerator" >"$cache/accelerator"
    fi
    accelerator=$(<"$cache/accelerator")
}

# Passes the host's rate of the time stamp counter to the guest's kernel. Otherwise the kernel measures it against
# emulated timers. On a busy host the result, and with it all clocks of the guest, is wrong by a large factor. The rate
# is measured each time, because $cache may come from another host. Without a C compiler the kernel measures it.
measure_tsc() {
    local khz
    clock=
    [[ $accelerator == tcg ]] || return 0
    [[ $cache/tsc -nt $vm/tsc.c ]] || cc -O1 -o "$cache/tsc" "$vm/tsc.c" 2>"$logs/tsc.log" || return 0
    khz=$("$cache/tsc") && clock=tsc_early_khz=$khz
}
