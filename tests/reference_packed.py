#!/usr/bin/env python3
"""Makes tests/data/packed.json: matrices as GPTQ's, AWQ's and FP8's checkpoints store them, and hashes of their values.

    pip install numpy
    python tests/reference_packed.py

Written from the definitions alone: the layers of AutoGPTQ (`QuantLinear.pack`) and AutoAWQ (`WQLinear_GEMM.from_linear`), FP8's
table of "FP8 formats for deep learning" (Micikevicius et al., 2022), and the `weight_scale_inv` of DeepSeek-V3's README. A line
is a checkpoint: what of a Qwen 3 configuration differs, its packed tensors, the FNV-1a hash of each matrix's values as F32, and the
type that holds them.
"""

import base64
import json
import pathlib

import numpy as np

OUT = pathlib.Path(__file__).parent / "data" / "packed.json"
HIDDEN = 64
ATTENTION, DOWN, GATE = (f"model.layers.0.{part}_proj" for part in ("self_attn.q", "mlp.down", "mlp.gate"))


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in bytes(data):
        h = ((h ^ byte) * 0x100000001B3) % (1 << 64)
    return f"{h:016x}"


def tensor(array, dtype=None):
    dtype = dtype or {"int32": "I32", "float16": "F16", "float32": "F32"}[array.dtype.name]
    return [dtype, list(array.shape), base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def pack(codes, axis, order=range(8)):
    """Eight numbers of 4 bits along an axis as one of 32 bits; nibble i has the number order[i]."""
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    codes = codes.reshape(*codes.shape[:-1], -1, 8)
    words = np.zeros(codes.shape[:-1], np.uint32)
    for i, which in enumerate(order):
        words |= codes[..., which] << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def four_bits(rng, n_out, n_in, group, symmetric, sorted_by_activations):
    """Codes (n_in, n_out), zero points and scales (n_group, n_out), the group of each input."""
    n_group = n_in // group
    codes = rng.integers(0, 16, (n_in, n_out))
    zeros = np.full((n_group, n_out), 8) if symmetric else rng.integers(1, 16, (n_group, n_out))
    scales = (rng.random((n_group, n_out)) * 0.05 + 0.001).astype(np.float16)
    groups = np.arange(n_in) // group
    if sorted_by_activations:
        groups = rng.permutation(groups)
    values = scales.astype(np.float32)[groups] * (codes - zeros[groups]).astype(np.float32)
    return codes, zeros, scales, groups.astype(np.int32), np.ascontiguousarray(values.T)


def packed(name, how, group, symmetric, act_order=False, v2=False, exact=None):
    rng = np.random.default_rng(abs(hash_of(name)))
    inner, tensors, values = 128, {}, {}
    for module, n_out, n_in in ((ATTENTION, 2 * HIDDEN, HIDDEN), (DOWN, HIDDEN, inner), (GATE, inner, HIDDEN)):
        size = n_in if group == -1 else min(group, n_in)
        codes, zeros, scales, groups, values[module] = four_bits(rng, n_out, n_in, size, symmetric, act_order)
        if how == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            tensors[f"{module}.qweight"] = tensor(pack(codes, 1, order))
            tensors[f"{module}.qzeros"] = tensor(pack(zeros, 1, order))
        else:
            tensors[f"{module}.qweight"] = tensor(pack(codes, 0))
            tensors[f"{module}.qzeros"] = tensor(pack(zeros if v2 else zeros - 1, 1))
            tensors[f"{module}.g_idx"] = tensor(groups)
        tensors[f"{module}.scales"] = tensor(scales)
    config = {"quant_method": how, "bits": 4, "group_size": group}
    if how == "gptq":
        config |= {"desc_act": act_order, "sym": symmetric, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    else:
        config |= {"zero_point": not symmetric, "version": "gemm"}
    return line(name, inner, config, tensors, values, exact)


def line(name, inner, config, tensors, values, exact):
    hashes = {f"{module}.weight": fnv(array.astype("<f4").tobytes()) for module, array in values.items()}
    return {"name": name, "config": {"intermediate_size": inner, "num_hidden_layers": 1, "quantization_config": config},
            "tensors": tensors, "values": hashes, "exact": exact}


def hash_of(name):
    return int(fnv(name.encode()), 16)


def e4m3():
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, (code & 7) / 8
    magnitude = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0))
    magnitude[code & 127 == 127] = np.nan
    return np.where(code >> 7, -magnitude, magnitude).astype(np.float32)


def float8(name, block, per_row=False):
    rng = np.random.default_rng(abs(hash_of(name)))
    inner, tensors, values = 192 if block else 128, {}, {}
    for module, rows, columns in ((ATTENTION, 2 * HIDDEN, HIDDEN), (DOWN, HIDDEN, inner), (GATE, inner, HIDDEN)):
        codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
        codes[codes & 127 == 127] = 0x38
        r, c = (block, block) if block else (1, columns) if per_row else (rows, columns)
        scales = rng.random((-(-rows // r), -(-columns // c))).astype(np.float32) * np.float32(1e-3)
        full = np.repeat(np.repeat(scales, r, 0), c, 1)[:rows, :columns]
        values[module] = e4m3()[codes] * full
        tensors[f"{module}.weight"] = tensor(codes, "F8_E4M3")
        if block:
            tensors[f"{module}.weight_scale_inv"] = tensor(scales)
        else:
            tensors[f"{module}.weight_scale"] = tensor(scales if per_row else scales.reshape(()))
            tensors[f"{module}.input_scale"] = tensor(np.float32(0.5).reshape(()))
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"} | ({"weight_block_size": [block, block]} if block else {})
    return line(name, inner, config, tensors, values, None)


LINES = [
    packed("gptq", "gptq", 32, True, exact="Q4_0"),
    packed("gptq-zeros", "gptq", 64, False, exact="Q5_0"),
    packed("gptq-act-order", "gptq", 32, True, act_order=True),
    packed("gptq-v2", "gptq", -1, False, v2=True, exact="Q5_0"),
    packed("awq", "awq", 128, False, exact="Q5_0"),
    packed("awq-symmetric", "awq", 32, True, exact="Q4_0"),
    float8("fp8", None),
    float8("fp8-rows", None, per_row=True),
    float8("fp8-blocks", 128),
]
OUT.write_text("".join(json.dumps(line) + "\n" for line in LINES))
