#!/usr/bin/env bash
# Windows' interfaces under Wine: the library, by `tests/systems.rs`; in `.ci/long` the program, too, by all of its tests.
# What Wine cannot show is in docs/design/testing.md.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")/wine
triple=x86_64-pc-windows-gnu
mkdir -p "$target"
export WINEPREFIX=${WINEPREFIX:-$target/prefix} WINEDEBUG=-all
# Small code rather than fast: what is compiled runs for seconds.
export CARGO_PROFILE_DEV_OPT_LEVEL=0 CARGO_PROFILE_DEV_DEBUG=false CARGO_INCREMENTAL=0
build=(--locked --target "$triple" --target-dir "$target" --config 'profile.dev.package."*".opt-level=0')

# Wine 8 lacks the library of random bytes that Rust's hash maps ask for. For tests, never shipped.
if [ ! -e "$target/bcryptprimitives.dll" ]; then
    x86_64-w64-mingw32-gcc -shared -O1 -x c -o "$target/bcryptprimitives.dll" - -ladvapi32 <<'C'
#include <windows.h>
#include <ntsecapi.h>
__declspec(dllexport) BOOL ProcessPrng(PBYTE data, SIZE_T length) { return RtlGenRandom(data, (ULONG)length); }
C
fi
export WINEPATH="Z:${target//\//\\}"
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=wine

cargo test "${build[@]}" --package ruvllm --test systems
[ -n "${RUVLLM_LONG:-}" ] || exit 0
# Models run here: not quite without optimising.
export CARGO_PROFILE_DEV_OPT_LEVEL=1
cargo test "${build[@]}" --package ruvllm-cli --no-fail-fast -- --skip servers_that_lie
# Behind downloads whose programs were killed, Wine 8 answers no more in the same process.
cargo test "${build[@]}" --package ruvllm-cli --test pull servers_that_lie
