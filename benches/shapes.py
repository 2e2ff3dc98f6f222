#!/usr/bin/env python3
"""Adds shapes to benches/src/shapes.json: sizes of published models, given to the tensors of a tiny model of the same
architecture.

    pip install gguf
    python benches/shapes.py CONFORMANCE/models3     # folders with model-f16.gguf, named as `of` below

A shape is its tiny model's metadata with the sizes replaced, and its tensors with dimensions computed by the formulas of
`DIMS`, which are checked with the tiny model's own sizes first. Of the large models there are as many layers and experts
as fit into some GB. Shapes of the file that are not named here stay as they are.
"""

import json
import math
import pathlib
import re
import sys

import gguf
import numpy as np

OUT = pathlib.Path(__file__).parent / "src" / "shapes.json"

# Names of sizes, and the keys that hold them.
SIZES = {
    "e": "embedding_length", "f": "feed_forward_length", "h": "attention.head_count", "k": "attention.head_count_kv",
    "d": "attention.key_length", "dv": "attention.value_length", "x": "expert_feed_forward_length", "E": "expert_count",
    "U": "expert_used_count", "s": "expert_shared_feed_forward_length", "ql": "attention.q_lora_rank",
    "kl": "attention.kv_lora_rank", "dm": "attention.key_length_mla", "vm": "attention.value_length_mla",
    "r": "rope.dimension_count", "ih": "attention.indexer.head_count", "id": "attention.indexer.key_length",
    "top": "attention.indexer.top_k", "ib": "attention.indexer.block_size", "w": "attention.sliding_window",
    "og": "attention.output_group_count", "ol": "attention.output_lora_rank", "hc": "hyper_connection.count",
    "hl": "hyper_connection.low_rank", "c": "ssm.conv_kernel", "kd": "kda.head_dim", "l": "expert_latent_length",
    "ss": "ssm.state_size", "sg": "ssm.group_count", "st": "ssm.time_step_rank", "si": "ssm.inner_size",
    "G": "expert_group_count", "GU": "expert_group_used_count", "H": "wkv.head_size", "p": "embedding_length_per_layer_input",
    "ng": "ple.ngram_size", "nh": "ple.heads_per_ngram", "lw": "attention.decay_lora_rank", "la": "attention.iclr_lora_rank",
    "lv": "attention.value_residual_mix_lora_rank", "V": "vocab_size",
}

