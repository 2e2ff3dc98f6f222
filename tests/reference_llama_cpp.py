#!/usr/bin/env python3
"""Makes tests/data/families.json: metadata and tensors of tiny random models as llama.cpp's converter names them, and the
logits, vectors or scores that llama.cpp computes. Encoders whose GELU is that of the error function in Hugging Face, and the
tanh formula in llama.cpp, are computed here, in 64 bits (`encode`).

    pip install llama-cpp-python gguf numpy
    python tests/reference_llama_cpp.py

Weights are a hash of the tensor's name and the index, as in tests/it/tiny, so that no file has to hold them. Everything is
F32, keys and values too. GELU must be exact: build llama.cpp with `#define GGML_GELU_FP16` removed from ggml-cpu/vec.h;
LLAMA_CPP_LIB_PATH names the folder of such a build.
"""

import ctypes
import json
import math
import os
import pathlib
import tempfile

import gguf
import llama_cpp
import numpy as np

from reference_values import values

OUT = pathlib.Path(__file__).parent / "data" / "families.json"
N_EMBD, N_HEAD, N_KV, HEAD, N_FF, N_VOCAB, N_LAYER = 64, 4, 2, 16, 96, 32, 3
TOKENS = [(i * i * 7 + i * 3 + 1) % N_VOCAB for i in range(24)]
POSITIONS = [0, 2, 6, 10, 14, 18, 21, 23]


class Family:
    """A llama whose parts are then changed."""

    def __init__(self, arch, n_layer=N_LAYER, n_head=N_HEAD, n_kv=N_KV, rms=True, own_head=True):
        self.arch, self.n_layer, self.n_head, self.n_kv = arch, n_layer, n_head, n_kv
        self.meta, self.tensors = {}, {}
        self.keys({"block_count": n_layer, "context_length": 128, "embedding_length": N_EMBD, "feed_forward_length": N_FF})
        self.keys({"attention.head_count": n_head, "attention.head_count_kv": n_kv})
        self.keys({f"attention.layer_norm{'_rms' if rms else ''}_epsilon": 1e-5, "vocab_size": N_VOCAB})
        self.rms = rms
        self.add("token_embd.weight", N_EMBD, N_VOCAB)
        if own_head:
            self.add("output.weight", N_EMBD, N_VOCAB)
        self.norm("output_norm")

    def keys(self, keys):
        self.meta.update({f"{self.arch}.{key}": value for key, value in keys.items()})
        return self

    def add(self, name, *dims):
        self.tensors[name] = list(dims)
        return self

    def norm(self, name, n=N_EMBD):
        self.add(f"{name}.weight", n)
        return self if self.rms else self.add(f"{name}.bias", n)

    def linear(self, name, n_in, n_out, bias=False):
        self.add(f"{name}.weight", n_in, n_out)
        return self.add(f"{name}.bias", n_out) if bias else self

    def layers(self, *parts):
        for i in range(self.n_layer):
            for part in parts:
                part(self, f"blk.{i}.", i)
        return self


def norms(*names):
    return lambda f, blk, _: [f.norm(blk + name) for name in names]


def attention(bias="", qk_norm=None, fused=False):
    """`bias`: the letters of the matrices that have one."""

    def add(f, blk, _):
        n_q, n_kv = f.n_head * HEAD, f.n_kv * HEAD
        if fused:
            f.linear(blk + "attn_qkv", N_EMBD, n_q + 2 * n_kv, "q" in bias)
        else:
            for name, n in [("q", n_q), ("k", n_kv), ("v", n_kv)]:
                f.linear(f"{blk}attn_{name}", N_EMBD, n, name in bias)
        f.linear(blk + "attn_output", n_q, N_EMBD, "o" in bias)
        for name in ["q", "k"] if qk_norm else []:
            f.add(f"{blk}attn_{name}_norm.weight", qk_norm)

    return add


