#!/usr/bin/env bash
# The program and tests of the `amx` level on a Sapphire Rapids that Bochs emulates, under Linux: what grants
# tiles and what multiplies them is not ours, as it is with `--cfg ruvllm_emulate_amx`. Takes a quarter of an hour,
# so that this is a choice. Needs the packages xorriso, isolinux and busybox-static, and in the environment
#
# BOCHS   the folder `bochs` of https://github.com/bochs-emu/Bochs, commit 783b58fd6d9b, built there, mended:
#         - "extended feature disable", by which Linux gives tiles to whoever asks, is missing (IA32_XFD and
#           IA32_XFD_ERR in msr.cc; #NM from tile instructions and XRSTOR of what is disabled, which XINUSE leaves
#           out; bit 2 of CPUID 0xD:18 ECX, bit 4 of 0xD:1 EAX);
#         - xsave.cc saves 8 of a tile's 16 rows, and those only if no tile is in use, and exchanges rows and bytes
#           per row of the configuration; cpuid.cc leaves the alignment of compacted components out of their size;
#         - vcvtne2ps2bf16 reads its upper half from behind the register (avx512_bf16.cc);
#         - gathers and scatters with an index in registers 16 to 31 are illegal (fetchdecode32.cc).
#         ./configure --with-nogui --enable-cpu-level=6 --enable-x86-64 --enable-smp --enable-avx --enable-evex \
#             --enable-amx --enable-pci --enable-repeat-speedups --enable-fast-function-calls \
#             --enable-handlers-chaining --disable-trace-linking --disable-docbook
#         (linked traces run stale code where the kernel patches itself)
# KERNEL  a kernel of 5.16 or later with a serial console, such as the vmlinuz of Debian's linux-image-cloud-amd64
set -euo pipefail
cd "$(dirname "$0")/.."
head=$(sed -n '2,/^set/{/^#/p}' "$0")
[ -x "${BOCHS:-}/bochs" ] && [ -r "${KERNEL:-}" ] || { echo "$head"; exit 1; }
BOCHS=$(realpath "$BOCHS")
for file in /bin/busybox /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32; do
    [ -e "$file" ] || { echo "$file is missing"; exit 1; }
done

export RUSTFLAGS="-C target-feature=+crt-static"
flags=(--locked --release --target x86_64-unknown-linux-gnu)
cargo build "${flags[@]}"
# Cargo tells name and path: "Executable tests/it/main.rs (target/…/it-0123456789abcdef)".
tests=$(cargo test "${flags[@]}" --no-run --package ruvllm --test it 2>&1 | sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
[ "$(wc -w <<<"$tests")" = 1 ] || { echo "the tests were not built"; exit 1; }

work=$(mktemp -d)
bochs=
trap 'kill $bochs 2>/dev/null || true; rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root/bin" "$root$PWD" "$work/iso" "$work/init"
cp /bin/busybox "$root/bin"
strip -o "$root/bin/ruvllm" "${CARGO_TARGET_DIR:-target}/x86_64-unknown-linux-gnu/release/ruvllm"
strip -o "$root/bin/tests" "$tests"
cp -r --parents models tests/data/greedy.txt "$root$PWD"
archive() { (cd "$1" && find . | busybox cpio -o -H newc 2>/dev/null); }
archive "$root" | gzip -1 >"$work/root.cpio.gz"
cp "$KERNEL" "$work/iso/vmlinuz"
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$work/iso"

# CPU, how many of it, arguments of the kernel; the checks to run come from standard input
boot() {
    printf '\n-- %s × %s %s (%s s)\n' "$2" "$1" "$3" "$SECONDS"
    cat >"$work/init/init" <<EOF
#!/bin/busybox sh
export PATH=/bin RUVLLM_EMULATED=1
busybox mkdir -p /proc /dev && busybox mount -t proc none /proc && busybox mount -t devtmpfs none /dev && busybox --install -s /bin
cd $PWD
prompt=\$(head -n 1 tests/data/greedy.txt)
check() { "\$@" && echo "passed: \$*" || echo "FAILED: \$*"; }
level() { ruvllm doctor | grep "level used  *\$1"; }
refuses() { RUVLLM_ARCH=\$1 ruvllm doctor 2>&1 | grep "\"\$1\" is not supported by this CPU"; }
writes() {
    tail -n +2 tests/data/greedy.txt >/text
    ruvllm -p "\$prompt" -n 32 --temp 0 --repeat-penalty 1 --no-display-prompt "\$@" 2>/errors | cmp - /text || { cat /errors; false; }
}
$(cat)
echo "end of checks"
sleep 1000
EOF
    chmod +x "$work/init/init"
    { cat "$work/root.cpio.gz"; archive "$work/init" | gzip; } >"$work/iso/initrd"
    cat >"$work/iso/isolinux.cfg" <<EOF
default linux
label linux
kernel vmlinuz
append initrd=initrd console=ttyS0 quiet mitigations=off tsc_early_khz=50000 clearcpuid=fsrm$3
EOF
    xorriso -as mkisofs -quiet -o "$work/image.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
        -boot-info-table "$work/iso" 2>/dev/null
    cat >"$work/bochsrc" <<EOF
cpu: model=$1, count=$2, ips=50000000
megs: 1024
romimage: file=$BOCHS/bios/BIOS-bochs-latest
vgaromimage: file=$BOCHS/bios/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
ata0-master: type=cdrom, path=$work/image.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/serial
display_library: nogui
log: $work/log
panic: action=fatal
EOF
    : >"$work/serial"
    "$BOCHS/bochs" -q -f "$work/bochsrc" >"$work/output" 2>&1 &
    bochs=$!
    tail -f --pid=$bochs "$work/serial" | sed -u 's/\r$//; /^end of checks\|Kernel panic/q' | tee "$work/seen" || true
    kill $bochs 2>/dev/null || true
    grep -q '^end of checks' "$work/seen" && ! grep -q '^FAILED' "$work/seen" || { echo "failed on $1"; exit 1; }
}

# More threads than CPUs: tiles have to survive switches.
boot sapphire_rapids 1 "" <<'EOF'
check level amx
check writes -t 3
for module in demo engine kernels_gemm kernels_elementwise; do check tests $module:: --test-threads=1; done
EOF

boot sapphire_rapids 2 "" <<'EOF'
check level amx
check writes -t 3
EOF

# The CPU has tiles, and the kernel does not allow them, or no wide registers at all.
boot sapphire_rapids 1 ",amx_tile" <<'EOF'
check refuses amx
check level avx512
check writes
EOF

boot sapphire_rapids 1 " noxsave" <<'EOF'
check level scalar
check refuses amx
EOF

boot tigerlake 1 "" <<'EOF'
check level avx512
check refuses amx
check writes
EOF
