#!/usr/bin/env python3
"""Makes tests/data/shapes.json: metadata, and names and shapes of the tensors, of tiny models of each architecture.

    pip install gguf
    python tests/reference_shapes.py conformance/models*/*/model-f16.gguf

A line is a model. Tensors that layers share are listed once, with the layers that have them; the vocabulary is cut to
`N_VOCAB`. Architectures of tests/data/families.json are not repeated.
"""

import json
import pathlib
import re
import sys

import gguf
import numpy as np

N_VOCAB = 50
OUT = pathlib.Path(__file__).parent / "data" / "shapes.json"


def shortest(value):
    """Numbers in `f32` with no more digits than that has; JSON has no infinity."""
    if isinstance(value, list):
        return [shortest(x) for x in value]
    return float(str(np.float32(max(value, -1e30)))) if isinstance(value, float) else value


def model(path):
    reader = gguf.GGUFReader(path)
    metadata = {}
    for key, field in reader.fields.items():
        if key == "general.architecture" or not key.startswith(("GGUF.", "general.", "tokenizer.")):
            metadata[key] = N_VOCAB if key.endswith(".vocab_size") else shortest(field.contents())
    n_vocab = next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight")
    tensors = {}
    for t in reader.tensors:
        dims = [int(n) for n in t.shape]
        if t.name.startswith(("token_embd.", "output.", "per_layer_token_embd.")) and dims[-1] == n_vocab:
            dims[-1] = N_VOCAB
        layer = re.fullmatch(r"blk\.(\d+)\.(.*)", t.name)
        name = f"blk.*.{layer[2]}" if layer else t.name
        tensors.setdefault((name, tuple(dims)), []).append(int(layer[1]) if layer else 0)
    return metadata, [[name, list(dims), layers] for (name, dims), layers in tensors.items()]


def main():
    lines = []
    for path in map(pathlib.Path, sys.argv[1:]):
        metadata, tensors = model(path)
        lines.append(json.dumps({"name": path.parent.name, "metadata": metadata, "tensors": tensors}, separators=(",", ":")))
    OUT.write_text("\n".join(lines) + "\n")


main()
