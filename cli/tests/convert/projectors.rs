//! Projectors: checkpoints made of the files of the reference data (`RUVLLM_CONFORMANCE`), named as at
//! Hugging Face, become those files again, tensor by tensor.

use super::*;
use ruvllm::gguf::TensorInfo;
use std::collections::BTreeMap;

/// Tensors by name: shape, outermost dimension first, and values.
type Checkpoint = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Names in a file and at Hugging Face; `*` is the number of a layer.
type Names = &'static [(&'static str, &'static str)];

const SIGLIP: Names = &[
    ("v.patch_embd.", "@embeddings.patch_embedding."),
    ("v.position_embd.", "@embeddings.position_embedding."),
    ("v.post_ln.", "@post_layernorm."),
    ("v.blk.*.ln1.", "@encoder.layers.*.layer_norm1."),
    ("v.blk.*.ln2.", "@encoder.layers.*.layer_norm2."),
    ("v.blk.*.attn_q.", "@encoder.layers.*.self_attn.q_proj."),
    ("v.blk.*.attn_k.", "@encoder.layers.*.self_attn.k_proj."),
    ("v.blk.*.attn_v.", "@encoder.layers.*.self_attn.v_proj."),
    ("v.blk.*.attn_out.", "@encoder.layers.*.self_attn.out_proj."),
    ("v.blk.*.ffn_up.", "@encoder.layers.*.mlp.fc1."),
    ("v.blk.*.ffn_down.", "@encoder.layers.*.mlp.fc2."),
];
const QWEN: Names = &[
    ("v.blk.*.ln", "@blocks.*.norm"),
    ("v.blk.*.attn_qkv.", "@blocks.*.attn.qkv."),
    ("v.blk.*.attn_out.", "@blocks.*.attn.proj."),
    ("v.post_ln.", "@merger.ln_q."),
    ("mm.", "@merger.mlp."),
];
const GATED: Names = &[
    ("v.blk.*.ffn_gate.", "@blocks.*.mlp.gate_proj."),
    ("v.blk.*.ffn_up.", "@blocks.*.mlp.up_proj."),
    ("v.blk.*.ffn_down.", "@blocks.*.mlp.down_proj."),
];

fn names(of: Names) -> Names {
    of
}