# Dimensions, row length first. `h`, `k` and `ratio` are the layer's own where they differ between layers.
DIMS = {
    "token_embd.weight": "e V", "output.weight": "e V", "output_norm.weight": "e", "attn_norm.weight": "e", "attn_norm_2.weight": "e",
    "ffn_norm.weight": "e", "post_attention_norm": "e", "post_ffw_norm": "e", "post_attention_norm.weight": "e",
    "post_ffw_norm.weight": "e", "ffn_gate.weight": "e f", "ffn_up.weight": "e f", "ffn_down.weight": "f e",
    "attn_q.weight": "e h*d", "attn_k.weight": "e k*d", "attn_v.weight": "e k*d", "attn_output.weight": "h*d e",
    "attn_q_norm.weight": "d", "attn_k_norm.weight": "d", "attn_gate.weight": "e h", "attn_sinks.weight": "h",
    "ffn_gate_exps.weight": "e x E", "ffn_up_exps.weight": "e x E", "ffn_down_exps.weight": "x e E", "exp_probs_b.bias": "E",
    "ffn_gate_inp.weight": "e E", "ffn_gate_shexp.weight": "e s", "ffn_up_shexp.weight": "e s", "ffn_down_shexp.weight": "s e",
    "ffn_gate_inp_shexp.weight": "e 1",
    # Keys and values of low rank, and an index.
    "attn_q_a.weight": "e ql", "attn_q_a_norm.weight": "ql", "attn_q_b.weight": "ql h*dm", "attn_kv_a_mqa.weight": "e kl+r",
    "attn_kv_a_norm.weight": "kl", "attn_k_b.weight": "dm-r kl h", "attn_v_b.weight": "kl vm h",
    "indexer.k_norm.bias": "id", "indexer.k_norm.weight": "id", "indexer.q_norm.weight": "id", "indexer.proj.weight": "e ih",
    "indexer.attn_k.weight": "e id", "indexer.attn_q_b.weight": "ql ih*id", "indexer.q_proj.weight": "e ih*id", "indexer.k_proj.weight": "e id",
    # DeepSeek V4.
    "attn_kv.weight": "e d", "attn_output_a.weight": "h*d//og og*ol", "attn_output_b.weight": "og*ol e", "ffn_gate_tid2eid.weight": "U V",
    "attn_compressor_ape.weight": "(1+(ratio<9))*d ratio", "attn_compressor_norm.weight": "d", "attn_compressor_gate.weight": "e (1+(ratio<9))*d",
    "attn_compressor_kv.weight": "e (1+(ratio<9))*d", "indexer_compressor_ape.weight": "2*id ratio", "indexer_compressor_norm.weight": "id",
    "indexer_compressor_gate.weight": "e 2*id", "indexer_compressor_kv.weight": "e 2*id",
    "output_hc_base.weight": "hc", "output_hc_fn.weight": "hc*e hc", "output_hc_scale.weight": "1", "hc_attn_base.weight": "mix",
    "hc_attn_fn.weight": "hc*e mix", "hc_attn_scale.weight": "mixes", "hc_ffn_base.weight": "mix", "hc_ffn_fn.weight": "hc*e mix",
    "hc_ffn_scale.weight": "mixes",
    # Kimi K3.
    "output_res_score.weight": "e", "attn_res_score.weight": "e", "ffn_res_score.weight": "e",
    **{f"ssm_conv1d_{part}.weight": "c 1 h*kd 1" for part in "qkv"}, "ssm_f_a.weight": "e kd", "ssm_f_b.weight": "kd h*kd",
    "ssm_beta.weight": "e st", "ssm_a": "st", "ssm_dt.bias": "st", "ssm_g.weight": "e h*kd", "ssm_norm.weight": "kd",
    "ffn_routed_down.weight": "e l", "ffn_routed_up.weight": "l e", "ffn_routed_norm.weight": "l",
    # Qwen 4.
    "output_hc_norm.weight": "hc*e", "output_hc_down.weight": "hc*e hl", "output_hc_up.weight": "hl hc*e",
    **{f"hc_{part}_{what}.weight": dims for part in ("attn", "ffn")
       for what, dims in (("inject", "hc*e hc"), ("norm", "hc*e"), ("down", "hc*e hl"), ("up", "hl hc*e"))},
    "ssm_conv1d.weight": "c si+2*sg*ss", "ssm_alpha.weight": "e st", "attn_qkv.weight": "e si+2*sg*ss", "ssm_out.weight": "si e",
    "ple_conv1d.weight": "c hc*e", "ple_key.weight": "ng_out hc*e", "ple_norm_conv.weight": "hc*e", "ple_norm_key.weight": "hc*e",
    "ple_norm_query.weight": "hc*e", "ple_value.weight": "ng_out e", "per_layer_token_embd.weight": "p rows",
    # Mamba with heads.
    "ssm_in.weight": "e 2*si", "ssm_x.weight": "si dt+2*ss", "ssm_dt.weight": "dt st", "ssm_d": "st", "ssm_dt_norm": "dt", "ssm_b_norm": "ss", "ssm_c_norm": "ss",
    # BitNet.
    "ffn_sub_norm.weight": "f", "attn_sub_norm.weight": "e",
    # RWKV 7.
    **{f"time_mix_{part}.weight": "e e" for part in ("receptance", "key", "value", "output")}, "time_mix_lerp_fused.weight": "e 1 1 5",
    **{f"time_mix_{part}.weight": "e" for part in ("k_k", "k_a", "r_k", "w0", "a0", "v0")},
    **{f"time_mix_{x}1.weight": f"e l{x}" for x in "wav"}, **{f"time_mix_{x}2.weight": f"l{x} e" for x in "wav"},
    # A layer without a layer before it has them of another width.
    "time_mix_v1.weight": "e (lv,la)[first]", "time_mix_v2.weight": "(lv,la)[first] e",
    # Talkie.
    "attn_output.scale": "1", "ffn_down.scale": "1", "layer_output_scale.weight": "1",
}
SHARED = {"ffn_gate_shexp.weight": "e x", "ffn_up_shexp.weight": "e x", "ffn_down_shexp.weight": "x e"}
KDA = {"ssm_beta.weight": "e h", "ssm_a": "h", "ssm_dt.bias": "h*kd", "attn_q.weight": "e h*kd", "attn_k.weight": "e h*kd", "attn_v.weight": "e h*kd"}
LATENT = {"attn_output.weight": "h*vm e", "attn_gate.weight": "e h*vm"}

