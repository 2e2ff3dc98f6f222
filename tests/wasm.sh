#!/usr/bin/env bash
# The model that ships, run by the scalar level as WebAssembly under Node, has to write the text that
# every other build writes. Needs the target wasm32-unknown-unknown and Node.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}/wasm
# For vectors of 128 bits, which every browser has had for years; the code is the scalar level's all the same.
RUSTFLAGS="-C target-feature=+simd128" \
    cargo build --locked --release --manifest-path tests/wasm/Cargo.toml --target wasm32-unknown-unknown --target-dir "$target"
node tests/wasm/run.mjs "$target/wasm32-unknown-unknown/release/ruvllm_wasm.wasm" \
    models/ruvllm-rust-6m-q8_0.gguf tests/data/greedy.txt
