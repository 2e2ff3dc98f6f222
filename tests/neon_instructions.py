#!/usr/bin/env python3
"""Counts the instructions of the Arm kernels: of inner loops, in the code that the compiler made, and of
whole products with a few activation rows, as an emulator executes them.

    tests/neon_instructions.py               this crate: builds it, checks every claim below
    tests/neon_instructions.py --peer F...   objects of ggml, counted the same way

An inner loop is the stretch between a backward branch and its target that holds no other, and of those
of a function the one with most multiplications, or the longest one with as many as are given. It must
do its work with the instructions that the kernel's header claims, call nothing, and take no more instructions per product of a weight and an
activation than ggml's kernel for the same weights (`benches/RESULTS.md`). Spills are loads and stores
relative to the stack pointer. Executed instructions are those that a product with twice the rounds takes
more, all loops, factors and ends of rows included; a few rows must take no more of them for each product
than one row.

Needs Rust's target aarch64-unknown-linux-gnu, gcc-aarch64-linux-gnu and qemu-aarch64.
"""

import collections
import json
import os
import re
import subprocess
import sys
import tempfile

TARGET = "aarch64-unknown-linux-gnu"
OBJDUMP = os.environ.get("OBJDUMP", "aarch64-linux-gnu-objdump")
SMULL, SDOT, SMMLA, FMLA = r"smull\b", r"sdot .*\.16b$", r"smmla\b", r"fmla .*\.4s, .*\.s\[\d\]"
FMLA_VECTOR = r"fmla .*\.4s"
SDOT_ELEMENT = r"sdot .*\.4b\[\d\]"

# Function, instruction, products of one such instruction, most instructions per product; of a loop for one
# activation row, how often it has the instruction.
# Activations of 16 bits are two planes of bytes, so that each product takes two multiplications.
CLAIMS = [
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ8_0, 8>", SDOT, 8, 0.5625, 64),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ4_0, 8>", SDOT, 8, 0.6563, 64),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ4_1, 8>", SDOT, 8, None, 64),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ5_0, 8>", SDOT, 8, None, 64),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ5_1, 8>", SDOT, 8, None, 64),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ2K, 1>", SDOT, 8, None, 32),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ3K, 1>", SDOT, 8, None, 32),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ4K, 1>", SDOT, 8, 0.5313, 64),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ5K, 1>", SDOT, 8, None, 64),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockQ6K, 1>", SDOT, 8, 0.9102, 32),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockIq4Nl, 8>", SDOT, 8, None, 64),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockIq4Xs, 1>", SDOT, 8, None, 64),
    (r"neon_dotprod::matmul::matvec_q16::<.*BlockMxfp4, 8>", SDOT, 8, None, 64),
    (r"neon::matmul::matvec_q16::<.*BlockQ8_0, 8>", SMULL, 8, None, 64),
    (r"neon::matmul::matvec_q16::<.*BlockQ4_0, 8>", SMULL, 8, None, 64),
    (r"neon::matmul::matvec_q16::<.*BlockQ4K, 1>", SMULL, 8, None, 64),
    (r"neon::matmul::matvec_q16::<.*BlockQ6K, 1>", SMULL, 8, None, 32),
    (r"neon::attention::attention_f32$", FMLA_VECTOR, 4, None, 16),
    (r"neon::attention::attention_f16$", FMLA_VECTOR, 4, None, 16),
    (r"neon::elementwise::dot$", FMLA_VECTOR, 4, None, 8),
    (r"neon::gemm::tile_f32::<3>", FMLA, 4, 0.7292, None),
    (r"neon_dotprod::gemm::tile_ints::<1, 32, 2>", SDOT_ELEMENT, 16, None, None),
    (r"neon_dotprod::gemm::tile_ints::<1, 16, 2>", SDOT_ELEMENT, 16, None, None),
    (r"neon_dotprod::gemm::tile_ints::<2, 32, 2>", SDOT_ELEMENT, 8, None, None),
    (r"neon_i8mm::gemm::tile_ints::<1, 32, 2>", SMMLA, 32, None, None),
    (r"neon_i8mm::gemm::tile_ints::<1, 16, 2>", SMMLA, 32, None, None),
    (r"neon_i8mm::gemm::tile_ints::<2, 32, 2>", SMMLA, 16, None, None),
]

# Level, kernel (`matmul.rs` or panels), activation rows. With RUVLLM_LONG the whole table of `benches/RESULTS.md`.
FEW_ROWS = [
    ("neon", "few", (1, 2, 4)),
    ("neon_dotprod", "few", (1, 2, 4)),
]
if os.environ.get("RUVLLM_LONG"):
    FEW_ROWS = [
        ("neon", "few", (1, 2, 4, 8, 16)),
        ("neon", "panels", (4, 8, 16)),
        ("neon_dotprod", "few", (1, 2, 4, 8, 16)),
        ("neon_dotprod", "panels", (2, 4, 8, 16)),
        ("neon_i8mm", "panels", (2, 4, 8, 16)),
    ]