def dense(bias=False, gate=True, n_ff=N_FF, layers=None):
    def add(f, blk, i):
        if layers is None or i in layers:
            for name in ["gate", "up"] if gate else ["up"]:
                f.linear(f"{blk}ffn_{name}", N_EMBD, n_ff, bias)
            f.linear(blk + "ffn_down", n_ff, N_EMBD, bias)

    return add


def mixture(n_expert, n_ff, n_shared=0, first=0):
    def add(f, blk, i):
        if i >= first:
            f.add(blk + "ffn_gate_inp.weight", N_EMBD, n_expert)
            f.add(blk + "ffn_gate_exps.weight", N_EMBD, n_ff, n_expert)
            f.add(blk + "ffn_up_exps.weight", N_EMBD, n_ff, n_expert)
            f.add(blk + "ffn_down_exps.weight", n_ff, N_EMBD, n_expert)
            if n_shared:
                f.linear(blk + "ffn_gate_shexp", N_EMBD, n_ff * n_shared)
                f.linear(blk + "ffn_up_shexp", N_EMBD, n_ff * n_shared)
                f.linear(blk + "ffn_down_shexp", n_ff * n_shared, N_EMBD)

    return add


BOTH = norms("attn_norm", "ffn_norm")
ROPE = {"rope.dimension_count": HEAD, "rope.freq_base": 10000.0}
EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}


def openelm():
    """Layers differ in heads and widths."""
    heads, kv, widths = [2, 4, 6], [1, 1, 2], [48, 96, 64]
    f = Family("openelm", n_head=heads, n_kv=kv, own_head=False)
    f.keys({"feed_forward_length": widths, "attention.key_length": HEAD, "attention.value_length": HEAD, **ROPE})

    def layer(f, blk, i):
        f.linear(blk + "attn_qkv", N_EMBD, (heads[i] + 2 * kv[i]) * HEAD)
        f.linear(blk + "attn_output", heads[i] * HEAD, N_EMBD)
        f.add(blk + "attn_q_norm.weight", HEAD).add(blk + "attn_k_norm.weight", HEAD)
        dense(n_ff=widths[i])(f, blk, i)

    return f.layers(BOTH, layer)


def plamo3(f, blk, _):
    """Gate and up in one, and norms without an end."""
    f.linear(blk + "ffn_up", N_EMBD, 2 * N_FF).linear(blk + "ffn_down", N_FF, N_EMBD)
    f.add(blk + "post_attention_norm", N_EMBD).add(blk + "post_ffw_norm", N_EMBD)


def deci():
    """Layers without attention, and without a feed-forward layer either. (Where that alone is missing, llama.cpp drops attention.)"""
    heads, kv, widths = [4, 0, 4, 0, 2], [2, 0, 4, 0, 1], [96, 64, 48, 0, 32]
    f = Family("deci", n_layer=5, n_head=heads, n_kv=kv)
    f.keys({"feed_forward_length": widths, "attention.key_length": HEAD, "attention.value_length": HEAD, **ROPE})

    def layer(f, blk, i):
        if heads[i]:
            f.norm(blk + "attn_norm")
            for name, n in [("q", heads[i]), ("k", kv[i]), ("v", kv[i])]:
                f.linear(f"{blk}attn_{name}", N_EMBD, n * HEAD)
            f.linear(blk + "attn_output", heads[i] * HEAD, N_EMBD)
        if widths[i]:
            f.norm(blk + "ffn_norm")
            dense(n_ff=widths[i])(f, blk, i)

    return f.layers(layer)


