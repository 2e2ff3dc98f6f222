#!/usr/bin/env bash
# bash bindings/wasm/pack.sh FOLDER: builds the npm package and lays it into the folder, ready for `npm pack`. Needs the
# target wasm32-unknown-unknown.
set -euo pipefail
folder=$(realpath -m "$1")
cd "$(dirname "$0")"
target=$(realpath -m "${CARGO_TARGET_DIR:-../../target}/js")

# The stack of a module has 1 MiB otherwise, which templates and grammars that are nested deeply exceed.
RUSTFLAGS="-C target-feature=+simd128 -C link-arg=-zstack-size=4194304" \
    cargo build --locked --release --target wasm32-unknown-unknown --target-dir "$target"
RUSTFLAGS="" cargo build --locked --package pack --target-dir "$target/pack"

rm -rf "$folder"
mkdir -p "$folder"
"$target/pack/debug/pack" "$target/wasm32-unknown-unknown/release/ruvllm_js.wasm" "$folder"
cp js/* ../../LICENSE-* "$folder"

size=$(gzip -9 -c "$folder/ruvllm_js_bg.wasm" | wc -c)
echo "the module: $(wc -c <"$folder/ruvllm_js_bg.wasm") bytes, $size compressed"
[ "$size" -le 2500000 ] || { echo "more than 2.5 MB compressed" >&2; exit 1; }