# Name, the tiny model it is made of, its layers as layers of that one, sizes, other keys, formulas of its own.
SHAPES = [
    ("laguna-xs.2", "laguna", [0, 1, 2, 3, 4], dict(e=2048, f=8192, h=[48, 64, 64, 64, 48], k=8, d=128, dv=128, x=512, E=256, U=8, s=512, r=64, w=512),
     {"rope.dimension_count_swa": 128}, {}),
    ("muse-glimmer-30b", "muse-glimmer", [1, 2, 3, 4], dict(e=6656, f=19968, h=32, k=2, d=128, dv=128, w=2048), {}, {"attn_gate.weight": "e h*d"}),
    ("step-3.5-flash", "step35", [0, 1, 2, 3], dict(e=4096, f=11264, h=[64, 96, 96, 64], k=[8] * 4, d=128, dv=128, x=1280, E=48, U=8, s=1280, w=512), {}, {}),
    ("deepseek-v3.2", "deepseek32", [0, 1], dict(e=7168, f=18432, h=128, k=1, d=576, dv=512, dm=192, vm=128, x=2048, E=32, U=8, G=8, GU=4, ql=1536, kl=512, r=64,
     ih=64, id=128, top=2048), {}, {**LATENT, **SHARED}),
    ("glm-5", "glm-dsa", [0, 1, 2], dict(e=6144, f=12288, h=64, k=1, d=576, dv=512, dm=256, vm=256, x=2048, E=32, U=8, ql=2048, kl=512, r=64, ih=32, id=128, top=2048),
     {}, {**LATENT, **SHARED}),
    ("glm-5.3-flash", "glm5-next", [0, 1, 2, 3], dict(e=4096, f=12288, h=64, k=[0, 1, 0, 1], d=512, dv=512, dm=256, vm=256, x=2048, E=32, U=8, ql=1536, kl=512, r=0, kd=128,
     ih=32, id=128, top=2048, hc=4), {"attention.indexer.kpool": 16, "hyper_connection.sinkhorn_iterations": 20},
     {**KDA, **SHARED, "attn_output.weight": "h*(vm,kd)[k==0] e", "ssm_g_a.weight": "e kd", "ssm_g_b.weight": "kd h*kd", "indexer_compressor_ape.weight": "id pool",
      "indexer_compressor_gate.weight": "e id"}),
    ("ling-3-flash", "bailingmoe3", [0, 1, 2, 3], dict(e=2560, f=6144, h=32, k=[0, 0, 1, 0], d=576, dv=128, dm=192, vm=128, x=768, E=128, U=8, G=8, GU=4, s=768, kl=512, r=64,
     kd=128), {}, {**KDA, "ssm_a": "1 h", "ssm_f_a.weight": "e h*kd", "ssm_g_a.weight": "e h*kd", "attn_q.weight": "e h*(dm,kd)[k==0]", "attn_output.weight": "h*vm e"}),
    ("minimax-m3", "minimax-m3", [0, 1, 2], dict(e=6144, f=12288, h=64, k=4, d=128, dv=128, x=3072, E=16, U=4, r=64, ih=4, id=128, top=16, ib=128), {}, SHARED),
    ("deepseek-v4-flash", "deepseek4", [0, 1, 2, 3], dict(e=4096, h=64, k=1, d=512, dv=512, r=64, ql=1024, w=128, x=2048, E=32, U=6, ih=64, id=128, top=512, og=8,
     ol=1024, hc=4), {"embedding_length_out": 16384, "hyper_connection.sinkhorn_iterations": 20}, {"attn_kv_a_norm.weight": "d", "attn_q_b.weight": "ql h*d", **SHARED}),
    ("hunyuan-4", "hy_v4", [0, 1, 2, 3], dict(e=2816, f=6912, h=32, k=1, d=576, dv=512, dm=256, vm=256, x=768, E=128, U=8, ql=1536, kl=512, r=64, ih=16, id=128,
     top=2048, hc=4), {}, {**LATENT, **SHARED}),
    ("kimi-k3", "kimi-k3", [0, 1, 2, 3], dict(e=7168, f=18432, h=64, k=[0, 0, 1, 0], d=576, dv=512, dm=192, vm=128, x=2048, E=32, U=8, ql=1536, kl=512, r=64, kd=128, l=3584),
     {}, {**KDA, **SHARED, "attn_gate.weight": "e h*vm", "attn_output.weight": "h*vm e", "ffn_gate_exps.weight": "l x E", "ffn_up_exps.weight": "l x E",
          "ffn_down_exps.weight": "x l E"}),
    ("qwen4-a3b", "qwen4exp", [0, 1, 2, 3], dict(e=2048, h=16, k=2, d=256, dv=256, x=512, E=128, U=10, s=512, ss=128, sg=16, st=32, si=4096, r=64, hc=4, hl=320,
     ih=16, id=128, top=2048, p=128, nh=8), {"rope.dimension_sections": [11, 11, 10, 0]}, {"attn_gate.weight": "e si", "ssm_norm.weight": "ss", "attn_q.weight": "e 2*h*d"}),
    ("minimax-01", "minimax-01", [0, 1, 2], dict(e=6144, f=9216, h=64, k=8, d=128, dv=128, E=4, U=2, r=64), {},
     {"ffn_gate_exps.weight": "e f E", "ffn_up_exps.weight": "e f E", "ffn_down_exps.weight": "f e E", "attn_qkv.weight": "e 3*h*d", "attn_gate.weight": "e h*d",
      "attn_norm_2.weight": "h*d"}),
    ("plamo2-2b", "plamo2", [0, 1, 2, 3], dict(e=2048, f=8192, h=32, k=[0, 4, 0, 4], d=128, dv=128, r=128, si=4096, ss=64, st=64), {},
     {"ffn_up.weight": "e 2*f", "attn_qkv.weight": "e (h+2*k)*d", "attn_q_norm.weight": "d h", "attn_k_norm.weight": "d k"}),
    ("bitnet-2b", "bitnet", [0] * 30, dict(e=2560, f=6912, h=20, k=5, V=128256), {}, {"attn_q.weight": "e e", "attn_output.weight": "e e",
     "attn_k.weight": "e e//h*k", "attn_v.weight": "e e//h*k"}),
    ("qrwkv7-7b", "arwkv7", [0] + [1] * 5, dict(e=3584, f=18944, lw=96, la=96, lv=64), {}, {}),
    ("talkie-13b", "talkie", [0] * 6, dict(e=5120, f=13696, h=40, k=40, d=128, dv=128, r=128), {}, {"attn_q_norm.weight": "1 h"}),
    ("maple-20b", "maple", [0, 1, 2], dict(e=2048, f=2048, h=32, k=4, d=128, dv=128, r=64, w=512, x=2048, E=64, U=4), {}, {}),
    # Drafters for `llama-1b` and `gemma4-e4b`: with random weights nothing that they propose comes true.
    ("llama-1b-eagle3", "eagle3", [0], dict(e=2048, f=8192, h=32, k=8, d=64, dv=64, r=64, V=32000), {"target_layers": [1, 8, 14], "target_hidden_size": 2048},
     {**{f"attn_{part}.weight": f"2*e {heads}*d" for part, heads in (("q", "h"), ("k", "k"), ("v", "k"))}, "attn_norm_2.weight": "e", "fc.weight": "3*e e",
      "output.weight": "e D", "d2t": "D"}),
    ("llama-1b-dflash", "dflash", [0, 1, 1], dict(e=2048, f=8192, h=32, k=8, d=64, dv=64, r=64, w=2048, V=32000), {"target_layers": [1, 8, 14], "block_size": 16},
     {"fc.weight": "3*e e", "enc.output_norm.weight": "e"}),
    ("gemma4-e4b-assistant", "gemma4-assistant", [0, 1, 1, 2], dict(e=256, f=2048, h=4, k=[2] * 4, d=512, dv=512, r=512, p=0, w=512, V=262144),
     {"attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count_swa": 256, "embedding_length_out": 2560, "nextn_predict_layers": 4,
      "attention.shared_kv_layers": 4},
     {"rope_freqs.weight": "d//2", "attn_q.weight": "e h*own", "attn_output.weight": "h*own e", "attn_q_norm.weight": "own", "nextn.post_projection.weight": "e out",
      "nextn.pre_projection.weight": "2*out e"}),
    ("nanbeige-3b", "nanbeige", [0] * 12, dict(e=2560, f=10240, h=20, k=4, d=128, dv=128, r=128), {}, {}),
]
N_VOCAB = 65536