def nemotron_latent():
    """Nemotron 3 Super's mixtures, whose experts read and write shorter vectors, behind Mamba 2 and attention."""
    latent, kv = 32, [0, 0, 2, 0]
    f = Family("nemotron_h_moe", n_layer=4, n_kv=kv)
    f.keys({"feed_forward_length": [0, 32, 0, 32], "rope.dimension_count": HEAD, "attention.key_length": HEAD, "attention.value_length": HEAD})
    f.keys({"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.inner_size": 128, "ssm.time_step_rank": 8})
    f.keys({**EXPERTS, "expert_shared_feed_forward_length": 48, "expert_weights_norm": True, "expert_weights_scale": 2.0, "moe_latent_size": latent})
    f.keys({"attention.layer_norm_epsilon": 1e-5})

    def layer(f, blk, i):
        f.norm(blk + "attn_norm")
        if kv[i]:
            return attention()(f, blk, i)
        if i == 0:
            f.linear(blk + "ssm_in", N_EMBD, 296).linear(blk + "ssm_conv1d", 4, 160, bias=True).add(blk + "ssm_dt.bias", 8)
            f.add(blk + "ssm_a", 1, 8).add(blk + "ssm_d", 1, 8).add(blk + "ssm_norm.weight", 128, 1)
            return f.linear(blk + "ssm_out", 128, N_EMBD)
        f.add(blk + "ffn_gate_inp.weight", N_EMBD, 6).add(blk + "exp_probs_b.bias", 6)
        f.linear(blk + "ffn_latent_down", N_EMBD, latent).linear(blk + "ffn_latent_up", latent, N_EMBD)
        f.add(blk + "ffn_up_exps.weight", latent, 32, 6).add(blk + "ffn_down_exps.weight", 32, latent, 6)
        f.linear(blk + "ffn_up_shexp", N_EMBD, 48).linear(blk + "ffn_down_shexp", 48, N_EMBD)

    f.n_kv = 2
    return f.layers(layer)


def plm():
    """Latent attention with its matrices whole."""
    rank, plain, rot, v = 32, 16, 8, 24
    f = Family("plm", n_kv=N_HEAD, own_head=False)
    f.keys({"attention.kv_lora_rank": rank, "attention.key_length": plain + rot, "attention.value_length": v})
    f.keys({"rope.dimension_count": rot, "rope.freq_base": 10000.0})

    def layer(f, blk, _):
        f.linear(blk + "attn_q", N_EMBD, N_HEAD * (plain + rot))
        f.linear(blk + "attn_kv_a_mqa", N_EMBD, rank + rot).add(blk + "attn_kv_a_norm.weight", rank)
        f.linear(blk + "attn_kv_b", rank, N_HEAD * (plain + v))
        f.linear(blk + "attn_output", N_HEAD * v, N_EMBD)

    return f.layers(BOTH, layer, dense(gate=False))


def falcon_mamba():
    n_inner, n_state, rank, n_tap = 2 * N_EMBD, 16, 4, 4
    f = Family("mamba", n_head=0, n_kv=0, own_head=False)
    f.keys({"feed_forward_length": 0, "ssm.conv_kernel": n_tap, "ssm.inner_size": n_inner, "ssm.state_size": n_state})
    # Files lack Falcon Mamba's second epsilon, which is 1e-6; so the first is the same here.
    f.keys({"ssm.time_step_rank": rank, "ssm.dt_b_c_rms": True, "attention.layer_norm_rms_epsilon": 1e-6})

    def layer(f, blk, _):
        f.linear(blk + "ssm_in", N_EMBD, 2 * n_inner).linear(blk + "ssm_conv1d", n_tap, n_inner, True)
        f.linear(blk + "ssm_x", n_inner, rank + 2 * n_state).linear(blk + "ssm_dt", rank, n_inner, True)
        f.add(blk + "ssm_a", n_state, n_inner).add(blk + "ssm_d", n_inner).linear(blk + "ssm_out", n_inner, N_EMBD)

    return f.layers(norms("attn_norm"), layer)


def encoder(arch):
    """Tokens see the whole text; the output is a vector."""
    return Family(arch, own_head=False).keys({**ROPE, "attention.causal": False})