/// The folders of the data: what stands for `@`, and the names; the first that fits counts.
fn kinds() -> Vec<(&'static str, &'static str, Vec<Names>)> {
    let llava: Names = &[
        ("v.class_embd", "@embeddings.class_embedding"),
        ("v.pre_ln.", "@pre_layrnorm."),
        ("v.blk.*.ffn_down.", "@encoder.layers.*.mlp.fc1."),
        ("v.blk.*.ffn_up.", "@encoder.layers.*.mlp.fc2."),
        ("mm.0.", "multi_modal_projector.linear_1."),
        ("mm.2.", "multi_modal_projector.linear_2."),
        ("model.image_newline", "image_newline"),
    ];
    vec![
        (
            "gemma3",
            "vision_tower.vision_model.",
            vec![
                names(&[
                    (
                        "mm.input_projection.weight",
                        "multi_modal_projector.mm_input_projection_weight",
                    ),
                    (
                        "mm.soft_emb_norm.",
                        "multi_modal_projector.mm_soft_emb_norm.",
                    ),
                ]),
                SIGLIP,
            ],
        ),
        (
            "gemma4",
            "model.vision_tower.",
            vec![names(&[
                (
                    "mm.input_projection.",
                    "model.embed_vision.embedding_projection.",
                ),
                ("v.patch_embd.", "@patch_embedder.input_proj."),
                (
                    "v.position_embd.weight",
                    "@patch_embedder.position_embedding_table",
                ),
                ("v.blk.*.ln1.", "@encoder.layers.*.input_layernorm."),
                (
                    "v.blk.*.attn_post_norm.",
                    "@encoder.layers.*.post_attention_layernorm.",
                ),
                (
                    "v.blk.*.ln2.",
                    "@encoder.layers.*.pre_feedforward_layernorm.",
                ),
                (
                    "v.blk.*.ffn_post_norm.",
                    "@encoder.layers.*.post_feedforward_layernorm.",
                ),
                (
                    "v.blk.*.attn_q_norm.",
                    "@encoder.layers.*.self_attn.q_norm.",
                ),
                (
                    "v.blk.*.attn_k_norm.",
                    "@encoder.layers.*.self_attn.k_norm.",
                ),
                (
                    "v.blk.*.attn_q.",
                    "@encoder.layers.*.self_attn.q_proj.linear.",
                ),
                (
                    "v.blk.*.attn_k.",
                    "@encoder.layers.*.self_attn.k_proj.linear.",
                ),
                (
                    "v.blk.*.attn_v.",
                    "@encoder.layers.*.self_attn.v_proj.linear.",
                ),
                (
                    "v.blk.*.attn_out.",
                    "@encoder.layers.*.self_attn.o_proj.linear.",
                ),
                (
                    "v.blk.*.ffn_gate.",
                    "@encoder.layers.*.mlp.gate_proj.linear.",
                ),
                ("v.blk.*.ffn_up.", "@encoder.layers.*.mlp.up_proj.linear."),
                (
                    "v.blk.*.ffn_down.",
                    "@encoder.layers.*.mlp.down_proj.linear.",
                ),
            ])],
        ),
        (
            "qwen2vl",
            "visual.",
            vec![
                names(&[
                    ("v.blk.*.ffn_up.", "@blocks.*.mlp.fc1."),
                    ("v.blk.*.ffn_down.", "@blocks.*.mlp.fc2."),
                ]),
                QWEN,
            ],
        ),
        ("qwen25vl", "model.visual.", vec![GATED, QWEN]),
        (
            "qwen3vl",
            "model.visual.",
            vec![
                names(&[
                    ("v.position_embd.", "@pos_embed."),
                    ("v.patch_embd.bias", "@patch_embed.proj.bias"),
                    ("v.deepstack.0.norm.", "@deepstack_merger_list.0.norm."),
                    ("v.deepstack.0.fc", "@deepstack_merger_list.0.linear_fc"),
                    ("v.deepstack.2.norm.", "@deepstack_merger_list.1.norm."),
                    ("v.deepstack.2.fc", "@deepstack_merger_list.1.linear_fc"),
                    ("v.blk.*.ffn_up.", "@blocks.*.mlp.linear_fc1."),
                    ("v.blk.*.ffn_down.", "@blocks.*.mlp.linear_fc2."),
                    ("v.post_ln.", "@merger.norm."),
                    ("mm.0.", "@merger.linear_fc1."),
                    ("mm.2.", "@merger.linear_fc2."),
                ]),
                QWEN,
            ],
        ),
        (
            "idefics3",
            "model.vision_model.",
            vec![
                names(&[("mm.model.fc.", "model.connector.modality_projection.proj.")]),
                SIGLIP,
            ],
        ),
        (
            "mistral3",
            "vision_tower.",
            vec![names(&[
                ("v.patch_embd.", "@patch_conv."),
                ("v.pre_ln.", "@ln_pre."),
                ("v.blk.*.ln1.", "@transformer.layers.*.attention_norm."),
                ("v.blk.*.ln2.", "@transformer.layers.*.ffn_norm."),
                ("v.blk.*.attn_q.", "@transformer.layers.*.attention.q_proj."),
                ("v.blk.*.attn_k.", "@transformer.layers.*.attention.k_proj."),
                ("v.blk.*.attn_v.", "@transformer.layers.*.attention.v_proj."),
                (
                    "v.blk.*.attn_out.",
                    "@transformer.layers.*.attention.o_proj.",
                ),
                (
                    "v.blk.*.ffn_gate.",
                    "@transformer.layers.*.feed_forward.gate_proj.",
                ),
                (
                    "v.blk.*.ffn_up.",
                    "@transformer.layers.*.feed_forward.up_proj.",
                ),
                (
                    "v.blk.*.ffn_down.",
                    "@transformer.layers.*.feed_forward.down_proj.",
                ),
                ("mm.1.", "multi_modal_projector.linear_1."),
                ("mm.2.", "multi_modal_projector.linear_2."),
                ("mm.input_norm.", "multi_modal_projector.norm."),
                (
                    "mm.patch_merger.",
                    "multi_modal_projector.patch_merger.merging_layer.",
                ),
                (
                    "v.token_embd.img_break",
                    "language_model.model.embed_tokens.weight",
                ),
            ])],
        ),
        ("llava15", "vision_tower.vision_model.", vec![llava, SIGLIP]),
        (
            "llavanext",
            "model.vision_tower.vision_model.",
            vec![llava, SIGLIP],
        ),
        (
            "internvl3",
            "vision_tower.",
            vec![names(&[
                ("v.class_embd", "@embeddings.cls_token"),
                ("v.patch_embd.", "@embeddings.patch_embeddings.projection."),
                ("v.position_embd.weight", "@embeddings.position_embeddings"),
                ("v.blk.*.ln1.", "@encoder.layer.*.layernorm_before."),
                ("v.blk.*.ln2.", "@encoder.layer.*.layernorm_after."),
                (
                    "v.blk.*.attn_out.",
                    "@encoder.layer.*.attention.projection_layer.",
                ),
                ("v.blk.*.attn_q.", "@encoder.layer.*.attention.q_proj."),
                ("v.blk.*.attn_k.", "@encoder.layer.*.attention.k_proj."),
                ("v.blk.*.attn_v.", "@encoder.layer.*.attention.v_proj."),
                ("v.blk.*.ls1.weight", "@encoder.layer.*.lambda_1"),
                ("v.blk.*.ls2.weight", "@encoder.layer.*.lambda_2"),
                ("v.blk.*.ffn_up.", "@encoder.layer.*.mlp.fc1."),
                ("v.blk.*.ffn_down.", "@encoder.layer.*.mlp.fc2."),
                ("mm.model.mlp.0.", "multi_modal_projector.layer_norm."),
                ("mm.model.mlp.1.", "multi_modal_projector.linear_1."),
                ("mm.model.mlp.3.", "multi_modal_projector.linear_2."),
            ])],
        ),
        (
            "lfm2vl",
            "model.vision_tower.vision_model.",
            vec![
                names(&[
                    ("mm.input_norm.", "model.multi_modal_projector.layer_norm."),
                    ("mm.1.", "model.multi_modal_projector.linear_1."),
                    ("mm.2.", "model.multi_modal_projector.linear_2."),
                ]),
                SIGLIP,
            ],
        ),
        (
            "glm4v",
            "model.visual.",
            vec![
                GATED,
                names(&[
                    ("v.patch_embd.bias", "@patch_embed.proj.bias"),
                    ("v.position_embd.", "@embeddings.position_embedding."),
                    ("v.norm_embd.", "@post_conv_layernorm."),
                    ("v.post_ln.", "@post_layernorm."),
                    ("mm.patch_merger.", "@downsample."),
                    ("mm.model.fc.", "@merger.proj."),
                    ("mm.post_norm.", "@merger.post_projection_norm."),
                    ("mm.gate.", "@merger.gate_proj."),
                    ("mm.up.", "@merger.up_proj."),
                    ("mm.down.", "@merger.down_proj."),
                ]),
                QWEN,
            ],
        ),
        (
            "minicpmv46",
            "model.vision_tower.",
            vec![
                names(&[
                    ("v.vit_merger.ln1.", "@vit_merger.layer_norm1."),
                    ("v.vit_merger.attn_q.", "@vit_merger.self_attn.q_proj."),
                    ("v.vit_merger.attn_k.", "@vit_merger.self_attn.k_proj."),
                    ("v.vit_merger.attn_v.", "@vit_merger.self_attn.v_proj."),
                    ("v.vit_merger.attn_out.", "@vit_merger.self_attn.out_proj."),
                    ("v.vit_merger.ds_ln.", "@vit_merger.pre_norm."),
                    ("v.vit_merger.ds_ffn_up.", "@vit_merger.linear_1."),
                    ("v.vit_merger.ds_ffn_down.", "@vit_merger.linear_2."),
                    ("mm.input_norm.", "model.merger.mlp.0.pre_norm."),
                    ("mm.up.", "model.merger.mlp.0.linear_1."),
                    ("mm.down.", "model.merger.mlp.0.linear_2."),
                ]),
                SIGLIP,
            ],
        ),
        (
            "llama4",
            "vision_model.",
            vec![names(&[
                ("v.class_embd", "@class_embedding"),
                ("v.position_embd.weight", "@positional_embedding_vlm"),
                ("v.patch_embd.", "@patch_embedding.linear."),
                ("v.pre_ln.", "@layernorm_pre."),
                ("v.post_ln.", "@layernorm_post."),
                ("v.blk.*.ln1.", "@model.layers.*.input_layernorm."),
                ("v.blk.*.ln2.", "@model.layers.*.post_attention_layernorm."),
                ("v.blk.*.attn_q.", "@model.layers.*.self_attn.q_proj."),
                ("v.blk.*.attn_k.", "@model.layers.*.self_attn.k_proj."),
                ("v.blk.*.attn_v.", "@model.layers.*.self_attn.v_proj."),
                ("v.blk.*.attn_out.", "@model.layers.*.self_attn.o_proj."),
                ("v.blk.*.ffn_up.", "@model.layers.*.mlp.fc1."),
                ("v.blk.*.ffn_down.", "@model.layers.*.mlp.fc2."),
                ("mm.model.mlp.1.", "@vision_adapter.mlp.fc1."),
                ("mm.model.mlp.2.", "@vision_adapter.mlp.fc2."),
                ("mm.model.fc.", "multi_modal_projector.linear_1."),
            ])],
        ),
    ]
}

