#!/usr/bin/env bash
# bash bindings/wasm/pack.sh FOLDER: builds the npm package and lays it into the folder, ready for `npm pack`. Needs the
# target wasm32-unknown-unknown, and for the module with threads a nightly compiler with `rust-src`, as the standard library
# is built for shared memory.
set -euo pipefail
folder=$(realpath -m "$1")
cd "$(dirname "$0")"
target=$(realpath -m "${CARGO_TARGET_DIR:-../../target}/js")
vectors="-C target-feature=+simd128"
# The stack of a module has 1 MiB otherwise, which templates and grammars that are nested deeply exceed.
stack="-C link-arg=-zstack-size=4194304"
# Memory that workers share is declared with its largest size; the names are what wasm-bindgen starts a thread by.
shared="-C target-feature=+atomics,+bulk-memory,+mutable-globals -C link-arg=--shared-memory -C link-arg=--import-memory
    -C link-arg=--max-memory=4294967296 -C link-arg=--export=__wasm_init_tls -C link-arg=--export=__tls_size
    -C link-arg=--export=__tls_align -C link-arg=--export=__tls_base -C link-arg=--export=__heap_base"

# Compiler, flags, folder of the build, folder of the package.
module() {
    local toolchain=$1 flags=$2 built=$3 to=$4
    shift 4
    RUSTFLAGS="$vectors $stack $flags" cargo ${toolchain:+"+$toolchain"} build --locked --release --target wasm32-unknown-unknown \
        --target-dir "$built" "$@"
    mkdir -p "$to"
    "$target/pack/debug/pack" "$built/wasm32-unknown-unknown/release/ruvllm_js.wasm" "$to"
    local size
    size=$(gzip -9 -c "$to/ruvllm_js_bg.wasm" | wc -c)
    echo "the module: $(wc -c <"$to/ruvllm_js_bg.wasm") bytes, $size compressed"
    [ "$size" -le 2500000 ] || { echo "more than 2.5 MB compressed" >&2; exit 1; }
}

rm -rf "$folder"
RUSTFLAGS="" cargo build --locked --package pack --target-dir "$target/pack"
module "" "" "$target" "$folder"
module nightly "$shared" "$target/threads" "$folder/threads" -Z build-std=std,panic_abort
cp js/* ../../LICENSE-* "$folder"
