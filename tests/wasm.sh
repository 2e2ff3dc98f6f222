#!/usr/bin/env bash
# The npm package as its users get it, under Node; with RUVLLM_LONG also in a browser, and the tests of kernels and of
# conformance models on both levels. Needs the targets wasm32-unknown-unknown (and wasm32-wasip1), Node (and npm,
# chromium, chromedriver).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
target=$(realpath -m "${CARGO_TARGET_DIR:-target}/wasm")
project=$target/project
export CARGO_TARGET_DIR=$target RUVLLM_ROOT=$root

# Optimising across codegen units is for what is published.
[ -n "${RUVLLM_LONG:-}" ] || export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
bash bindings/wasm/pack.sh "$target/package"
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
cd tests/wasm
CARGO_TARGET_WASM32_WASIP1_RUNNER="node --no-warnings $root/tests/wasm/wasi.mjs" RUSTFLAGS="-C target-feature=+simd128" \
    cargo test --locked --target wasm32-wasip1 --test levels -- --test-threads 1
