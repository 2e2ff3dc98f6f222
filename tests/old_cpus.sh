#!/usr/bin/env bash
# The program on emulated x86 CPUs without AVX-512, and without AVX: it has to choose the best level they
# have, refuse the others, and write the text that every other build writes. An instruction that such a
# CPU lacks would end it. Needs qemu-x86_64.
set -euo pipefail
cd "$(dirname "$0")/.."
# As tests build it, which need it as well: other features of what it depends on would compile all of it twice.
cargo test --locked --release --no-run --test cli
program=${CARGO_TARGET_DIR:-target}/release/ruvllm
prompt=$(head -n 1 tests/data/greedy.txt)

# CPU, the level it has to choose, levels it has to refuse
check() {
    local cpu=$1 level=$2
    shift 2
    emulated() { qemu-x86_64 -cpu "$cpu" "$program" "$@" 2> >(grep -v "TCG doesn't support" >&2); }
    emulated doctor | grep -x "level used  *$level" || { echo "$cpu: another level than $level"; exit 1; }
    for other in "$@"; do
        if message=$(RUVLLM_ARCH=$other emulated doctor 2>&1); then
            echo "$cpu: $other was not refused"
            exit 1
        fi
        grep "\"$other\" is not supported by this CPU" <<<"$message"
    done
    emulated -p "$prompt" -n 32 --temp 0 --repeat-penalty 1 --no-display-prompt | diff - <(tail -n +2 tests/data/greedy.txt)
    echo "$cpu: the same text"
}

check Haswell avx2 avx_vnni avx512 avx512_bf16 amx
check Nehalem scalar avx2 avx_vnni avx512 avx512_bf16 amx