/// What a tensor is called at Hugging Face.
fn renamed(name: &str, wrapper: &str, tables: &[Names]) -> Option<String> {
    let mut parts = name.split('.');
    let layer = (name.starts_with("v.blk.")).then(|| parts.nth(2).unwrap());
    let fill = |pattern: &str| {
        let pattern = pattern.replace('@', wrapper);
        layer.map_or(pattern.clone(), |layer| pattern.replace('*', layer))
    };
    let mut names = tables.iter().copied().flatten();
    names.find_map(|(own, hf)| Some(fill(hf) + name.strip_prefix(&fill(own))?))
}

fn floats(gguf: &Gguf, tensor: &TensorInfo) -> Vec<f32> {
    let mut values = vec![0.0; tensor.dims.iter().product::<u64>() as usize];
    ruvllm::quant::dequantize_row(tensor.dtype, gguf.data(tensor), &mut values).unwrap();
    values
}

/// The checkpoint that a file was made of.
fn checkpoint(kind: &str, wrapper: &str, tables: &[Names], gguf: &Gguf) -> Checkpoint {
    let get = |name: &str| {
        let tensor = gguf.tensor(name)?;
        let shape: Vec<usize> = tensor.dims.iter().rev().map(|&n| n as usize).collect();
        Some((shape, floats(gguf, tensor)))
    };
    let mut all = Checkpoint::new();
    for tensor in gguf.tensors() {
        let name = &tensor.name[..];
        let (mut shape, mut values) = get(name).unwrap();
        if name == "v.patch_embd.weight.1"
            || name.contains("attn_k.") && kind.starts_with("qwen2")
            || name.contains("attn_v.") && kind.starts_with("qwen2")
        {
            continue;
        }
        let mut to = renamed(name, wrapper, tables);
        if let Some((_, second)) =
            get("v.patch_embd.weight.1").filter(|_| name == "v.patch_embd.weight")
        {
            // Two frames of each colour.
            let n = shape[2] * shape[3];
            let frames = values.chunks_exact(n).zip(second.chunks_exact(n));
            values = frames.flat_map(|(a, b)| [a, b].concat()).collect();
            shape.insert(2, 2);
            to = Some(format!("{wrapper}patch_embed.proj.weight"));
        } else if name.contains(".attn_q.") && kind.starts_with("qwen2") {
            for other in ["attn_k", "attn_v"] {
                values.extend(get(&name.replace("attn_q", other)).unwrap().1);
            }
            shape[0] *= 3;
            to = renamed(&name.replace("attn_q", "attn_qkv"), wrapper, tables);
        } else if name == "v.patch_embd.weight" && ["gemma4", "lfm2vl"].contains(&kind) {
            // Colours innermost.
            let n = shape[2] * shape[3];
            let of_patch = |patch: &[f32]| {
                let pixel = |i: usize| [patch[i], patch[n + i], patch[2 * n + i]];
                (0..n).flat_map(pixel).collect::<Vec<_>>()
            };
            values = values.chunks_exact(3 * n).flat_map(of_patch).collect();
            shape = vec![shape[0], 3 * n];
        } else if kind == "mistral3" && (name.contains("attn_q") || name.contains("attn_k")) {
            // Row i and row i + n/2 of a head of n = 32 stand side by side in the file.
            let (width, head) = (shape[1], 32);
            let row = |i: usize| {
                let in_head = i % head;
                let from = i - in_head + in_head % (head / 2) * 2 + in_head / (head / 2);
                &values[from * width..][..width]
            };
            values = (0..shape[0]).flat_map(row).copied().collect();
        } else if name == "mm.soft_emb_norm.weight" {
            values.iter_mut().for_each(|x| *x -= 1.0);
        } else if name == "v.token_embd.img_break" {
            values = [vec![0.5; 7 * shape[0]], values, vec![0.25; shape[0]]].concat();
            shape = vec![9, shape[0]];
        }
        all.insert(
            to.unwrap_or_else(|| panic!("{kind}: {name}")),
            (shape, values),
        );
    }
    all
}

