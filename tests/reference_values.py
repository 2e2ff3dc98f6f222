"""Weights of models without files: the hash of a tensor's name and of an element's index, as the tests in Rust make them."""

import numpy as np


def values(name, dims):
    """In shift ± scale: norms and other vectors near 1, biases near 0, matrices by their input width."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) % (1 << 64)
    x = np.arange(np.prod(dims), dtype=np.uint64) + np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    unit = ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
    if name.endswith("bias"):
        scale, shift = 0.5, 0.0
    elif name.endswith("ssm_a"):
        scale, shift = 0.5, -1.0
    elif len(dims) == 1:
        scale, shift = 0.25, 1.0
    else:
        scale, shift = 1.5 / np.sqrt(dims[0]), 0.0
    # ggml lists the innermost dimension first.
    return (np.float32(shift) + np.float32(scale) * unit).reshape(dims[::-1])
