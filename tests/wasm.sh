#!/usr/bin/env bash
# The npm package as its users get it, under Node; with RUVLLM_LONG also in a browser, the engine behind a few C functions,
# and kernels compared with the scalar level. Needs the targets wasm32-unknown-unknown (and wasm32-wasip1), Node (and npm,
# chromium, chromedriver).
set -euo pipefail
cd "$(dirname "$0")/.."
export RUVLLM_ROOT=$PWD
target=$(realpath -m "${CARGO_TARGET_DIR:-target}/wasm")
project=$target/project
(
    export CARGO_TARGET_DIR=$target
    # Optimising across codegen units is for what is published.
    [ -n "${RUVLLM_LONG:-}" ] || export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
    bash bindings/wasm/pack.sh "$target/package"
)
rm -rf "$project"
mkdir -p "$project/node_modules"
if [ -n "${RUVLLM_LONG:-}" ]; then
    (cd "$project" && npm pack --silent "$target/package" && npm install --silent --no-audit --no-fund ./ruvllm-*.tgz)
else
    cp -r "$target/package" "$project/node_modules/ruvllm"
fi
cp tests/wasm/package.mjs "$project"
(cd "$project" && node --test package.mjs)

[ -n "${RUVLLM_LONG:-}" ] || exit 0
python3 tests/wasm/browser.py "$target/package" "$target/pictures"
RUSTFLAGS="-C target-feature=+simd128" \
    cargo build --locked --release --manifest-path tests/wasm/Cargo.toml --target wasm32-unknown-unknown --target-dir "$target"
node tests/wasm/run.mjs "$target/wasm32-unknown-unknown/release/ruvllm_wasm.wasm" \
    models/ruvllm-rust-6m-q8_0.gguf tests/data/greedy.txt
# Tests of panics need unwinding, and one a thread.
CARGO_TARGET_WASM32_WASIP1_RUNNER="node --no-warnings $PWD/tests/wasm/wasi.mjs" RUSTFLAGS="-C target-feature=+simd128" \
    cargo test --locked --manifest-path tests/wasm/Cargo.toml --target wasm32-wasip1 --target-dir "$target" --test levels -- \
    --test-threads 1 --skip a_small_stack --skip a_tile_behind_the_columns --skip add_product_of_rows_that_wrap
