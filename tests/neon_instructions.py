#!/usr/bin/env python3
"""Counts the instructions of the inner loops of the Arm kernels, in the code that the compiler made.

    tests/neon_instructions.py               this crate: builds it, checks every claim below
    tests/neon_instructions.py --peer F...   objects of ggml, counted the same way

An inner loop is the stretch between a backward branch and its target that holds no other, and of those
of a function the one with most multiplications. It must do its work with the instructions that the
kernel's header claims, call nothing, and take no more instructions per product of a weight and an
activation than ggml's kernel for the same weights (`benches/RESULTS.md`). Spills are loads and stores
relative to the stack pointer.

Needs Rust's target aarch64-unknown-linux-gnu and aarch64-linux-gnu-objdump.
"""

import collections
import os
import re
import subprocess
import sys

TARGET = "aarch64-unknown-linux-gnu"
OBJDUMP = os.environ.get("OBJDUMP", "aarch64-linux-gnu-objdump")
SMULL, SDOT, SMMLA, FMLA = r"smull\b", r"sdot .*\.16b$", r"smmla\b", r"fmla .*\.4s, .*\.s\[\d\]"
SDOT_ELEMENT = r"sdot .*\.4b\[\d\]"

# Function, instruction, products of one such instruction, most instructions per product.
# Activations of 16 bits are two planes of bytes, so that each product takes two multiplications.
CLAIMS = [
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ8_0, 8>", SDOT, 8, 0.5625),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ4_0, 8>", SDOT, 8, 0.6563),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ4_1, 8>", SDOT, 8, None),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ5_0, 8>", SDOT, 8, None),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ5_1, 8>", SDOT, 8, None),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ2K, 1>", SDOT, 8, None),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ3K, 1>", SDOT, 8, None),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ4K, 1>", SDOT, 8, 0.5313),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ5K, 1>", SDOT, 8, None),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ6K, 1>", SDOT, 8, 0.9102),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockIq4Nl, 8>", SDOT, 8, None),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockIq4Xs, 1>", SDOT, 8, None),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockMxfp4, 8>", SDOT, 8, None),
    (r"neon::matmul::matvec_q16::<.*BlockQ8_0, 8>", SMULL, 8, None),
    (r"neon::matmul::matvec_q16::<.*BlockQ4_0, 8>", SMULL, 8, None),
    (r"neon::matmul::matvec_q16::<.*BlockQ4K, 1>", SMULL, 8, None),
    (r"neon::matmul::matvec_q16::<.*BlockQ6K, 1>", SMULL, 8, None),
    (r"neon::gemm::tile_f32::<3>", FMLA, 4, 0.7292),
    (r"neon_dotprod::gemm::tile_ints::<1, 32, 2>", SDOT_ELEMENT, 16, None),
    (r"neon_dotprod::gemm::tile_ints::<1, 16, 2>", SDOT_ELEMENT, 16, None),
    (r"neon_dotprod::gemm::tile_ints::<2, 32, 2>", SDOT_ELEMENT, 8, None),
    (r"neon_i8mm::gemm::tile_ints::<1, 32, 2>", SMMLA, 32, None),
    (r"neon_i8mm::gemm::tile_ints::<1, 16, 2>", SMMLA, 32, None),
    (r"neon_i8mm::gemm::tile_ints::<2, 32, 2>", SMMLA, 16, None),
]

PEER = [
    (r"ggml_vec_dot_q8_0_q8_0", SDOT, 16, None),
    (r"ggml_vec_dot_q4_0_q8_0", SDOT, 16, None),
    (r"ggml_vec_dot_q4_K_q8_K", SDOT, 16, None),
    (r"ggml_vec_dot_q6_K_q8_K", SDOT, 16, None),
    (r"tinyBLAS<4, __Float32x4_t, __Float32x4_t, float, float, float>::gemm_bloc<4, 6>", r"fmla .*\.4s", 4, None),
]


def functions(path):
    """`{name: [(address, instruction)]}` of an object or an archive of them."""
    text = subprocess.run(
        [OBJDUMP, "-d", "-C", "--no-show-raw-insn", path], check=False, capture_output=True, text=True
    ).stdout
    found, body = {}, None
    for line in text.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            body = found.setdefault(header[1], [])
        elif (code := re.match(r" +([0-9a-f]+):\t(.*?)( *//.*)?$", line)) and body is not None:
            body.append((int(code[1], 16), code[2].replace("\t", " ")))
    return found


def inner_loops(body):
    index = {address: i for i, (address, _) in enumerate(body)}
    loops = []
    for i, (_, code) in enumerate(body):
        target = re.match(r"(?:b|b\.\w+|cbn?z|tbn?z) (?:.*, )?([0-9a-f]+) <", code)
        if target and index.get(int(target[1], 16), i + 1) <= i:
            loops.append((index[int(target[1], 16)], i + 1))
    for start, end in loops:
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops):
            yield [code for _, code in body[start:end]]


def check(found, claims):
    failures = []
    print(f"{'instructions':>12} {'products':>8} {'each':>6} {'limit':>6} {'spills':>6}  function")
    for function, instruction, products, limit in claims:
        bodies = [body for name, body in found.items() if re.search(function, name)]
        count = lambda loop: sum(1 for code in loop if re.match(instruction, code))
        loops = [loop for body in bodies for loop in inner_loops(body)]
        loop = max(loops, key=count, default=[])
        if not count(loop):
            failures.append(f"{function}: no loop with {instruction}")
            continue
        n = products * count(loop)
        spills = sum(1 for code in loop if "[sp" in code)
        shown = "" if limit is None else f"{limit:.3f}"
        print(f"{len(loop):12} {n:8} {len(loop) / n:6.3f} {shown:>6} {spills:6}  {function}")
        if calls := [code for code in loop if re.match(r"blr? ", code)]:
            failures.append(f"{function}: calls {calls}")
        if limit is not None and len(loop) / n > limit:
            failures.append(f"{function}: {len(loop) / n:.3f} instructions per product, not {limit}")
    return failures


def main():
    if sys.argv[1:2] == ["--peer"]:
        found = collections.ChainMap(*map(functions, sys.argv[2:]))
        sys.exit("\n".join(check(found, PEER)) or 0)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    directory = os.path.join(root, "target", "instructions")
    subprocess.run(
        f"cargo rustc --locked --quiet --release --lib --no-default-features --target {TARGET}".split()
        + ["--target-dir", directory, "--", "-C", "symbol-mangling-version=v0"],
        check=True,
        cwd=root,
    )
    found = functions(os.path.join(directory, TARGET, "release", "libruvllm.rlib"))
    sys.exit("\n".join(check(found, CLAIMS)) or 0)


if __name__ == "__main__":
    main()