fn bytes(checkpoint: &Checkpoint) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (shape, values)) in checkpoint {
        let start = data.len();
        values.iter().for_each(|x| data.extend(x.to_le_bytes()));
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name.clone(), entry);
    }
    with_header(&Json::Object(header).to_string(), &data)
}

/// A folder of a kind, with tensors that are not the projector's.
fn folder(dir: &Path, kind: &str, wrapper: &str, tables: &[Names]) -> (Folder, Checkpoint) {
    let gguf = Gguf::open(dir.join("mmproj-f32.gguf")).unwrap();
    let mut tensors = checkpoint(kind, wrapper, tables, &gguf);
    let mut more = vec![
        "lm_head.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
    ];
    let unused = [
        format!("{wrapper}post_layernorm.weight"),
        format!("{wrapper}encoder.layers.3.mlp.fc1.weight"),
        format!("{wrapper}head.probe"),
    ];
    match kind {
        "llava15" | "llavanext" => more.extend([&unused[0][..], &unused[1]]),
        "gemma3" => more.push(&unused[2]),
        _ => {}
    }
    more.iter().for_each(|name| {
        tensors.insert((*name).to_owned(), (vec![2, 2], vec![1.0; 4]));
    });
    let folder = Folder::new();
    folder.write("model.safetensors", bytes(&tensors));
    for file in ["config.json", "preprocessor_config.json"] {
        let from = dir.join(format!("hf_{file}"));
        folder.write(file, std::fs::read(from).unwrap());
    }
    let tokens = json!({"added_tokens_decoder": {"7": {"content": "[IMG_BREAK]"}}});
    folder.write("tokenizer_config.json", tokens.to_string());
    (folder, tensors)
}