# How often a product is repeated, so that it stands out: the rest of the process differs from run to run by some
# 1000 instructions.
REPEATS = 16

PEER = [
    (r"ggml_vec_dot_q8_0_q8_0", SDOT, 16, None, None),
    (r"ggml_vec_dot_q4_0_q8_0", SDOT, 16, None, None),
    (r"ggml_vec_dot_q4_K_q8_K", SDOT, 16, None, None),
    (r"ggml_vec_dot_q6_K_q8_K", SDOT, 16, None, None),
    (r"tinyBLAS<4, __Float32x4_t, __Float32x4_t, float, float, float>::gemm_bloc<4, 6>", r"fmla .*\.4s", 4, None, None),
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
    for function, instruction, products, limit, times in claims:
        bodies = [body for name, body in found.items() if re.search(function, name)]
        count = lambda loop: sum(1 for code in loop if re.match(instruction, code))
        loops = [loop for body in bodies for loop in inner_loops(body)]
        if times is None:
            loop = max(loops, key=count, default=[])
        else:
            loop = max((loop for loop in loops if count(loop) == times), key=len, default=[])
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


def executed(test, level, product):
    """Instructions that the emulator executes: it logs each block of them once as text, then each execution."""
    with tempfile.TemporaryDirectory() as directory:
        log = os.path.join(directory, "log")
        os.mkfifo(log)
        emulator = subprocess.Popen(
            ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", "-d", "in_asm,exec,nochain", "-D", log]
            + [test, "--ignored", "--exact", "instructions::product"],
            env=os.environ | {"RUVLLM_ARCH": level, "RUVLLM_PRODUCT": product, "RUST_TEST_THREADS": "1"},
            stdout=subprocess.PIPE,
        )
        sizes, block, total = {}, None, 0
        with open(log, errors="replace") as lines:
            for line in lines:
                if line.startswith("Trace "):
                    total += sizes[int(line.split("/")[1], 16)]
                elif line.startswith("0x"):
                    if block is None:
                        block = int(line.split(":")[0], 16)
                        sizes[block] = 0  # it may be translated again
                    sizes[block] += 1
                elif line.startswith("IN:"):
                    block = None
        output = emulator.communicate()[0]
        if emulator.returncode != 0 or b"1 passed" not in output:
            sys.exit(f"{level} {product} failed")
        return total


def few_rows(root):
    built = subprocess.run(
        f"cargo test --locked --quiet --release --package ruvllm --target {TARGET}".split()
        + ["--test", "it", "--no-run", "--message-format=json"],
        check=True,
        cwd=root,
        stdout=subprocess.PIPE,
        env=os.environ | {"CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER": "aarch64-linux-gnu-gcc"},
    )
    artifacts = map(json.loads, built.stdout.splitlines())
    test = next(a["executable"] for a in artifacts if a.get("target", {}).get("name") == "it")
    failures, (rows, values) = [], (32, 1024)
    print("\nexecuted instructions per product, by activation rows")
    for level, kernel, counts in FEW_ROWS:
        for dtype in ("Q8_0", "Q4_0", "Q4_K", "Q6_K"):
            each = {}
            for m in counts:
                product = f"{kernel} {dtype} {rows} {values} {m}"
                once, more = (executed(test, level, f"{product} {n}") for n in (1, 1 + REPEATS))
                each[m] = (more - once) / (REPEATS * rows * values * m)
            print(f"{level:12} {kernel:6} {dtype}", *(f"{m:4}: {n:.3f}" for m, n in each.items()), flush=True)
            # Two rows of Q4_K without `sdot` take 3 % more each than one row alone.
            limit = 1.04 if (level, dtype) == ("neon", "Q4_K") else 1.02
            if kernel == "few" and max(each.values()) > limit * each[1]:
                failures.append(f"{level} {dtype}: a few activation rows take more than one")
    return failures


def main():
    if sys.argv[1:2] == ["--peer"]:
        found = collections.ChainMap(*map(functions, sys.argv[2:]))
        sys.exit("\n".join(check(found, PEER)) or 0)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    directory = os.path.join(root, "target", "instructions")
    subprocess.run(
        f"cargo rustc --locked --quiet --release --package ruvllm --lib --target {TARGET}".split()
        + ["--target-dir", directory, "--", "-C", "symbol-mangling-version=v0"],
        check=True,
        cwd=root,
    )
    found = functions(os.path.join(directory, TARGET, "release", "libruvllm.rlib"))
    sys.exit("\n".join(check(found, CLAIMS) + few_rows(root)) or 0)


if __name__ == "__main__":
    main()
