#!/usr/bin/env python3
"""Makes tests/data/convert.json: for tiny models of each family, what a folder of Hugging Face has, and what llama.cpp's
convert_hf_to_gguf.py makes of it.

    pip install torch transformers safetensors sentencepiece numpy
    python tests/reference_convert.py LLAMA_CPP [MODEL…]

LLAMA_CPP is a checkout of llama.cpp; with names, only these models are made again. Names and shapes of the tensors are those of transformers' own models; the values are
a hash of name and index (`values`), so that no file has to hold them. A tensor of the GGUF file is kept as its dimensions,
its type and a hash of its bytes, an array of metadata as its length and a hash.
"""

import base64
import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

LLAMA_CPP = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(LLAMA_CPP))
sys.path.insert(1, str(LLAMA_CPP / "gguf-py"))
import gguf  # noqa: E402
from conversion import ModelBase, get_model_class, get_model_architecture  # noqa: E402
from conversion.base import ModelType, TextModel  # noqa: E402

OUT = pathlib.Path(__file__).parent / "data" / "convert.json"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")

# A list of steps.
DEEPSEEK3 = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
             r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""]


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in bytes(data):
        h = ((h ^ byte) * 0x100000001B3) % (1 << 64)
    return f"{h:016x}"


def values(name, shape):
    """Between -1 and 1, with few enough bits to be exact in every type."""
    seed = int(fnv(name.encode()), 16)
    x = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(57)
    return torch.from_numpy((x.astype(np.float32) / np.float32(64) - np.float32(1)).reshape(shape))


def byte_letters():
    """GPT-2's letters for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))]


def bpe(pattern, ignore_merges=False, template=True, special=("<|begin|>", "<|end|>"), digits=False):
    """tokenizer.json of a byte-level BPE with a few merges."""
    vocab = {letter: i for i, letter in enumerate(byte_letters())}
    merges = [["t", "h"], ["th", "e"], ["Ġ", "the"], ["i", "n"], ["Ġ", "in"]]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    added = [(text, True) for text in special] + [("<think>", False)]
    added = [
        {"id": len(vocab) + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": s}
        for i, (text, s) in enumerate(added)
    ]
    patterns = pattern if isinstance(pattern, list) else [pattern] if pattern else []
    steps = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    steps += [{"type": "Digits", "individual_digits": True}] if digits else []
    steps += [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not pattern}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    begin = {"SpecialToken": {"id": special[0], "type_id": 0}}
    a = {"Sequence": {"id": "A", "type_id": 0}}
    b = {"Sequence": {"id": "B", "type_id": 1}}
    ids = {special[0]: {"id": special[0], "ids": [added[0]["id"]], "tokens": [special[0]]}}
    processing = {"type": "TemplateProcessing", "single": [begin, a], "pair": [begin, a, begin, b], "special_tokens": ids}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {"type": "Sequence", "processors": [byte_level, processing]} if template else byte_level,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges,
        },
    }


def added(*texts):
    names = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": i, "content": text, **names} for i, text in enumerate(texts)]


def processing(begin, end, between):
    """What is put around one text, and around and between two."""
    special = lambda text: {"SpecialToken": {"id": text, "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    ids = {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in [begin, end]}
    begin, end = special(begin[0]), special(end[0])
    pair = [begin, a, *[end] * between, b, end]
    return {"type": "TemplateProcessing", "single": [begin, a, end], "pair": pair, "special_tokens": ids}


def wordpiece():
    """tokenizer.json of BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    texts = special + list("abcdefghijklmnopqrstuvwxyz") + ["##" + c for c in "abcdefghijklmnopqrstuvwxyz"] + ["the", "th", "##in", "!"]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added(*special),
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": processing(("[CLS]", 2), ("[SEP]", 3), 1),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                  "vocab": {text: i for i, text in enumerate(texts)}},
    }


def unigram():
    """tokenizer.json of XLM-RoBERTa, with the replacements of tests/data/unigram.json."""
    charsmap = json.loads((OUT.parent / "unigram.json").read_text())[0]["charsmap"]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    texts = ["▁", "t", "h", "e", "▁t", "he", "▁the", "i", "n", "▁in", "a", "s"]
    vocab = [[text, 0.0] for text in special] + [[text, -1.0 - i / 4] for i, text in enumerate(texts)]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added(*special),
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes.fromhex(charsmap)).decode()},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": processing(("<s>", 0), ("</s>", 2), 2),
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 3, "vocab": vocab, "byte_fallback": False},
    }


def gemma4():
    """tokenizer.json of a BPE with bytes and `▁`."""
    texts = ["<pad>", "<eos>", "<bos>", "<unk>"] + [f"<0x{b:02X}>" for b in range(256)]
    texts += ["▁", "t", "h", "e", "▁t", "he", "▁the", "i", "n", "in", "▁in", "<|channel>"]
    merges = [["▁", "t"], ["h", "e"], ["▁t", "he"], ["i", "n"], ["▁", "in"]]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added(*texts[:4]),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
                  "byte_fallback": True, "ignore_merges": False, "vocab": {text: i for i, text in enumerate(texts)}, "merges": merges},
    }


def world():
    """RWKV's vocabulary: all bytes, and some texts; token 261 is an empty line."""
    texts = [bytes([i]) if i > 127 else chr(i) for i in range(256)] + ["th", " the", "'\"", "\u4e00", "\n\n", "in", b"\xe4\xb8"]
    sizes = [len(text if isinstance(text, bytes) else text.encode()) for text in texts]
    return "".join(f"{i} {text!r} {size}\n" for i, (text, size) in enumerate(zip(texts, sizes), 1)).encode()