fn root() -> Option<PathBuf> {
    Some(PathBuf::from(std::env::var_os("RUVLLM_CONFORMANCE")?).join("vision"))
}

#[test]
fn equal_llama_cpp() {
    let Some(root) = root() else { return };
    for (kind, wrapper, tables) in kinds() {
        let dir = root.join(kind);
        let (folder, _) = folder(&dir, kind, wrapper, &tables);
        for (outtype, file) in [
            ("f32", "f32"),
            ("f16", "f16"),
            ("q8_0", "q8_0"),
            ("bf16", ""),
        ] {
            let reference = dir.join(format!("mmproj-{file}.gguf"));
            let out = folder.0.join(format!("{outtype}.gguf"));
            let path = out.to_str().unwrap();
            let output = folder.convert(&["--mmproj", "-o", path, "--outtype", outtype]);
            assert!(output.status.success(), "{kind}: {output:?}");
            let own = Gguf::open(&out).unwrap();
            if let Ok(model) = Model::open(dir.join("model-f16.gguf")) {
                ruvllm::vision::Projector::open(&out, &model).unwrap();
            }
            let Ok(expected) = Gguf::open(&reference) else {
                continue;
            };
            for (key, value) in expected.metadata().iter() {
                let found = own.metadata().get(key).map(describe);
                let is_name = key == "general.name";
                assert!(
                    is_name || found == Some(describe(value)),
                    "{kind}: {key} {found:?}"
                );
            }
            // What llama.cpp leaves out, so that its GELU is not the authors'.
            let is_new = |key: &str| {
                let is_known =
                    kind == "gemma4" && key == "clip.use_gelu" || key.starts_with("general.");
                !is_known && expected.metadata().get(key).is_none()
            };
            let new = own.metadata().iter().find(|(key, _)| is_new(key));
            assert!(new.is_none(), "{kind}: {new:?}");
            assert_eq!(own.tensors().len(), expected.tensors().len(), "{kind}");
            for tensor in expected.tensors() {
                let name = &tensor.name;
                let found = own.tensor(name).unwrap_or_else(|| panic!("{kind}: {name}"));
                assert_eq!(
                    (&found.dims, found.dtype),
                    (&tensor.dims, tensor.dtype),
                    "{kind} {name}"
                );
                // Of Q8_0 the scales, which llama.cpp stores after it rounded with them.
                let n = if tensor.dtype == DType::Q8_0 { 2 } else { 34 };
                let head = |data: &[u8]| -> Vec<u8> {
                    data.chunks(34)
                        .flat_map(|block| &block[..n.min(block.len())])
                        .copied()
                        .collect()
                };
                let (a, b) = (head(own.data(found)), head(expected.data(tensor)));
                assert!(a == b, "{kind}: {outtype} {name}");
            }
        }
    }
}

