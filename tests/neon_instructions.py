#!/usr/bin/env python3
"""Counts the instructions of the Arm kernels: of inner loops, in the code that the compiler made, and of
whole products with a few activation rows, as an emulator executes them.

    tests/neon_instructions.py               this crate: builds it, checks every claim below
    tests/neon_instructions.py --peer F...   objects of ggml, counted the same way

An inner loop is the stretch between a backward branch and its target that holds no other, and of those
of a function the one with most multiplications, or the longest one with as many as are given that calls
nothing. It must do its work with the instructions that the kernel's header claims, call nothing, and take no
more instructions per product of a weight and an activation than ggml's kernel for the same weights
(`benches/RESULTS.md`), or than it took. Spills are loads and stores relative to the stack or frame pointer.
Executed instructions are those that a product with twice the rounds takes more, all loops, factors and ends of
rows included; a few rows must take no more of them for each product than one row, and steps no more than they
took.

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
SMLAL = r"sm(ull|lal)2? "
# Once in each exponential.
EXPONENT = r"fcvtns .*\.4s"

# Function, instruction, products (or values) of one such instruction, most instructions per product; of a loop for
# one activation row, how often it has the instruction.
# Activations of 16 bits are two planes of bytes, so that each product takes two multiplications.
CLAIMS = [
    (r"dotprod::matmul::matvec_q16::<.*BlockQ8_0, 8>", SDOT, 8, 0.5625, 64),
    (r"dotprod::matmul::matvec_q16::<.*BlockQ4_0, 8>", SDOT, 8, 0.6563, 64),
    (r"dotprod::matmul::matvec_q16::<.*BlockQ4_1, 8>", SDOT, 8, None, 64),
    (r"dotprod::matmul::matvec_q16::<.*BlockQ5_0, 8>", SDOT, 8, None, 64),
    (r"dotprod::matmul::matvec_q16::<.*BlockQ5_1, 8>", SDOT, 8, None, 64),
    (r"dotprod::matmul::matvec_q16::<.*BlockQ2K, 1>", SDOT, 8, None, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockQ3K, 1>", SDOT, 8, None, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockQ4K, 1>", SDOT, 8, 0.5313, 64),
    (r"dotprod::matmul::matvec_q16::<.*BlockQ5K, 1>", SDOT, 8, None, 64),
    (r"dotprod::matmul::matvec_q16::<.*BlockQ6K, 1>", SDOT, 8, 0.9102, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockIq4Nl, 8>", SDOT, 8, None, 64),
    (r"dotprod::matmul::matvec_q16::<.*BlockIq4Xs, 1>", SDOT, 8, None, 64),
    (r"dotprod::matmul::matvec_q16::<.*BlockMxfp4, 8>", SDOT, 8, None, 64),
    (r"dotprod::matmul::matvec_q16::<.*BlockNvfp4, 4>", SDOT, 8, 0.8907, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockIq1S, 1>", SDOT, 8, 1.6797, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockIq1M, 1>", SDOT, 8, 2.25, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockIq2Xxs, 1>", SDOT, 8, 2.0313, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockIq2Xs, 1>", SDOT, 8, 2.0821, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockIq2S, 1>", SDOT, 8, 1.8672, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockIq3Xxs, 1>", SDOT, 8, 2.4688, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockIq3S, 1>", SDOT, 8, 2.7344, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockTq1_0, 1>", SDOT, 8, 2.0547, 32),
    (r"dotprod::matmul::matvec_q16::<.*BlockTq2_0, 1>", SDOT, 8, 0.4981, 64),
    (r"neon::matmul::matvec_q16::<.*BlockQ8_0, 8>", SMULL, 8, None, 64),
    (r"neon::matmul::matvec_q16::<.*BlockQ4_0, 8>", SMULL, 8, None, 64),
    (r"neon::matmul::matvec_q16::<.*BlockQ4K, 1>", SMULL, 8, None, 64),
    (r"neon::matmul::matvec_q16::<.*BlockQ6K, 1>", SMULL, 8, None, 32),
    (r"neon::attention::attention_f32$", FMLA_VECTOR, 4, 0.5313, 16),
    (r"neon::attention::attention_f16$", FMLA_VECTOR, 4, 0.6094, 16),
    # Scores of one query with four keys.
    (r"neon::attention_codes::attention_stored$", SMLAL, 4, 0.5313, 32),
    (r"neon::attention::attention_queries$", FMLA_VECTOR, 4, 0.4375, 16),
    (r"neon::attention::attention_keys$", FMLA_VECTOR, 4, 0.4375, 16),
    (r"neon::elementwise::dot$", FMLA_VECTOR, 4, 0.625, 8),
    (r"neon::elementwise::add_product$", FMLA_VECTOR, 4, 0.875, 8),
    (r"neon::elementwise::add_product_f16$", FMLA_VECTOR, 4, 0.9375, 8),
    (r"neon::elementwise::softmax$", EXPONENT, 4, 9, 1),
    (r"neon::elementwise::silu_mul$", EXPONENT, 4, 11.75, 1),
    (r"neon::elementwise::gelu_mul$", EXPONENT, 4, 12.75, 1),
    (r"neon::elementwise::gelu_erf_mul$", EXPONENT, 4, 18.75, 1),
    (r"neon::elementwise::swiglu_oai$", EXPONENT, 4, 14, 1),
    (r"neon::elementwise::sigmoid_mul$", EXPONENT, 4, 11, 1),
    (r"neon::gemm::tile_f32::<3>", FMLA, 4, 0.7292, None),
    (r"dotprod::gemm::tile_ints::<1, 32, 2>", SDOT_ELEMENT, 16, None, None),
    (r"dotprod::gemm::tile_ints::<1, 16, 2>", SDOT_ELEMENT, 16, None, None),
    (r"dotprod::gemm::tile_ints::<2, 32, 2>", SDOT_ELEMENT, 8, None, None),
    (r"dotprod::gemm::tile_ints::<2, 16, 2>", SDOT_ELEMENT, 8, 0.25, None),
    (r"i8mm::gemm::tile_ints::<1, 32, 2>", SMMLA, 32, None, None),
    (r"i8mm::gemm::tile_ints::<1, 16, 2>", SMMLA, 32, None, None),
    (r"i8mm::gemm::tile_ints::<2, 32, 2>", SMMLA, 16, None, None),
    (r"i8mm::gemm::tile_ints::<2, 16, 2>", SMMLA, 16, 0.2256, None),
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
# Test of `tests/it/instructions.rs`, its work, products or values of a state of one time, most instructions for each.
STEPS = []
# 32 rows of 1024 weights, by activation rows.
for dtype, by_rows in {
    "F32": {1: 0.63, 2: 0.58, 4: 0.45, 8: 0.43},
    "F16": {1: 1.21, 2: 0.63, 4: 0.6, 8: 0.59},
    "BF16": {1: 1.18, 2: 0.63, 4: 0.48, 8: 0.47},
}.items():
    STEPS += [("product", f"few {dtype} 32 1024 {m}", 32 * 1024 * m, most) for m, most in by_rows.items()]
# Keys and values of so many bits, 512 of each for a head of 128, by query rows.
for bits, by_rows in {
    32: {1: 1.09, 4: 0.62},
    16: {1: 1.17, 4: 0.65},
    8: {1: 1.53, 4: 0.8},
    6: {1: 1.77, 4: 0.86},
    5: {1: 1.75, 4: 0.85},
    4: {1: 1.42, 4: 0.77},
}.items():
    STEPS += [("attention", f"{bits} {m} 8 128", m * 8 * 64 * 2 * 128, most) for m, most in by_rows.items()]
# Rows and columns of the state; of the convolution, taps and channels.
STEPS += [
    ("step", "delta_rule 128 128", 128 * 128, 3.66),
    ("step", "delta_rule_by_row 128 128", 128 * 128, 4.16),
    ("step", "ssm_step 128 64", 128 * 64, 1.34),
    ("step", "ssm_step_by_state 16 1024", 16 * 1024, 10.83),
    ("step", "rwkv6_step 64 64", 64 * 64, 6.26),
    ("step", "rwkv7_step 64 64", 64 * 64, 8.77),
    ("step", "causal_conv 4 4096", 4 * 4096, 9.14),
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
        called = lambda loop: [code for code in loop if re.match(r"blr? ", code)]
        loops = [loop for body in bodies for loop in inner_loops(body)]
        if times is None:
            loop = max(loops, key=count, default=[])
        else:
            # Ends of rows may call what copies them.
            loop = max(
                (loop for loop in loops if count(loop) == times),
                key=lambda loop: (not called(loop), len(loop)),
                default=[],
            )
        if not count(loop):
            failures.append(f"{function}: no loop with {instruction}")
            continue
        n = products * count(loop)
        spills = sum(1 for code in loop if re.search(r"\[(sp|x29)\b", code))
        shown = "" if limit is None else f"{limit:.3f}"
        print(f"{len(loop):12} {n:8} {len(loop) / n:6.3f} {shown:>6} {spills:6}  {function}")
        if calls := called(loop):
            failures.append(f"{function}: calls {calls}")
        if limit is not None and len(loop) / n > limit:
            failures.append(f"{function}: {len(loop) / n:.3f} instructions per product, not {limit}")
    return failures


def executed(test, level, name, work):
    """Instructions that the emulator executes: it logs each block of them once as text, then each execution."""
    with tempfile.TemporaryDirectory() as directory:
        log = os.path.join(directory, "log")
        os.mkfifo(log)
        emulator = subprocess.Popen(
            ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", "-d", "in_asm,exec,nochain", "-D", log]
            + [test, "--ignored", "--exact", f"instructions::{name}"],
            env=os.environ | {"RUVLLM_ARCH": level, "RUVLLM_PRODUCT": work, "RUST_TEST_THREADS": "1"},
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
            sys.exit(f"{level} {name} {work} failed")
        return total


def executed_by_one(test, level, name, work, repeats=REPEATS):
    once, more = (executed(test, level, name, f"{work} {n}") for n in (1, 1 + repeats))
    return (more - once) / repeats


def test_program(root):
    built = subprocess.run(
        f"cargo test --locked --quiet --release --package ruvllm --target {TARGET}".split()
        + ["--test", "it", "--no-run", "--message-format=json"],
        check=True,
        cwd=root,
        stdout=subprocess.PIPE,
        env=os.environ | {"CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER": "aarch64-linux-gnu-gcc"},
    )
    artifacts = map(json.loads, built.stdout.splitlines())
    return next(a["executable"] for a in artifacts if a.get("target", {}).get("name") == "it")


def few_rows(test):
    failures, (rows, values) = [], (32, 1024)
    print("\nexecuted instructions per product, by activation rows")
    for level, kernel, counts in FEW_ROWS:
        for dtype in ("Q8_0", "Q4_0", "Q4_K", "Q6_K"):
            each = {}
            for m in counts:
                product = f"{kernel} {dtype} {rows} {values} {m}"
                each[m] = executed_by_one(test, level, "product", product) / (rows * values * m)
            print(f"{level:12} {kernel:6} {dtype}", *(f"{m:4}: {n:.3f}" for m, n in each.items()), flush=True)
            # Two rows of Q4_K without `sdot` take 3 % more each than one row alone.
            limit = 1.04 if (level, dtype) == ("neon", "Q4_K") else 1.02
            if kernel == "few" and max(each.values()) > limit * each[1]:
                failures.append(f"{level} {dtype}: a few activation rows take more than one")
    return failures


def steps(test):
    failures = []
    print("\nexecuted instructions per product, or value of a state")
    for name, work, n, limit in STEPS:
        each = executed_by_one(test, "neon", name, work, max(REPEATS, 2**20 // n)) / n
        print(f"{each:7.3f} {'' if limit is None else limit:>6}  {name} {work}", flush=True)
        if limit is not None and each > limit:
            failures.append(f"{name} {work}: {each:.3f} instructions, not {limit}")
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
    failures, test = check(found, CLAIMS), test_program(root)
    sys.exit("\n".join(failures + few_rows(test) + steps(test)) or 0)


if __name__ == "__main__":
    main()