# Encoders of images, by the names of tensors: `n` wide, `f` in the feed-forward part, `p` a patch, `o` the text model's width,
# `m` joined patches.
VISION = {
    "v.patch_embd.weight": "p p 3 n", "v.patch_embd.weight.1": "p p 3 n", "v.position_embd.weight": "n tokens", "v.blk.*.attn_qkv.weight": "n 3*n",
    "v.blk.*.attn_qkv.bias": "3*n", "v.blk.*.ffn_up.weight": "n f", "v.blk.*.ffn_up.bias": "f", "v.blk.*.ffn_down.weight": "f n",
    **{f"v.blk.*.attn_{part}.weight": "n n" for part in ("q", "k", "v", "out")},
    **{f"v.blk.*.{part}": "n" for part in ("ffn_down.bias", "ln1.bias", "ln1.weight", "ln2.bias", "ln2.weight", *(f"attn_{x}.bias" for x in ("q", "k", "v", "out")))},
    "v.patch_embd.bias": "n", "v.post_ln.weight": "n", "v.post_ln.bias": "n", "mm.input_projection.weight": "o n", "mm.soft_emb_norm.weight": "n",
    **{f"{at}.weight": "m*n m*n" for at in ("mm.0", "deep.fc1")}, "mm.0.bias": "m*n", "deep.fc1.bias": "m*n", "mm.2.weight": "m*n o", "mm.2.bias": "o",
    "deep.fc2.weight": "m*n o", "deep.fc2.bias": "o", "deep.norm.weight": "m*n", "deep.norm.bias": "m*n",
}
# Name, folder, file, sizes: width, feed-forward part, layers, heads, patch, text model's width, largest image, tokens with a
# position; layers that give embeddings of their own.
PROJECTORS = [
    ("siglip-400m", "gemma3", "mmproj-f16.gguf", dict(n=1152, f=4304, layers=27, heads=16, p=14, o=2560, image=896, tokens=4096), {"clip.vision.projector.scale_factor": 4}, []),
    ("qwen3-vl-vision", "qwen3vl", "mmproj-f32.gguf", dict(n=1024, f=4096, layers=24, heads=16, p=16, o=2560, image=768, tokens=2304), {}, [5, 11, 17]),
]


