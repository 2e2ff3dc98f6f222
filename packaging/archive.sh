#!/usr/bin/env bash
# Packs what was built for a target into `dist/`: `bash packaging/archive.sh x86_64-unknown-linux-gnu`. The program, its licences,
# manual pages and completions; a zip for Windows, otherwise a tar. `cargo binstall` knows the names (cli/Cargo.toml).
set -euo pipefail
cd "$(dirname "$0")/.."
target=$1
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
name=ruvllm-$version-$target
built=${CARGO_TARGET_DIR:-target}/$target/release
# Pages and completions come from a program that runs here: that of the target, or another one.
runs=${RUVLLM_HOST_PROGRAM:-}
for candidate in "$built/ruvllm" "$built/ruvllm.exe"; do
    [ -n "$runs" ] || ! "$candidate" --version >/dev/null 2>&1 || runs=$candidate
done

rm -rf "dist/$name"
mkdir -p "dist/$name"
case $target in
    *windows*) cp "$built/ruvllm.exe" "dist/$name/" ;;
    *) cp "$built/ruvllm" "dist/$name/" ;;
esac
cp README.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE "dist/$name/"
if [ -n "$runs" ]; then
    mkdir "dist/$name/completions"
    "$runs" man "dist/$name/man"
    for shell in bash zsh fish powershell elvish; do
        "$runs" completions "$shell" >"dist/$name/completions/ruvllm.$shell"
    done
fi
cd dist
case $target in
    *windows*) 7z a -bso0 "$name.zip" "$name" ;;
    # The same bytes from the same files.
    *) tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -cf - "$name" 2>/dev/null | gzip -9n >"$name.tar.gz" ||
        tar -czf "$name.tar.gz" "$name" ;;
esac
rm -r "$name"