/// What the configuration of a LLaVA leaves out is what transformers takes: of the encoder's layers
/// all but the last.
#[test]
fn llava_reads_the_last_layer_but_one() {
    let Some(root) = root() else { return };
    for (kind, wrapper, tables) in kinds() {
        if !["llava15", "llavanext"].contains(&kind) {
            continue;
        }
        let (folder, _) = folder(&root.join(kind), kind, wrapper, &tables);
        let convert = || {
            let out = folder.0.join("out.gguf");
            let path = out.to_str().unwrap();
            let output = folder.convert(&["--mmproj", "-o", path, "--overwrite"]);
            assert!(output.status.success(), "{kind}: {output:?}");
            std::fs::read(out).unwrap()
        };
        let config = std::fs::read(folder.model().join("config.json")).unwrap();
        let mut config: Json = serde_json::from_slice(&config).unwrap();
        config["vision_feature_layer"] = json!(-2);
        folder.write("config.json", config.to_string());
        let told = convert();
        let keys = config.as_object_mut().unwrap();
        keys.remove("vision_feature_layer");
        folder.write("config.json", config.to_string());
        assert!(convert() == told, "{kind}");
    }
}

/// What no projector can be made of is refused by name, and leaves no file.
#[test]
fn refused() {
    let Some(root) = root() else { return };
    let (kind, wrapper, tables) = kinds().remove(0);
    let (folder, mut tensors) = folder(&root.join(kind), kind, wrapper, &tables);
    let refusal = || {
        let output = folder.convert(&["--mmproj"]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
        String::from_utf8(output.stderr).unwrap()
    };
    let config = std::fs::read(folder.model().join("config.json")).unwrap();
    let config: Json = serde_json::from_slice(&config).unwrap();
    let changed = |change: &dyn Fn(&mut Json)| {
        let mut config = config.clone();
        change(&mut config);
        folder.write("config.json", config.to_string());
        refusal()
    };
    let no_images = changed(&|config| config["vision_config"] = Json::Null);
    assert!(no_images.contains("reads no images"), "{no_images}");
    let other = changed(&|config| config["architectures"] = json!(["LlamaForCausalLM"]));
    assert!(
        other.contains("LlamaForCausalLM") && other.contains("Gemma3"),
        "{other}"
    );
    let layer = changed(&|config| config["vision_feature_layer"] = json!([-2, -5]));
    assert!(layer.contains("vision_feature_layer"), "{layer}");
    let layer = changed(&|config| config["vision_feature_layer"] = json!(-9));
    assert!(layer.contains("layer -9 of 3"), "{layer}");
    folder.write("config.json", config.to_string());
    // A file of the checkpoint is missing, or it is that of a model without eyes.
    let (name, tensor) = {
        let find = |name: &&String| name.contains("layers.1.") && name.ends_with("fc1.weight");
        let name = tensors.keys().find(find).unwrap().clone();
        let tensor = tensors.remove(&name).unwrap();
        (name, tensor)
    };
    folder.write("model.safetensors", bytes(&tensors));
    assert!(refusal().contains("no v.blk.1."));
    tensors.insert(name, tensor);
    folder.write("model.safetensors", bytes(&tensors));
    folder.write("preprocessor_config.json", "{}");
    assert!(refusal().contains("image_mean is not three numbers"));
    tensors.insert(
        "vision_tower.vision_model.odd.weight".into(),
        (vec![1], vec![1.0]),
    );
    folder.write("model.safetensors", bytes(&tensors));
    assert!(refusal().contains("odd.weight is none of gemma3's"));
}