def plain(value):
    if isinstance(value, list):
        return [plain(x) for x in value]
    return float(str(np.float32(max(value, -1e30)))) if isinstance(value, float) else value


def tiny(path):
    """Keys without the architecture's name, and tensors by name: dimensions, type, layer."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    keys = {k[len(arch) + 1:]: plain(f.contents()) for k, f in reader.fields.items() if k.startswith(arch + ".")}
    tensors = []
    for t in reader.tensors:
        layer = re.fullmatch(r"blk\.(\d+)\.(.*)", t.name)
        tensors.append((layer[2] if layer else t.name, int(layer[1]) if layer else None, [int(n) for n in t.shape], t.tensor_type.name))
    vocabularies = {name: dims[-1] for name, _, dims, _ in tensors if name in ("token_embd.weight", "d2t")}
    keys.setdefault("vocab_size", vocabularies.get("token_embd.weight", 0))
    if "d2t" in vocabularies:
        keys["draft_vocab"] = vocabularies["d2t"]
    return arch, keys, tensors


def dims(formula, keys, layer, extra):
    """The formula's value for a layer."""
    own = {}
    for short, key in SIZES.items():
        if key in keys:
            value = keys[key]
            own[short] = value[layer or 0] if isinstance(value, list) else value
    ratios = keys.get("attention.compress_ratios")
    own["ratio"] = ratios[layer] if ratios and layer is not None else 0
    own["D"] = keys.get("draft_vocab", own.get("V"))
    own["out"] = keys.get("embedding_length_out")
    windowed = keys.get("attention.sliding_window_pattern")
    own["own"] = keys.get("attention.key_length_swa") if windowed and windowed[layer or 0] else own.get("d")
    own["first"], own["pool"] = layer == 0, keys.get("attention.indexer.kpool")
    own["dt"] = max(64, own["e"] // 16)
    own["ng_out"] = own.get("p", 0) * own.get("nh", 0) * (own.get("ng", 1) - 1)
    own["rows"] = -(-sum(keys.get("ple.head_vocab_sizes", [])) // 64) * 64
    if "hc" in own:
        own["mix"], own["mixes"] = extra(own["hc"])
    return [int(eval(part, {}, own)) for part in formula.split()]


def projector(name, path, sizes, other, deep):
    """A shape of an encoder of images."""
    reader = gguf.GGUFReader(path)
    keys = {k: plain(f.contents()) for k, f in reader.fields.items() if not k.startswith(("GGUF.", "general.")) or k in ("general.architecture", "general.type")}
    own = {"n": keys["clip.vision.embedding_length"], "f": keys["clip.vision.feed_forward_length"], "p": keys["clip.vision.patch_size"],
           "o": keys["clip.vision.projection_dim"], "m": keys.get("clip.vision.spatial_merge_size", 1) ** 2}
    own["tokens"] = (keys["clip.vision.image_size"] // own["p"]) ** 2
    made = {}
    for t in reader.tensors:
        known = re.sub(r"^v\.deepstack\.\d+\.", "deep.", re.sub(r"^v\.blk\.\d+\.", "v.blk.*.", t.name))
        of = lambda at: [int(eval(part, {}, at)) for part in VISION[known].split()]
        assert of(own) == [int(n) for n in t.shape], f"{t.name}: {t.shape}"
        layers = range(sizes["layers"]) if known.startswith("v.blk.") else deep if known.startswith("deep.") else [0]
        full = known.replace("deep.", "v.deepstack.*.")
        kind = [t.tensor_type.name] if known.startswith(("v.patch", "v.position")) else []
        made[full] = [full, of({**own, **sizes}), list(layers)] + kind
    keys.update({"clip.vision.embedding_length": sizes["n"], "clip.vision.feed_forward_length": sizes["f"], "clip.vision.patch_size": sizes["p"],
                 "clip.vision.projection_dim": sizes["o"], "clip.vision.image_size": sizes["image"], "clip.vision.block_count": sizes["layers"],
                 "clip.vision.attention.head_count": sizes["heads"], **other})
    if deep:
        keys["clip.vision.is_deepstack_layers"] = [i in deep for i in range(sizes["layers"])]
    return {"name": name, "metadata": keys, "tensors": list(made.values())}


def is_prime(n):
    return all(n % i for i in range(2, math.isqrt(n) + 1))


def main():
    folder = pathlib.Path(sys.argv[1])
    lines = {}
    if OUT.exists():
        lines = {json.loads(line)["name"]: line for line in OUT.read_text().splitlines()}
    for name, of, layers, sizes, other, formulas in SHAPES:
        arch, keys, tensors = tiny(next((folder / of).glob("model-f16.gguf"), folder / of / "draft-f16.gguf"))
        extra = (lambda n: (2 * n, 2)) if of == "hy_v4" else (lambda n: ((2 + n) * n, 3))
        table = {**DIMS, **formulas}
        for tensor, layer, found, _ in tensors:
            try:
                expected = dims(table[tensor], keys, layer, extra)
            except NameError as e:
                raise SystemExit(f"{of} {tensor}: {e}")
            assert expected == found, f"{of} {tensor} of layer {layer}: {found}, by the formula {expected}"
        for key, value in keys.items():
            if isinstance(value, list) and len(value) == keys["block_count"]:
                keys[key] = [value[i] for i in layers]
        keys.update({SIZES[short]: value for short, value in sizes.items()})
        keys.update(other, block_count=len(layers), context_length=163840)
        keys["vocab_size"] = sizes.get("V", N_VOCAB)
        keys.pop("draft_vocab", None)
        if "ple.head_vocab_sizes" in keys:
            n_table = (keys["ple.ngram_size"] - 1) * keys["ple.heads_per_ngram"]
            primes = [n for n in range(40_000, 41_000) if is_prime(n)][:n_table]
            keys["ple.head_vocab_sizes"] = primes
            keys["ple.head_offsets"] = [sum(primes[:i]) for i in range(len(primes))]
            keys["ple.eos_token_id"] = 1
        if isinstance(keys.get("attention.head_count"), list) and len(set(keys["attention.head_count"])) == 1:
            keys["attention.head_count"] = keys["attention.head_count"][0]
        shape = {}
        for i, source in [(None, None), *enumerate(layers)]:
            for tensor, layer, _, kind in tensors:
                if layer == source:
                    size = tuple(dims(table[tensor], keys, i, extra))
                    full = tensor if i is None else f"blk.*.{tensor}"
                    shape.setdefault((full, size, kind), []).append(i or 0)
        made = [[n, list(size), at] + ([kind] if kind not in ("F16", "F32") or kind == "F32" and len(size) > 1 else []) for (n, size, kind), at in shape.items()]
        metadata = {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in keys.items()}}
        if arch == "dflash":
            metadata["tokenizer.ggml.mask_token_id"] = 3
        lines[name] = json.dumps({"name": name, "metadata": metadata, "tensors": made}, separators=(",", ":"))
        total = sum(math.prod(d) * len(at) for _, d, at, *_ in made)
        print(f"{name}: {total / 1e9:.2f}e9 weights")
    for name, of, file, sizes, other, deep in PROJECTORS:
        lines[name] = json.dumps(projector(name, folder.parent / "vision" / of / file, sizes, other, deep), separators=(",", ":"))
    OUT.write_text("\n".join(lines.values()) + "\n")


main()
