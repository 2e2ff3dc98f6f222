#!/usr/bin/env bash
# The engine in WebAssembly under Node, behind a few C functions; with RUVLLM_LONG also the npm package as its users get it,
# under Node and in a browser, and kernels compared with the scalar level. Needs the targets wasm32-unknown-unknown (and
# wasm32-wasip1), Node (and npm, chromium, chromedriver, a nightly compiler with `rust-src`).
set -euo pipefail
cd "$(dirname "$0")/.."
export RUVLLM_ROOT=$PWD
program=$(realpath -m "${CARGO_TARGET_DIR:-target}")/release/ruvllm
target=$(realpath -m "${CARGO_TARGET_DIR:-target}/wasm")
# Optimising across codegen units is for what is published.
quick=(CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16)
[ -z "${RUVLLM_LONG:-}" ] || quick=()
env "${quick[@]}" RUSTFLAGS="-C target-feature=+simd128" \
    cargo build --locked --release --manifest-path tests/wasm/Cargo.toml --target wasm32-unknown-unknown --target-dir "$target"
node tests/wasm/run.mjs "$target/wasm32-unknown-unknown/release/ruvllm_wasm.wasm" \
    models/ruvllm-rust-6m-q8_0.gguf tests/data/greedy.txt

# Each module of the package takes six minutes of a core to build, the tests of kernels as many.
[ -n "${RUVLLM_LONG:-}" ] || exit 0
project=$target/project
CARGO_TARGET_DIR=$target bash bindings/wasm/pack.sh "$target/package"
rm -rf "$project"
mkdir -p "$project"
(cd "$project" && npm pack --silent "$target/package" && npm install --silent --no-audit --no-fund ./ruvllm-*.tgz)
cp tests/wasm/package.mjs tests/wasm/conformance.mjs "$project"
(cd "$project" && node --test package.mjs)
if [ -n "${RUVLLM_CONFORMANCE:-}" ]; then
    cargo build --locked --release
    (cd "$project" && node conformance.mjs "$program")
else
    echo "SKIPPED: RUVLLM_CONFORMANCE names no models for both modules"
fi
python3 tests/wasm/browser.py "$target/package" "$target/pictures"
# Tests of panics need unwinding, and one a thread.
CARGO_TARGET_WASM32_WASIP1_RUNNER="node --no-warnings $PWD/tests/wasm/wasi.mjs" RUSTFLAGS="-C target-feature=+simd128" \
    cargo test --locked --manifest-path tests/wasm/Cargo.toml --target wasm32-wasip1 --target-dir "$target" --test levels -- \
    --test-threads 1 --skip a_small_stack --skip a_tile_behind_the_columns --skip add_product_of_rows_that_wrap
