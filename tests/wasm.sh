#!/usr/bin/env bash
# The model that ships, run as WebAssembly with SIMD under Node, has to write the text that every other build writes; with
# RUVLLM_LONG kernels are compared with the scalar level. Needs the targets wasm32-unknown-unknown (and wasm32-wasip1) and Node.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}/wasm
RUSTFLAGS="-C target-feature=+simd128" \
    cargo build --locked --release --manifest-path tests/wasm/Cargo.toml --target wasm32-unknown-unknown --target-dir "$target"
node tests/wasm/run.mjs "$target/wasm32-unknown-unknown/release/ruvllm_wasm.wasm" \
    models/ruvllm-rust-6m-q8_0.gguf tests/data/greedy.txt

[ -n "${RUVLLM_LONG:-}" ] || exit 0
# Tests of panics need unwinding, and one a thread.
CARGO_TARGET_WASM32_WASIP1_RUNNER="node --no-warnings $PWD/tests/wasm/wasi.mjs" RUSTFLAGS="-C target-feature=+simd128" \
    cargo test --locked --manifest-path tests/wasm/Cargo.toml --target wasm32-wasip1 --target-dir "$target" --test levels -- \
    --test-threads 1 --skip a_small_stack --skip a_tile_behind_the_columns --skip add_product_of_rows_that_wrap