def bert(arch, position=False, bias=True, types=1, mixture_every=0):
    """BERT's kind: norms on the residual stream, GELU by the error function."""
    f = Family(arch, own_head=False, rms=False, n_kv=N_HEAD).keys({"attention.causal": False})
    for part in ["weight", "bias"]:
        del f.tensors[f"output_norm.{part}"]
    f.norm("token_embd_norm").add("token_types.weight", N_EMBD, types)
    if position:
        f.add("position_embd.weight", N_EMBD, 128)
    else:
        f.keys(ROPE)
    if mixture_every:
        f.keys({"moe_every_n_layers": mixture_every, "expert_count": 6, "expert_used_count": 2})

    def layer(f, blk, i):
        f.norm(blk + "attn_output_norm").norm(blk + "layer_output_norm")
        if mixture_every and i % mixture_every == 1:
            f.add(blk + "ffn_gate_inp.weight", N_EMBD, 6)
            f.add(blk + "ffn_up_exps.weight", N_EMBD, N_FF, 6).add(blk + "ffn_down_exps.weight", N_FF, N_EMBD, 6)
        else:
            f.linear(blk + "ffn_up", N_EMBD, N_FF, bias).linear(blk + "ffn_down", N_FF, N_EMBD, bias)

    return f.layers(attention("qkvo" if bias else "", fused=not position), layer)


def encode(f):
    """The pooled vector or score of such a model (Hugging Face's BertModel, NomicBertModel, XLMRobertaModel)."""
    tensor = {name: values(name, dims).astype(np.float64) for name, dims in f.tensors.items()}
    erf = np.vectorize(math.erf)
    gelu = lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2)))

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + f.meta[f"{f.arch}.attention.layer_norm_epsilon"])
        return x * tensor[f"{name}.weight"] + tensor[f"{name}.bias"]

    def linear(name, x):
        return x @ tensor[f"{name}.weight"].T + tensor.get(f"{name}.bias", 0.0)

    def rotated(x):
        if "position_embd.weight" in tensor:
            return x
        half = HEAD // 2
        angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = tensor["token_embd.weight"][TOKENS] + tensor["token_types.weight"].reshape(-1, N_EMBD)[0]
    if "position_embd.weight" in tensor:
        x = x + tensor["position_embd.weight"][: len(TOKENS)]
    x = norm("token_embd_norm", x)
    for blk in (f"blk.{i}." for i in range(f.n_layer)):
        if blk + "attn_qkv.weight" in tensor:
            qkv = np.split(linear(blk + "attn_qkv", x), 3, -1)
        else:
            qkv = [linear(f"{blk}attn_{part}", x) for part in "qkv"]
        q, k, v = (part.reshape(len(x), N_HEAD, HEAD) for part in qkv)
        scores = np.einsum("ihd,jhd->hij", rotated(q), rotated(k)) / np.sqrt(HEAD)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
        x = norm(blk + "attn_output_norm", x + linear(blk + "attn_output", mixed))
        if blk + "ffn_up_exps.weight" in tensor:
            router = linear(blk + "ffn_gate_inp", x)
            router = np.exp(router - router.max(-1, keepdims=True))
            router /= router.sum(-1, keepdims=True)
            y = np.zeros_like(x)
            for i, row in enumerate(router):
                for e in np.argsort(-row)[:2]:
                    up, down = (tensor[f"{blk}ffn_{part}_exps.weight"][e] for part in ["up", "down"])
                    y[i] += row[e] * (down @ gelu(up @ x[i]))
        else:
            y = linear(blk + "ffn_down", gelu(linear(blk + "ffn_up", x)))
        x = norm(blk + "layer_output_norm", x + y)
    pooling = f.meta[f"{f.arch}.pooling_type"]
    pooled = x.mean(0) if pooling == 1 else x[0]
    is_reranker = "cls.output.weight" in tensor
    return linear("cls.output", np.tanh(linear("cls", pooled)))[None] if is_reranker else pooled[None]


