#!/usr/bin/env bash
# Tests on emulated ARM CPUs: one that has every extension, and one that has none. Emulated floating
# point is up to 50 times slower, so that this is a choice. Needs the target aarch64-unknown-linux-gnu,
# gcc-aarch64-linux-gnu and qemu-aarch64.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
export RUVLLM_EMULATED=1

# CPU, the best level it has
check() {
    printf '\n-- %s, %s (%s s)\n' "$1" "$2" "$SECONDS"
    QEMU_CPU=$1 RUVLLM_ARCH=$2 cargo test --locked --release --no-default-features --features chat \
        --target aarch64-unknown-linux-gnu --test kernels_matvec --test kernels_gemm --test kernels_elementwise \
        --test conformance_logits --test conformance_tokenizer --test conformance_gguf --test tokenizer --test gguf --test demo
}

check max neon_i8mm
check cortex-a72 neon