def sentencepiece():
    """tokenizer.model: unknown, two controls, a user's token, the bytes and some texts."""
    from sentencepiece import sentencepiece_model_pb2 as pb

    model = pb.ModelProto()
    texts = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3), ("<pad>", 0, 4)]
    texts += [(f"<0x{b:02X}>", 0, 6) for b in range(256)]
    texts += [(text, -float(i), 1) for i, text in enumerate(["▁", "t", "h", "e", "▁t", "he", "▁the", "i", "n", "▁in"])]
    for text, score, kind in texts:
        model.pieces.add(piece=text, score=score, type=kind)
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    return model.SerializeToString()


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
BEGIN_END = {"bos_token": "<|begin|>", "eos_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}, "chat_template": TEMPLATE}
SP_SETTINGS = {
    "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    "tokenizer_class": "LlamaTokenizer",
    "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}, "1": {"content": "<s>", "special": True},
                             "2": {"content": "</s>", "special": True}, "270": {"content": "<think>", "special": False}},
}
# Files of each kind of tokenizer; `pre` is the name that llama.cpp would find by the hash of a known vocabulary.
TOKENIZERS = {
    "llama3": {"tokenizer.json": bpe(LLAMA3, True), "tokenizer_config.json": {**BEGIN_END, "tokenizer_class": "PreTrainedTokenizerFast"}, "pre": "llama-bpe"},
    "qwen": {
        "tokenizer.json": bpe(QWEN2, template=False, special=("<|endoftext|>", "<|im_end|>")),
        "tokenizer_config.json": {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                                  "tokenizer_class": "PreTrainedTokenizerFast",
                                  "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool-use", "template": "x"}]},
        "pre": "qwen2",
    },
    "digits": {"tokenizer.json": bpe(None, digits=True, template=False), "tokenizer_config.json": {**BEGIN_END, "tokenizer_class": "PreTrainedTokenizerFast"}, "pre": "smollm"},
    "dbrx": {"tokenizer.json": bpe(LLAMA3, template=False), "tokenizer_config.json": {**BEGIN_END, "tokenizer_class": "PreTrainedTokenizerFast"}, "pre": "dbrx"},
    "glm": {"tokenizer.json": bpe(LLAMA3, template=False, special=("[gMASK]", "<|endoftext|>", "<|user|>", "<|observation|>")),
            "tokenizer_config.json": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}, "pre": "dbrx"},
    "deepseek": {"tokenizer.json": bpe(DEEPSEEK3), "tokenizer_config.json": {**BEGIN_END, "tokenizer_class": "PreTrainedTokenizerFast"}, "pre": "deepseek-v3"},
    "gemma4": {
        "tokenizer.json": gemma4(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
        "pre": None,
    },
    "wordpiece": {
        "tokenizer.json": wordpiece(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]",
                                  "pad_token": "[PAD]", "mask_token": "[MASK]"},
        "pre": "bert-bge",
    },
    "bert": {
        "tokenizer.json": wordpiece(),
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]",
                                  "mask_token": "[MASK]"},
        "pre": "bert-bge",
    },
    "unigram": {
        "tokenizer.json": unigram(),
        "tokenizer_config.json": {"tokenizer_class": "XLMRobertaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>",
                                  "unk_token": "<unk>", "pad_token": "<pad>", "clean_up_tokenization_spaces": True},
        "pre": "default",
    },
    "gpt2": {"tokenizer.json": bpe(None, template=False), "tokenizer_config.json": {**BEGIN_END, "tokenizer_class": "PreTrainedTokenizerFast"}, "pre": "gpt-2"},
    "internlm": {"tokenizer.model": sentencepiece(), "tokenizer_config.json": {**SP_SETTINGS, "added_tokens_decoder": {}}, "pre": None},
    "spm": {"tokenizer.model": sentencepiece(), "tokenizer_config.json": SP_SETTINGS, "pre": None},
    "world": {"rwkv_vocab_v20230424.txt": world(),
              "tokenizer_config.json": {"add_prefix_space": False, "bos_token": "<s>", "eos_token": "<s>", "tokenizer_class": "Rwkv6Tokenizer", "chat_template": TEMPLATE},
              "pre": None},
}

BASE = {
    "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
         "layer_types": ["linear_attention", "full_attention"]}
GLM_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
           "routed_scaling_factor": 1.5, "norm_topk_prob": True, "num_nextn_predict_layers": 1}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16,
           "layer_types": ["sliding_attention", "full_attention"],
           "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 64,
                               "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
GEMMA4 = {"vocab_size": 272, "head_dim": 16, "global_head_dim": 32, "sliding_window": 32, "num_hidden_layers": 4,
          "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
HYBRID = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4,
          "mamba_expand": 2, "embedding_multiplier": 12.0, "attention_multiplier": 0.0625, "residual_multiplier": 0.25, "logits_scaling": 8.0,
          "position_embedding_type": "nope"}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