def neo_bert():
    f = encoder("neo-bert")
    del f.tensors["output_norm.weight"]
    f.add("enc.output_norm.weight", N_EMBD)

    def fused(f, blk, _):
        f.linear(blk + "ffn_up", N_EMBD, 2 * N_FF).linear(blk + "ffn_down", N_FF, N_EMBD)

    return f.layers(BOTH, attention(fused=True), fused)


FAMILIES = {
    "xverse": Family("xverse").keys(ROPE).layers(BOTH, attention(), dense()),
    "orion": Family("orion", rms=False).layers(BOTH, attention(), dense()),
    "codeshell": Family("codeshell", rms=False)
    .keys({"rope.freq_base": 10000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0})
    .layers(BOTH, attention("qkvo"), dense(bias=True, gate=False)),
    "plamo": Family("plamo").layers(norms("attn_norm"), attention(), dense()),
    "qwen": Family("qwen", n_kv=N_HEAD)
    .keys({"feed_forward_length": 2 * N_FF, **ROPE})
    .layers(BOTH, attention("q", fused=True), dense()),
    "exaone": Family("exaone", own_head=False).keys(ROPE).add("rope_freqs.weight", HEAD // 2).layers(BOTH, attention(), dense()),
    "pangu-embedded": Family("pangu-embedded").keys(ROPE).layers(BOTH, attention("qkvo"), dense()),
    "paddleocr": Family("paddleocr").keys(ROPE).keys({"rope.dimension_sections": [4, 2, 2, 0]}).layers(BOTH, attention(), dense()),
    "openelm": openelm(),
    "maincoder": Family("maincoder").keys(ROPE).layers(BOTH, attention(qk_norm=HEAD), dense()),
    "plamo3": Family("plamo3", n_layer=9, own_head=False)
    .keys({**ROPE, "attention.key_length": HEAD, "attention.value_length": HEAD, "attention.sliding_window": 8, "attention.sliding_window_pattern": 8})
    .keys({"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4})
    .layers(BOTH, attention(qk_norm=HEAD, fused=True), plamo3),
    "deci": deci(),
    "jais": Family("jais", n_kv=N_HEAD, rms=False)
    .keys({"attention.max_alibi_bias": 8.0})
    .layers(BOTH, attention("qo", fused=True), dense(bias=True)),
    "hunyuan_vl": Family("hunyuan_vl", own_head=False)
    .keys({**ROPE, "rope.scaling.alpha": 4.0, "rope.scaling.type": "none", "rope.dimension_sections": [4, 2, 2, 0]})
    .layers(BOTH, attention(qk_norm=HEAD), dense()),
    "deepseek": Family("deepseek")
    .keys({**ROPE, **EXPERTS, "expert_shared_count": 2, "leading_dense_block_count": 1, "expert_weights_scale": 1.0})
    .layers(BOTH, attention(), dense(layers=[0]), mixture(6, 32, n_shared=2, first=1)),
    "bailingmoe": Family("bailingmoe")
    .keys({**ROPE, **EXPERTS, "expert_shared_count": 2, "leading_dense_block_count": 0})
    .keys({"expert_weights_scale": 1.0, "expert_weights_norm": True})
    .layers(BOTH, attention(), mixture(6, 32, n_shared=2)),
    "mellum": Family("mellum", n_layer=4)
    .keys({**ROPE, **EXPERTS, "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, True, False]})
    .keys({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64})
    .layers(BOTH, attention(qk_norm=HEAD), mixture(6, 32)),
    "plm": plm(),
    "nemotron-latent": nemotron_latent(),
    "baichuan-13b": Family("baichuan", n_layer=40, n_kv=N_HEAD).keys(ROPE).layers(BOTH, attention(), dense(n_ff=32)).keys({"feed_forward_length": 32}),
    "falcon-mamba": falcon_mamba(),
    "eurobert": encoder("eurobert").keys({"pooling_type": 1}).layers(BOTH, attention(), dense()),
    "llama-embed": encoder("llama-embed").keys({"pooling_type": 1}).layers(BOTH, attention(), dense()),
    "neo-bert": neo_bert().keys({"pooling_type": 2}),
    "neo-bert-reranker": neo_bert()
    .keys({"pooling_type": 4})
    .linear("cls", N_EMBD, N_EMBD, bias=True)
    .linear("cls.output", N_EMBD, 1, bias=True),
    "bert": bert("bert", position=True, types=2).keys({"pooling_type": 2}),
    # Converters do not write that the pooling is a score.
    "xlm-roberta-reranker": bert("bert", position=True)
    .keys({"pooling_type": 2})
    .linear("cls", N_EMBD, N_EMBD, bias=True)
    .linear("cls.output", N_EMBD, 1, bias=True),
    "nomic-bert-moe": bert("nomic-bert-moe", mixture_every=2).keys({"pooling_type": 1}),
    "jina-bert-v3": bert("jina-bert-v3").keys({"pooling_type": 1}),
    "qwen3-reranker": Family("qwen3", own_head=False)
    .keys({**ROPE, "pooling_type": 4, "classifier.output_labels": ["yes", "no"]})
    .linear("cls.output", N_EMBD, 2)
    .layers(BOTH, attention(qk_norm=HEAD), dense()),
}


def write(family, path):
    w = gguf.GGUFWriter(path, family.arch)
    for key, value in family.meta.items():
        if isinstance(value, bool):
            w.add_bool(key, value)
        elif isinstance(value, int):
            w.add_uint32(key, value)
        elif isinstance(value, float):
            w.add_float32(key, value)
        elif isinstance(value, str):
            w.add_string(key, value)
        else:
            w.add_array(key, value)
    w.add_tokenizer_model("no_vocab")
    for name, dims in family.tensors.items():
        w.add_tensor(name, values(name, dims))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def outputs(path, pooled):
    """Logits of all tokens, or the vector or score that is pooled from them."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    assert model, path
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 64
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.embeddings = pooled
    ctx = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(TOKENS), 0, 1)
    batch.n_tokens = len(TOKENS)
    for i, token in enumerate(TOKENS):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(ctx, batch) == 0
    if pooled:
        is_score = llama_cpp.llama_pooling_type(ctx) == llama_cpp.LLAMA_POOLING_TYPE_RANK
        shape, array = (1, 1 if is_score else N_EMBD), llama_cpp.llama_get_embeddings_seq(ctx, 0)
    else:
        shape, array = (len(TOKENS), N_VOCAB), llama_cpp.llama_get_logits(ctx)
    array = ctypes.cast(array, ctypes.POINTER(ctypes.c_float * (shape[0] * shape[1]))).contents
    rows = np.array(array, np.float32).reshape(shape)
    llama_cpp.llama_free(ctx)
    llama_cpp.llama_model_free(model)
    return rows


def main():
    silent = llama_cpp.llama_log_callback(lambda level, text, data: print(text.decode(), end="") if level == 4 else None)
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    lines = []
    for name, family in FAMILIES.items():
        pooled = f"{family.arch}.pooling_type" in family.meta
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.gguf")
            write(family, path)
            rows = encode(family) if "token_types.weight" in family.tensors else outputs(path, pooled)
        print(f"{name}: standard deviation {rows.std():.2f}")
        all_of_it = {
            "architecture": family.arch,
            "metadata": family.meta,
            "tensors": family.tensors,
            "pooled" if pooled else "logits": [[round(float(x), 5) for x in row] for row in rows[[0] if pooled else POSITIONS]],
        }
        lines.append(f"{json.dumps(name)}: {json.dumps(all_of_it, separators=(',', ':'))}")
    about = {"tokens": TOKENS, "positions": POSITIONS}
    OUT.write_text("{\n" + ",\n".join([f'"about": {json.dumps(about)}', *lines]) + "\n}\n")


if __name__ == "__main__":
    main()
