#!/usr/bin/env bash
# Tests on emulated ARM CPUs: one that has every extension, and one that has none. Emulated floating
# point is up to 50 times slower, so that this is a choice. Needs the target aarch64-unknown-linux-gnu,
# gcc-aarch64-linux-gnu and qemu-aarch64.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
export RUVLLM_EMULATED=1

# CPU, the best level it has, modules of tests
check() {
    local cpu=$1 level=$2
    shift 2
    printf '\n-- %s, %s (%s s)\n' "$cpu" "$level" "$SECONDS"
    QEMU_CPU=$cpu RUVLLM_ARCH=$level cargo test --locked --release --package ruvllm --target aarch64-unknown-linux-gnu \
        --test it -- "$@"
}

all=(kernels_ conformance_logits:: invariance::dense demo::)
long=(invariance:: conformance_tokenizer:: conformance_gguf:: tokenizer:: gguf:: gradient::)
# All levels of kernels, and the best one's engine.
check max neon_i8mm "${all[@]}" ${RUVLLM_LONG:+"${long[@]}"}
# What this CPU has not would end it.
[ -n "${RUVLLM_LONG:-}" ] || all=(kernels_gemm:: kernels_matvec:: demo::)
check cortex-a72 neon "${all[@]}"
