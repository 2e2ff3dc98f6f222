#!/usr/bin/env bash
# The library as a user gets it: its package is small, brings five dependencies and what they bring, and builds and
# runs the README's first program in an empty crate, without the network. The other packages can be made, too.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "$1" >&2; exit 1; }
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")

cargo package --locked --quiet --allow-dirty --no-verify --workspace
crate=$(ls -t "$target"/package/ruvllm-[0-9]*.crate | head -1)
bytes=$(stat -c %s "$crate")
echo "${crate##*/}: $bytes bytes"
[ "$bytes" -le 1600000 ] || fail "the package has more than 1.6 MB"
if tar -tf "$crate" | grep -E '^[^/]*/(models|benches|cli|fuzz|learn|tests|tools|\.ci)/|\.gguf$'; then
    fail "these files are not the library's"
fi

user=$target/user
rm -rf "$user"
mkdir -p "$user/src"
tar -xf "$crate" -C "$user"
unpacked=$(basename "$crate" .crate)
cat >"$user/Cargo.toml" <<TOML
[package]
name = "user"
version = "0.0.0"
edition = "2024"
[dependencies]
ruvllm = { path = "$unpacked" }
[profile.dev]
opt-level = 0
debug = false
[workspace]
TOML
awk '/^```rust$/ { inside = 1; next } /^```$/ && inside { exit } inside' README.md >"$user/src/main.rs"
grep -q 'Model::open' "$user/src/main.rs" || fail "README.md has no program"

tree() { cargo tree --offline --manifest-path "$user/Cargo.toml" --edges normal --prefix none --format '{p}' "$@" | sed 's/ .*//' | sort -u; }
ours="bytemuck half memmap2 rayon thiserror"
theirs="bytemuck_derive cfg-if crossbeam-deque crossbeam-epoch crossbeam-utils either libc proc-macro2 quote rayon-core
    syn thiserror-impl unicode-ident zerocopy zerocopy-derive"
direct=$(cargo tree --offline --manifest-path "$user/Cargo.toml" --package ruvllm --edges normal --depth 1 --prefix none \
    --format '{p}' | tail -n +2 | sed 's/ .*//' | sort)
[ "$direct" = "$(tr -s ' \n' '\n\n' <<<"$ours")" ] || fail "the library depends on: $direct"
# Which of them come depends on the version of `half` that is at hand.
brought=$(comm -23 <(tree) <(tr -s ' \n' '\n\n' <<<"$ours $theirs ruvllm user" | sort -u))
[ -z "$brought" ] || fail "not the dependencies that are known: $brought"

text=$(CARGO_TARGET_DIR=$user/target cargo run --offline --quiet --manifest-path "$user/Cargo.toml")
[ "$(wc -w <<<"$text")" -gt 10 ] || fail "the README's program wrote: $text"
echo "the README's program wrote: ${text:0:60}…"