# What configurations of old models have not.
OLD = {"intermediate_size": None, "num_key_value_heads": None}
XLM_ROBERTA = {"num_key_value_heads": None, "pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66}
# Name, class of transformers, its options, kind of tokenizer, type of the checkpoint, outtype.
MODELS = [
    ("llama", "Llama", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5}, "llama3", "bfloat16", "auto"),
    ("llama-spm", "Llama", {"attention_bias": True, "tie_word_embeddings": True}, "spm", "float16", "q8_0"),
    ("mistral", "Mistral", {"head_dim": 32, "sliding_window": None, "rope_theta": 1000000.0}, "spm", "bfloat16", "f16"),
    ("mixtral", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "spm", "bfloat16", "bf16"),
    ("smollm3", "SmolLM3", {"tie_word_embeddings": True, "pad_token_id": 0}, "llama3", "bfloat16", "auto"),
    ("arcee", "Arcee", {}, "llama3", "bfloat16", "auto"),
    ("granite", "Granite", {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0},
     "digits", "bfloat16", "auto"),
    ("qwen2", "Qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000000.0, "original_max_position_embeddings": 64}},
     "qwen", "bfloat16", "f32"),
    ("qwen2moe", "Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 48}, "qwen", "bfloat16", "auto"),
    ("qwen3", "Qwen3", {"head_dim": 32, "rope_theta": 1000000.0, "tie_word_embeddings": True}, "qwen", "bfloat16", "q8_0"),
    ("qwen3moe", "Qwen3Moe", {**MOE, "head_dim": 32, "norm_topk_prob": True}, "qwen", "bfloat16", "auto"),
    ("qwen3-embedding", "Qwen3Embedding", {"head_dim": 32, "tie_word_embeddings": True}, "qwen", "bfloat16", "auto"),
    ("seed_oss", "SeedOss", {"head_dim": 16, "attention_out_bias": False}, "qwen", "bfloat16", "auto"),
    ("gemma2", "Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32}, "spm", "bfloat16", "auto"),
    ("gemma3", "Gemma3Text", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32, "vocab_size": 288}, "spm", "bfloat16", "auto"),
    ("phi3", "Phi3", {"pad_token_id": 0, "original_max_position_embeddings": 64, "sliding_window": 128,
                      "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [1.0 + i for i in range(8)],
                                          "short_factor": [1.0 + i / 8 for i in range(8)], "original_max_position_embeddings": 64}},
     "spm", "bfloat16", "auto"),
    ("olmo2", "Olmo2", {}, "dbrx", "float32", "f16"),
    ("olmo", "Olmo", {"clip_qkv": 8.0}, "dbrx", "bfloat16", "auto"),
    ("olmoe", "Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, "dbrx", "bfloat16", "auto"),
    ("command-r", "Cohere", {"use_qk_norm": False, "logit_scale": 0.0625}, "digits", "bfloat16", "auto"),
    ("cohere2", "Cohere2", {"head_dim": 16, "sliding_window": 32, "logit_scale": 0.25, "num_hidden_layers": 4, "rotary_pct": 1.0}, "digits", "bfloat16", "auto"),
    ("exaone4", "Exaone4", {"sliding_window": 32, "num_hidden_layers": 4, "sliding_window_pattern": 4}, "dbrx", "bfloat16", "auto"),
    ("starcoder2", "Starcoder2", {}, "digits", "bfloat16", "auto"),
    ("stablelm", "StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}, "dbrx", "bfloat16", "auto"),
    ("granitemoe", "GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, "digits", "bfloat16", "auto"),
    ("granitemoeshared", "GraniteMoeShared", {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48}, "digits", "bfloat16", "auto"),
    ("lfm2", "Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3}, "llama3", "bfloat16", "auto"),
    ("mamba", "Mamba", {"state_size": 8, "intermediate_size": 128}, "dbrx", "float32", "f16"),
    ("qwen3next", "Qwen3Next", {**MOE, "head_dim": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                                "linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
     "qwen", "bfloat16", "auto"),
    ("qwen35", "Qwen3_5Text", {"head_dim": 32, "tie_word_embeddings": True, **DELTA}, "qwen", "bfloat16", "auto"),
    ("qwen35moe", "Qwen3_5MoeText", {**MOE, "head_dim": 32, "shared_expert_intermediate_size": 32, **DELTA}, "qwen", "bfloat16", "auto"),
    ("glm4", "Glm4", {"head_dim": 16, "pad_token_id": 0}, "glm", "bfloat16", "auto"),
    ("glm4moe", "Glm4Moe", {**GLM_MOE, "head_dim": 32, "use_qk_norm": True, "partial_rotary_factor": 0.5, "attention_bias": True}, "glm", "bfloat16", "auto"),
    ("glm4moe-lite", "Glm4MoeLite", {**GLM_MOE, **MLA, "q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse"]}, "glm", "bfloat16", "auto"),
    ("gpt-oss", "GptOss", GPT_OSS, "dbrx", "bfloat16", "auto"),
    ("gpt-oss-mxfp4", "GptOss", GPT_OSS, "dbrx", "bfloat16", "auto"),
    ("deepseek2-lite", "DeepseekV2", {**GLM_MOE, **MLA, "q_lora_rank": None, "norm_topk_prob": False, "routed_scaling_factor": 1.0}, "deepseek", "bfloat16", "auto"),
    ("deepseek3", "DeepseekV3", {**GLM_MOE, **MLA, "q_lora_rank": 24, "n_group": 2, "topk_group": 1, "scoring_func": "sigmoid",
                                 "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                                                     "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}},
     "deepseek", "bfloat16", "q8_0"),
    ("mamba2", "Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2, "intermediate_size": 128}, "dbrx", "float32", "f16"),
    ("gemma4-e", "Gemma4", {**GEMMA4, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 272, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
     "gemma4", "bfloat16", "auto"),
    ("gemma4-moe", "Gemma4", {**GEMMA4, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                              "moe_intermediate_size": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}, "gemma4", "bfloat16", "auto"),
    ("bert", "Bert", {"num_key_value_heads": None}, "wordpiece", "float32", "f16"),
    ("xlm-roberta", "XLMRoberta", {**XLM_ROBERTA, "layer_norm_eps": 1e-5}, "unigram", "float16", "auto"),
    ("xlm-roberta-reranker", "XLMRobertaReranker", {**XLM_ROBERTA, "num_labels": 1}, "unigram", "float32", "f32"),
    ("gemma", "Gemma", {"head_dim": 32}, "spm", "bfloat16", "auto"),
    ("gemma3n", "Gemma3n", {"vocab_size": 280, "head_dim": 32, "sliding_window": 32, "num_hidden_layers": 4, "vocab_size_per_layer_input": 280,
                            "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
                            "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]}, "spm", "bfloat16", "auto"),
    ("qwen2vl", "Qwen2_5_VL", {"bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]}}, "qwen", "bfloat16", "auto"),
    ("qwen3vl", "Qwen3VL", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
     "qwen", "bfloat16", "auto"),
    ("qwen3vlmoe", "Qwen3VLMoe", {**MOE, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [4, 2, 2]}},
     "qwen", "bfloat16", "auto"),
    ("ministral3", "Ministral3", {"head_dim": 32, "tie_word_embeddings": True,
                                  "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 64,
                                                      "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
     "llama3", "bfloat16", "auto"),
    ("llama4", "Llama4", {"head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
                          "interleave_moe_layer_step": 2, "pad_token_id": 0, "rope_parameters": LLAMA3_ROPE, "num_hidden_layers": 4}, "llama3", "bfloat16", "auto"),
    ("ernie4_5", "Ernie4_5", {"head_dim": 32, "tie_word_embeddings": True}, "spm", "bfloat16", "auto"),
    ("ernie4_5-moe", "Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
                                      "moe_layer_interval": 1, "tie_word_embeddings": True}, "spm", "bfloat16", "auto"),
    ("dots1", "Dots1", {**GLM_MOE, "num_nextn_predict_layers": 0, "head_dim": 16, "num_key_value_heads": 4}, "dbrx", "bfloat16", "auto"),
    ("minimax-m2", "MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16, "intermediate_size": 32}, "dbrx", "bfloat16", "auto"),
    ("hunyuan-dense", "HunYuanDenseV1", {"head_dim": 32, "tie_word_embeddings": True}, "dbrx", "bfloat16", "auto"),
    ("granitehybrid", "GraniteMoeHybrid", {**HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48}, "digits", "bfloat16", "auto"),
    ("granitehybrid-dense", "GraniteMoeHybrid", {**HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96,
                                                 "tie_word_embeddings": True}, "digits", "bfloat16", "auto"),
    ("granite4", "GraniteMoeHybrid", {**HYBRID, "layer_types": ["attention", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0,
                                      "shared_intermediate_size": 96, "position_embedding_type": "rope"}, "digits", "bfloat16", "auto"),
    ("lfm2moe", "Lfm2Moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
     "llama3", "bfloat16", "auto"),
    ("afmoe", "Afmoe", {**MOE, "head_dim": 16, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 32, "route_scale": 2.0, "mup_enabled": True,
                        "global_attn_every_n_layers": 4, "num_hidden_layers": 4}, "llama3", "bfloat16", "auto"),
    ("exaone-moe", "ExaoneMoe", {**MOE, "head_dim": 16, "num_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 32, "routed_scaling_factor": 2.5,
                                 "num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, "dbrx", "bfloat16", "auto"),
    ("hy_v3", "HYV3", {**MOE, "head_dim": 16, "num_shared_experts": 1, "first_k_dense_replace": 1, "router_scaling_factor": 2.5}, "dbrx", "bfloat16", "auto"),
    ("nemotron_h_moe", "NemotronH", {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "head_dim": 32,
                                     "layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2,
                                     "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                                     "num_hidden_layers": 4}, "dbrx", "bfloat16", "auto"),
    ("nemotron", "Nemotron", {"partial_rotary_factor": 0.5, "norm_eps": 1e-5, "head_dim": 16}, "spm", "bfloat16", "auto"),
    ("jamba", "Jamba", {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False}, "spm", "bfloat16", "auto"),
    ("modern-bert", "ModernBert", {"num_key_value_heads": None, "local_attention": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                                  "cls_token_id": 1, "sep_token_id": 2, "num_hidden_layers": 4}, "dbrx", "bfloat16", "auto"),
    ("nomic-bert", "", {}, "wordpiece", "float32", "auto"),
    ("nomic-bert-moe", "", {}, "unigram", "float32", "auto"),
    ("jina-bert-v2", "", {}, "bert", "float32", "f16"),
    ("falcon-h1", "FalconH1", {"head_dim": 16, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
                               "mamba_rms_norm": True, "mamba_norm_before_gate": False, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0, "mlp_multipliers": [0.5, 0.25], "key_multiplier": 0.3,
                               "attention_out_multiplier": 0.75, "attention_in_multiplier": 1.1, "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 0.3],
                               "ssm_in_multiplier": 1.7, "ssm_out_multiplier": 0.5, "rope_theta": 100000.0}, "dbrx", "bfloat16", "auto"),
    ("apertus", "Apertus", {"pad_token_id": 0}, "llama3", "bfloat16", "auto"),
    ("kimi-linear", "", {}, "dbrx", "bfloat16", "auto"),
    ("mimo2", "MiMoV2Flash", {"head_dim": 24, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 16,
                              "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
     "dbrx", "bfloat16", "auto"),
    ("mistral4", "Mistral4", {**GLM_MOE, **MLA, "num_nextn_predict_layers": 0, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
                              "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
                                                  "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.0}}, "dbrx", "bfloat16", "auto"),
    ("hunyuan-moe", "HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}, "dbrx", "bfloat16", "auto"),
    ("bailingmoe2", "", {}, "dbrx", "bfloat16", "auto"),
    ("smallthinker", "", {}, "qwen", "bfloat16", "auto"),
    ("phimoe", "Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "attention_bias": True, "lm_head_bias": True},
     "spm", "bfloat16", "auto"),
    ("minicpm", "", {}, "spm", "bfloat16", "auto"),
    ("minicpm3", "MiniCPM3", {**MLA, "q_lora_rank": 24, "v_head_dim": 16, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}, "spm", "bfloat16", "auto"),
    ("internlm2", "", {}, "internlm", "bfloat16", "auto"),
    ("baichuan", "", {}, "spm", "bfloat16", "auto"),
    ("cohere2moe", "Cohere2Moe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 32, "num_hidden_layers": 4,
                                  "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "prefix_dense_intermediate_size": 80,
                                  "mlp_layer_types": ["dense"] + ["sparse"] * 3}, "dbrx", "bfloat16", "auto"),
    ("granite-swa", "GraniteSWA", {"sliding_window": 32, "num_hidden_layers": 4}, "digits", "bfloat16", "auto"),
    ("granite-moe-swa", "GraniteMoeSWA", {"sliding_window": 32, "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
     "digits", "bfloat16", "auto"),
    ("jais2", "Jais2", {"head_dim": 16}, "dbrx", "bfloat16", "auto"),
    ("chatglm", "Glm", {"head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "pad_token_id": 0}, "glm", "bfloat16", "auto"),
    ("gpt2", "GPT2", {**OLD, "n_embd": 64, "n_head": 4, "n_layer": 2}, "gpt2", "float32", "f16"),
    ("gptneox", "GPTNeoX", {"rotary_pct": 0.25, "num_key_value_heads": None}, "gpt2", "float16", "auto"),
    ("starcoder", "GPTBigCode", {**OLD, "n_embd": 64, "n_head": 4, "n_layer": 2}, "gpt2", "float32", "f16"),
    ("bloom", "Bloom", {**OLD, "max_position_embeddings": None, "n_head": 4, "n_layer": 2}, "gpt2", "float16", "auto"),
    ("mpt", "Mpt", {**OLD, "max_position_embeddings": None, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}, "gpt2", "bfloat16", "auto"),
    ("falcon", "Falcon", {**OLD, "num_kv_heads": 2, "new_decoder_architecture": True}, "gpt2", "bfloat16", "auto"),
    ("falcon-7b", "Falcon", {**OLD, "num_kv_heads": 1, "multi_query": True, "parallel_attn": True}, "gpt2", "bfloat16", "auto"),
    ("dbrx", "Dbrx", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
                      "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 500000.0}}, "dbrx", "bfloat16", "auto"),
    ("rwkv6", "", {}, "world", "bfloat16", "auto"),
    ("rwkv7", "", {}, "world", "bfloat16", "auto"),
    ("embeddinggemma", "EmbeddingGemma", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32, "use_bidirectional_attention": True}, "spm", "bfloat16", "auto"),
]
# Classes of a configuration and a model that are not called as the rest.
CLASSES = {"EmbeddingGemma": ("Gemma3Text", "Gemma3TextModel"), "Qwen3_5Text": ("Qwen3_5Text", "Qwen3_5ForCausalLM"), "Qwen3_5MoeText": ("Qwen3_5MoeText", "Qwen3_5MoeForCausalLM"),
           "Gemma3Text": ("Gemma3Text", "Gemma3ForCausalLM"), "Qwen3Embedding": ("Qwen3", "Qwen3Model"),
           "Gemma4": ("Gemma4Text", "Gemma4ForCausalLM"), "Bert": ("Bert", "BertModel"), "ModernBert": ("ModernBert", "ModernBertModel"),
           "Gemma3n": ("Gemma3nText", "Gemma3nForCausalLM"), "Llama4": ("Llama4Text", "Llama4ForCausalLM"),
           "Qwen2_5_VL": ("Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration"), "Qwen3VL": ("Qwen3VL", "Qwen3VLForConditionalGeneration"),
           "Qwen3VLMoe": ("Qwen3VLMoe", "Qwen3VLMoeForConditionalGeneration"), "XLMRoberta": ("XLMRoberta", "XLMRobertaModel"),
           "GPT2": ("GPT2", "GPT2LMHeadModel"),
           "XLMRobertaReranker": ("XLMRoberta", "XLMRobertaForSequenceClassification")}
# What the published config.json says otherwise.
EDITS = {"granitehybrid": {"layer_types": ["mamba", "attention"]}, "granitehybrid-dense": {"layer_types": ["mamba", "attention"]},
         "granite4": {"layer_types": ["attention", "attention"]},
         "mimo2": {"swa_head_dim": 24, "swa_v_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "hybrid_layer_pattern": [0, 1],
                   "topk_method": "noaux_tc", "scoring_func": "sigmoid", "layernorm_epsilon": 1e-5, "rope_parameters": None, "rope_theta": 5000000.0,
                   "swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334},
         "mistral4": {"architectures": ["Mistral3ForConditionalGeneration"]},
         "hunyuan-moe": {"moe_intermediate_size": [96, 96], "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
         "phimoe": {"architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 256},
         "gpt2": {"n_ctx": 256}, "gptneox": {"rotary_pct": 0.25}, "mpt": {"architectures": ["MPTForCausalLM"]}}
NOMIC = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": 64, "n_head": 4, "n_inner": 96, "n_layer": 2, "vocab_size": 288,
         "max_trained_positions": 2048, "layer_norm_epsilon": 1e-12, "type_vocab_size": 2, "causal": False, "prenorm": False, "rotary_emb_base": 1000,
         "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None}
MIXED = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 288, "max_position_embeddings": 256,
         "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
EMBEDDINGS = {"model.embed_tokens.weight": [288, 64], "model.norm.weight": [64], "lm_head.weight": [288, 64]}
NORMS = {"input_layernorm.weight": [64], "post_attention_layernorm.weight": [64]}
ATTENTION = {"self_attn.q_proj.weight": [64, 64], "self_attn.k_proj.weight": [32, 64], "self_attn.v_proj.weight": [32, 64], "self_attn.o_proj.weight": [64, 64]}
MLP = {"mlp.gate_proj.weight": [96, 64], "mlp.up_proj.weight": [96, 64], "mlp.down_proj.weight": [64, 96]}
NOMIC_AROUND = {"embeddings.word_embeddings.weight": [288, 64], "embeddings.token_type_embeddings.weight": [2, 64], "emb_ln.weight": [64], "emb_ln.bias": [64]}
NOMIC_NORMS = {f"norm{i}.{part}": [64] for i in (1, 2) for part in ("weight", "bias")}


def experts(path, gate, up, down, n=4, n_ff=32):
    return {f"{path}.{i}.{name}.weight": shape for i in range(n) for name, shape in [(gate, [n_ff, 64]), (up, [n_ff, 64]), (down, [64, n_ff])]}


def of_bert(parts):
    return {f"{part}.{end}": shape if end == "weight" else shape[:1] for part, shape in parts.items() for end in ("weight", "bias")}


# Models whose code is not transformers': their config.json, the names and shapes of what is around the layers, what the layers are called, what each has, and what
# one of them has.
PUBLISHED = {
    "nomic-bert": ({**NOMIC, "n_positions": 8192, "activation_function": "swiglu", "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False},
                   NOMIC_AROUND, "encoder.layers",
                   {"attn.Wqkv.weight": [192, 64], "attn.out_proj.weight": [64, 64], "mlp.fc11.weight": [96, 64], "mlp.fc12.weight": [96, 64],
                    "mlp.fc2.weight": [64, 96], **NOMIC_NORMS}, {}),
    "nomic-bert-moe": ({**NOMIC, "n_positions": 2048, "rotary_emb_base": 10000, "type_vocab_size": 1, "pad_token_id": 1, "activation_function": "gelu",
                        "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "moe_every_n_layers": 2, "num_experts": 4, "moe_top_k": 2},
                       {**NOMIC_AROUND, "embeddings.token_type_embeddings.weight": [1, 64]}, "encoder.layers",
                       {"attn.Wqkv.weight": [192, 64], "attn.Wqkv.bias": [192], "attn.out_proj.weight": [64, 64], "attn.out_proj.bias": [64]},
                       {0: {"mlp.fc1.weight": [96, 64], "mlp.fc1.bias": [96], "mlp.fc2.weight": [64, 96], "mlp.fc2.bias": [64], **NOMIC_NORMS},
                        1: {"mlp.router.layer.weight": [4, 64], "mlp.experts.mlp.w1": [384, 64], "mlp.experts.mlp.w2": [384, 64], "mlp.experts.bias": [64],
                            **NOMIC_NORMS}}),
    "jina-bert-v2": ({"architectures": ["JinaBertModel"], "model_type": "bert", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "vocab_size": 288, "max_position_embeddings": 256, "layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_act": "gelu",
                      "position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean", "pad_token_id": 0},
                     {"embeddings.word_embeddings.weight": [288, 64], "embeddings.token_type_embeddings.weight": [2, 64],
                      **of_bert({"embeddings.LayerNorm": [64], "pooler.dense": [64, 64]})}, "encoder.layer",
                     {**of_bert({"attention.self.query": [64, 64], "attention.self.key": [64, 64], "attention.self.value": [64, 64], "attention.output.dense": [64, 64],
                                 "attention.output.LayerNorm": [64], "mlp.wo": [64, 96], "mlp.layernorm": [64]}), "mlp.gated_layers.weight": [192, 64]}, {}),
    "kimi-linear": ({**MIXED, **MLA, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "intermediate_size": 96, "head_dim": 16, "q_lora_rank": None,
                     "model_max_length": 256, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32,
                     "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "moe_renormalize": True, "moe_layer_freq": 1,
                     "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None,
                     "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}},
                    EMBEDDINGS, "model.layers", NORMS,
                    {0: {**{f"self_attn.{x}_{part}.weight": shape for x in "qkv" for part, shape in [("proj", [64, 64]), ("conv1d", [64, 1, 4])]},
                         "self_attn.A_log": [1, 1, 4, 1], "self_attn.dt_bias": [64], "self_attn.b_proj.weight": [4, 64], "self_attn.f_a_proj.weight": [16, 64],
                         "self_attn.f_b_proj.weight": [64, 16], "self_attn.g_a_proj.weight": [16, 64], "self_attn.g_b_proj.weight": [64, 16],
                         "self_attn.o_norm.weight": [16], "self_attn.o_proj.weight": [64, 64], **MLP},
                     1: {"self_attn.q_proj.weight": [96, 64], "self_attn.kv_a_proj_with_mqa.weight": [40, 64], "self_attn.kv_a_layernorm.weight": [32],
                         "self_attn.kv_b_proj.weight": [160, 32], "self_attn.o_proj.weight": [64, 96], "block_sparse_moe.gate.weight": [4, 64],
                         "block_sparse_moe.gate.e_score_correction_bias": [4], **experts("block_sparse_moe.experts", "w1", "w3", "w2"),
                         **{f"block_sparse_moe.shared_experts.{x}_proj.weight": shape for x, shape in [("gate", [32, 64]), ("up", [32, 64]), ("down", [64, 32])]}}}),
    "bailingmoe2": ({**MIXED, "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "intermediate_size": 96, "head_dim": 16, "num_experts": 4,
                     "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
                     "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "score_function": "sigmoid", "num_nextn_predict_layers": 0, "rope_theta": 600000.0,
                     "partial_rotary_factor": 0.5, "use_qk_norm": True},
                    {"model.word_embeddings.weight": [288, 64], "model.norm.weight": [64], "lm_head.weight": [288, 64]}, "model.layers",
                    {"attention.query_key_value.weight": [128, 64], "attention.dense.weight": [64, 64], "attention.query_layernorm.weight": [16],
                     "attention.key_layernorm.weight": [16], **NORMS},
                    {0: MLP, 1: {"mlp.gate.weight": [4, 64], "mlp.gate.expert_bias": [4], **experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
                                 **{f"mlp.shared_experts.{x}_proj.weight": shape for x, shape in [("gate", [32, 64]), ("up", [32, 64]), ("down", [64, 32])]}}}),
    "smallthinker": ({**MIXED, "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker", "head_dim": 16, "rope_theta": 1500000.0,
                      "moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2, "moe_ffn_hidden_size": 32, "moe_primary_router_apply_softmax": False,
                      "sliding_window_layout": [0, 1], "rope_layout": [0, 1], "sliding_window_size": 16},
                     EMBEDDINGS, "model.layers",
                     {**NORMS, **ATTENTION, "block_sparse_moe.primary_router.weight": [4, 64], **experts("block_sparse_moe.experts", "gate", "up", "down")}, {}),
    "minicpm": ({**MIXED, "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "intermediate_size": 96, "scale_emb": 12, "scale_depth": 1.4,
                 "dim_model_base": 32},
                EMBEDDINGS, "model.layers", {**NORMS, **ATTENTION, **MLP}, {}),
    "internlm2": ({**MIXED, "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "intermediate_size": 96, "vocab_size": 270, "bias": False,
                   "rope_theta": 1000000.0},
                  {"model.tok_embeddings.weight": [270, 64], "model.norm.weight": [64], "output.weight": [270, 64]}, "model.layers",
                  {"attention.wqkv.weight": [128, 64], "attention.wo.weight": [64, 64], "attention_norm.weight": [64], "ffn_norm.weight": [64],
                   "feed_forward.w1.weight": [96, 64], "feed_forward.w2.weight": [64, 96], "feed_forward.w3.weight": [96, 64]}, {}),
    "baichuan": ({**MIXED, "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "intermediate_size": 96, "num_hidden_layers": 32,
                  "num_key_value_heads": 4},
                 EMBEDDINGS, "model.layers", {**NORMS, "self_attn.W_pack.weight": [192, 64], "self_attn.o_proj.weight": [64, 64], **MLP}, {}),
    "rwkv6": ({"architectures": ["Rwkv6ForCausalLM"], "model_type": "rwkv6", "hidden_size": 64, "attention_hidden_size": 64, "head_size": 16, "head_size_divisor": 8,
               "intermediate_size": None, "layer_norm_epsilon": 1e-5, "num_attention_heads": 64, "num_hidden_layers": 2, "rescale_every": 1, "vocab_size": 288,
               "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False},
              {"rwkv.embeddings.weight": [288, 64], "rwkv.ln_out.weight": [64], "rwkv.ln_out.bias": [64], "head.weight": [288, 64]}, "rwkv.blocks",
              {**{f"{part}.{end}": [64] for part in ("ln1", "ln2", "attention.ln_x") for end in ("weight", "bias")},
               **{f"attention.time_maa_{x}": [1, 1, 64] for x in "xwkvrg"}, "attention.time_maa_w1": [64, 160], "attention.time_maa_w2": [5, 32, 64],
               "attention.time_decay": [1, 1, 64], "attention.time_decay_w1": [64, 64], "attention.time_decay_w2": [64, 64], "attention.time_faaaa": [4, 16],
               **{f"attention.{part}.weight": [64, 64] for part in ("receptance", "key", "value", "gate", "output")},
               "feed_forward.time_maa_k": [1, 1, 64], "feed_forward.time_maa_r": [1, 1, 64], "feed_forward.key.weight": [224, 64],
               "feed_forward.receptance.weight": [64, 64], "feed_forward.value.weight": [64, 224]},
              {0: {"pre_ln.weight": [64], "pre_ln.bias": [64]}}),
    "rwkv7": ({"architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "hidden_size": 64, "head_dim": 16, "hidden_act": "sqrelu", "hidden_ratio": 4.0,
               "intermediate_size": 256, "norm_bias": True, "norm_eps": 1e-5, "norm_first": True, "num_heads": 4, "num_hidden_layers": 2, "vocab_size": 288,
               "a_low_rank_dim": 32, "decay_low_rank_dim": 32, "gate_low_rank_dim": None, "v_low_rank_dim": None, "max_position_embeddings": 2048,
               "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "attn": None},
              {"model.embeddings.weight": [288, 64], "model.norm.weight": [64], "model.norm.bias": [64], "lm_head.weight": [288, 64]}, "model.layers",
              {**{f"{part}.{end}": [64] for part in ("attn_norm", "ffn_norm", "attn.g_norm") for end in ("weight", "bias")},
               **{f"attn.x_{x}": [1, 1, 64] for x in "rwkvag"}, "attn.k_k": [64], "attn.k_a": [64], "attn.r_k": [4, 16],
               **{f"attn.{x}_proj.weight": [64, 64] for x in "rkvo"},
               **{f"attn.{x}_lora.lora.{i}.weight": shape for x in "wag" for i, shape in [(0, [32, 64]), (2, [64, 32])]},
               "attn.w_lora.lora.2.bias": [64], "attn.a_lora.lora.2.bias": [64],
               "ffn.x_k": [64], "ffn.key.weight": [256, 64], "ffn.value.weight": [64, 256]},
              {0: {"pre_norm.weight": [64], "pre_norm.bias": [64]},
               1: {"attn.v_lora.lora.0.weight": [32, 64], "attn.v_lora.lora.2.weight": [64, 32], "attn.v_lora.lora.2.bias": [64]}}),
}
# Files of sentence-transformers.
FILES = {
    "qwen3-embedding": {
        "modules.json": [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
                         {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}],
        "1_Pooling/config.json": {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True},
    },
    "bert": {
        "modules.json": [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}],
        "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    },
    "embeddinggemma": {
        "modules.json": [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
                         {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
                         {"idx": 3, "path": "3_Dense", "type": "sentence_transformers.models.Dense"}],
        "2_Dense/config.json": {"in_features": 64, "out_features": 96, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"},
        "2_Dense/model.safetensors": [["linear.weight", [96, 64]]],
        "3_Dense/config.json": {"in_features": 96, "out_features": 64, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"},
        "3_Dense/model.safetensors": [["linear.weight", [64, 96]]],
        "1_Pooling/config.json": {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False},
    },
}


def packed(tensors):
    """Experts in MXFP4, as gpt-oss has them: 32 values are 16 bytes and the exponent of a scale."""
    for name in [name for name in tensors if "mlp.experts" in name and not name.endswith("_bias")]:
        n_expert, n_in, n_out = tensors.pop(name).shape
        shape = [n_expert, n_out, n_in // 32]
        tensors[f"{name}_blocks"] = ((values(f"{name}_blocks", [*shape, 16]) + 1) * 64 * 37 % 256).to(torch.uint8)
        # Between 2^-9 and 2^-2.
        tensors[f"{name}_scales"] = (118 + (values(f"{name}_scales", shape) + 1) * 64 % 8).to(torch.uint8)


def write_published(folder, name, dtype):
    """As `write_folder`, of a model of `PUBLISHED`."""
    config, around, layers, all_layers, of_layer = PUBLISHED[name]
    (folder / "config.json").write_text(json.dumps(config))
    shapes = dict(around)
    for i in range(config.get("num_hidden_layers") or config["n_layer"]):
        shapes |= {f"{layers}.{i}.{part}": shape for part, shape in {**all_layers, **of_layer.get(i, {})}.items()}
    return {key: values(key, shape).to(getattr(torch, dtype)) for key, shape in shapes.items()}


def write_folder(folder, name, cls, options, kind, dtype):
    """The files of a model; the names, shapes and types of its tensors."""
    tensors = write_published(folder, name, dtype) if name in PUBLISHED else write_random(folder, name, cls, options, dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file, content in TOKENIZERS[kind].items():
        if file != "pre":
            (folder / file).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 20, "top_p": 0.8, "do_sample": True}))
    return [[key, list(tensor.shape)] for key, tensor in tensors.items()]


def write_random(folder, name, cls, options, dtype):
    """config.json of a model of transformers; its tensors."""
    config_class, model_class = CLASSES.get(cls, (cls, cls + "ForCausalLM"))
    options = {**BASE, **options}
    if "VL" in cls:
        options = {"text_config": options, "vision_config": VISION, "tie_word_embeddings": False}
    config = getattr(transformers, config_class + "Config")(**options)
    model_class = getattr(transformers, model_class)
    config.architectures = [model_class.__name__]
    torch.manual_seed(0)
    model = model_class(config).to(getattr(torch, dtype))
    # transformers' own writer undoes what it fuses or renames while loading.
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    from safetensors import safe_open

    tensors = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for key in file.keys():
            shape = file.get_slice(key).get_shape()
            if name == "qwen3vlmoe" and "mlp.experts" in key:
                # Published checkpoints have them input by output.
                shape = [shape[0], shape[2], shape[1]]
            tensors[key] = values(key, shape).to(getattr(torch, dtype))
    if options.get("num_nextn_predict_layers"):
        # A head for one more token, which is left out.
        for part, shape in [("eh_proj", [64, 128]), ("enorm", [64])]:
            key = f"model.layers.{config.num_hidden_layers}.{part}.weight"
            tensors[key] = values(key, shape).to(getattr(torch, dtype))
    if name.endswith("mxfp4"):
        packed(tensors)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4"}
        (folder / "config.json").write_text(json.dumps(config))
    if name in EDITS:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **EDITS[name]}))
    return tensors


def convert(folder, name, kind, outtype, dense):
    load_hparams = ModelBase.load_hparams
    types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "auto": "GUESSED"}
    if name in PUBLISHED or name in ("mimo2", "gptneox", "gpt2"):
        # transformers would read such a configuration by names of its own.
        ModelBase.load_hparams = staticmethod(lambda folder, is_mistral_format: json.loads((folder / "config.json").read_text()))
    hparams = ModelBase.load_hparams(folder, False)
    cls = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    TextModel.get_vocab_base_pre = lambda self, tokenizer: TOKENIZERS[kind]["pre"]
    if name == "hunyuan-moe":
        # Published checkpoints have a vocabulary of tiktoken.
        cls.set_vocab = TextModel.set_vocab
    if name == "baichuan":
        # The converter calls itself without end.
        own = cls.modify_tensors
        cls.modify_tensors = lambda self, data, name, bid: (own if "W_pack" in name else TextModel.modify_tensors)(self, data, name, bid)
    cls.no_mtp = True
    out = folder / "out.gguf"
    with torch.inference_mode():
        cls(folder, gguf.LlamaFileType[types[outtype]], out, sentence_transformers_dense_modules=dense).write()
    ModelBase.load_hparams = load_hparams
    return out


def describe(path):
    reader = gguf.GGUFReader(path)
    metadata = {}
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        value = field.contents()
        types = [t.name for t in field.types]
        if isinstance(value, list) and len(value) > 16:
            text = "\n".join(v if isinstance(v, str) else repr(float(v)) if "FLOAT" in types[1] else str(v) for v in value)
            value = {"len": len(value), "hash": fnv(text.encode())}
        elif isinstance(value, list) and "FLOAT" in types[-1]:
            # JSON has no infinities.
            value = [x if np.isfinite(x) else None for x in value]
        metadata[key] = [types[-1] if len(types) == 1 else "ARRAY " + types[-1], value]
    tensors = {}
    for t in reader.tensors:
        data = t.data.tobytes()
        # Factors of ropes and decays come from functions that may differ in the last bit.
        entry = [[int(n) for n in t.shape], t.tensor_type.name, fnv(data)]
        if entry[1] == "Q8_0":
            # Of the blocks the scales: ruvllm rounds with the scale as it is stored, llama.cpp with the one before.
            entry[2] = fnv(np.frombuffer(data, np.uint8).reshape(-1, 34)[:, :2].tobytes())
        if t.name.startswith("rope_") or t.name.endswith("ssm_a"):
            entry[2] = [float(x) for x in t.data.flatten()[:16]]
        tensors[t.name] = entry
    return metadata, tensors


def main():
    models = []
    only = sys.argv[2:]
    before = {model["name"]: model for model in map(json.loads, OUT.read_text().splitlines()[1:])} if only else {}
    for name, cls, options, kind, dtype, outtype in MODELS:
        if only and name not in only:
            models.append(before[name])
            continue
        with tempfile.TemporaryDirectory() as parent:
            folder = pathlib.Path(parent) / "tiny-model"
            folder.mkdir()
            tensors = write_folder(folder, name, cls, options, kind, dtype)
            for file, content in FILES.get(name, {}).items():
                (folder / file).parent.mkdir(exist_ok=True)
                if file.endswith(".safetensors"):
                    save_file({key: values(key, shape) for key, shape in content}, folder / file, metadata={"format": "pt"})
                else:
                    (folder / file).write_text(json.dumps(content))
            metadata, converted = describe(convert(folder, name, kind, outtype, name == "embeddinggemma"))
            config = json.loads((folder / "config.json").read_text())
            models.append({"name": name, "files": FILES.get(name, {}), "tokenizer": kind, "dtype": dtype, "outtype": outtype, "config": config, "checkpoint": tensors,
                           "metadata": metadata, "tensors": converted})
            print(name, len(tensors), "->", len(converted), file=sys.stderr)
    tokenizers = {}
    for kind, files in TOKENIZERS.items():
        tokenizers[kind] = {name: content.hex() if isinstance(content, bytes) else content for name, content in files.items() if name != "pre"}
    lines = [json.dumps(line, separators=(",", ":")) for line in [{"tokenizers": tokenizers}, *models]]
    OUT.write_text("\n".join(lines) + "\n")


main()
