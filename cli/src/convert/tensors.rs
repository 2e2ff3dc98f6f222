//! From the tensors of a checkpoint to those of a GGUF file, by their names.

use super::checkpoint::Source;
use super::config::Config;
use super::family::{Family, NAMES};
use super::layout::{OutTypes, Pieces, Tensor, stack};
use super::quantised::QUANTISED;
use crate::io::{Failure, note};
use ruvllm::quant::dequantize_row;
use std::collections::BTreeMap;

/// A module's name: its layer, its path with `*` for the number of an expert, that number, and its
/// end.
struct Name<'n> {
    layer: Option<u32>,
    path: String,
    expert: Option<u32>,
    /// `.weight`, `.bias` or nothing.
    end: &'n str,
}

/// Pieces of models that also see and hear.
const OTHER_PARTS: &[&str] = &[
    "vision_",
    "visual.",
    "vision.",
    "audio_",
    "audio.",
    "projector.",
    "image_newline",
    "patch_embed",
];
/// Buffers that older checkpoints have beside their weights.
const BUFFERS: &[&str] = &[
    ".rotary_emb.inv_freq",
    ".attention.masked_bias",
    ".attention.bias",
];

/// Most blocks for multi-token prediction.
const MAX_BLOCKS: u32 = 64;

/// Modules around a model.
const WRAPPERS: &[&str] = &[
    "model",
    "language_model",
    "backbone",
    "transformer",
    "gpt_neox",
    "rwkv",
    "bert",
    "roberta",
];

/// Modules of a block for multi-token prediction, beside those of its layer; and what Qwen calls
/// them.
const BLOCK: &[(&str, &str, &str)] = &[
    ("eh_proj", "nextn.eh_proj", "fc"),
    ("enorm", "nextn.enorm", "pre_fc_norm_embedding"),
    ("hnorm", "nextn.hnorm", "pre_fc_norm_hidden"),
    ("shared_head.norm", "nextn.shared_head_norm", "norm"),
    ("shared_head.head", "nextn.shared_head_head", ""),
    ("embed_tokens", "nextn.embed_tokens", ""),
];

/// A tensor's name, and whether it belongs to a block for multi-token prediction: a layer behind
/// the `n_layer` of the model, of which there may be `n_next`, or Qwen's `mtp`, which is taken for
/// the first one.
fn parse_any(name: &str, n_layer: u32, n_next: u32) -> (Name<'_>, bool) {
    let parsed = parse(name);
    let Some(own) = without_wrappers(name).strip_prefix("mtp.") else {
        let is_block = parsed
            .layer
            .and_then(|layer| layer.checked_sub(n_layer))
            .is_some_and(|i| i < n_next);
        return (parsed, is_block);
    };
    let inner = parse(own);
    let module = BLOCK
        .iter()
        .find(|(.., of_qwen)| inner.path == *of_qwen)
        .map(|(module, ..)| (*module).to_owned());
    match (inner.layer, module) {
        (None, Some(path)) => (
            Name {
                layer: Some(n_layer),
                path,
                ..inner
            },
            true,
        ),
        (Some(layer), _) => (
            Name {
                layer: n_layer.checked_add(layer),
                ..inner
            },
            true,
        ),
        (None, None) => (parsed, true),
    }
}

/// Blocks for multi-token prediction that are written: those that the configuration tells and whose
/// parts are there, up to the first of which one is missing.
pub(super) fn n_blocks(
    family: &Family,
    config: &Config,
    sources: &[Source<'_>],
    n_layer: u32,
) -> Result<u32, Failure> {
    let n_next = if family.blocks {
        n_next(config, sources)?
    } else {
        0
    };
    let has = |i: u32, module: &str| {
        sources.iter().any(|source| {
            let (name, is_block) = parse_any(&source.name, n_layer, n_next);
            is_block && name.layer.is_some_and(|layer| layer - n_layer == i) && name.path == module
        })
    };
    Ok((0..n_next)
        .take_while(|&i| {
            ["eh_proj", "enorm", "hnorm"]
                .iter()
                .all(|module| has(i, module))
        })
        .count() as u32)
}

/// Blocks that there may be.
fn n_next(config: &Config, sources: &[Source<'_>]) -> Result<u32, Failure> {
    let of_qwen = sources
        .iter()
        .any(|source| without_wrappers(&source.name).starts_with("mtp."));
    let n = config
        .opt_u32(&["num_nextn_predict_layers", "mtp_num_hidden_layers"])?
        .unwrap_or(u32::from(of_qwen));
    // Qwen's layers behind the first one would share its other parts.
    Ok(if of_qwen && n > 1 {
        0
    } else {
        n.min(MAX_BLOCKS)
    })
}

fn without_wrappers(mut name: &str) -> &str {
    while let Some((_, rest)) = name
        .split_once('.')
        .filter(|(first, _)| WRAPPERS.contains(first))
    {
        name = rest;
    }
    name
}

fn parse(name: &str) -> Name<'_> {
    // The last two are TensorFlow's names of a norm's.
    let ends = [
        (".weight", ".weight"),
        (".bias", ".bias"),
        (".gamma", ".weight"),
        (".beta", ".bias"),
    ];
    let known = ends
        .into_iter()
        .find_map(|(end, to)| Some((name.strip_suffix(end)?, to)));
    let (stem, end) = known.unwrap_or((name, ""));
    let (mut layer, mut expert) = (None, None);
    let mut path = Vec::new();
    for part in stem.split('.') {
        match part.parse::<u32>() {
            Ok(number)
                if layer.is_none()
                    && matches!(path.last(), Some(&("layers" | "layer" | "blocks" | "h"))) =>
            {
                layer = Some(number);
                path.clear();
            }
            Ok(number) if expert.is_none() && !path.is_empty() => {
                expert = Some(number);
                path.push("*");
            }
            _ if layer.is_none() && WRAPPERS.contains(&part) => {}
            _ => path.push(part),
        }
    }
    Name {
        layer,
        path: path.join("."),
        expert,
        end,
    }
}

/// Lays out all tensors, those of `n_block` blocks for multi-token prediction behind the `n_layer`
/// layers too. `n_left_out` others were left out; `n_vocab` tokens have a row in the embedding;
/// `types` are those of matrices.
pub(super) fn plan<'a>(
    family: &Family,
    config: &Config,
    sources: &'a [Source<'a>],
    mut n_left_out: usize,
    (n_layer, n_block): (u32, u32),
    n_vocab: usize,
    types: OutTypes,
) -> Result<Vec<Tensor<'a>>, Failure> {
    let n_next = n_next(config, sources)?;
    let end = n_layer.saturating_add(n_block);
    // Pieces by the number of the expert, in the order of the checkpoint.
    let mut order = Vec::new();
    let mut parts: BTreeMap<String, Pieces<'a>> = BTreeMap::new();
    for source in sources
        .iter()
        .filter(|source| scalar_of(family, &source.name).is_none())
    {
        let (name, is_block) = parse_any(&source.name, n_layer, n_next);
        let is_kept = is_block && name.layer.is_some_and(|layer| layer < end);
        if is_block && !is_kept {
            n_left_out += 1;
            continue;
        }
        let of_block = BLOCK
            .iter()
            .filter(|_| is_kept)
            .find(|(from, ..)| *from == name.path)
            .map(|(_, to, _)| *to);
        let (known, expert) = match of_block {
            Some(to) => (Some(to), name.expert),
            None => look_up(family, &name),
        };
        let Some(to) = known.filter(|_| name.layer.is_none_or(|layer| layer < end)) else {
            return Err(config.refuse(unknown(family, &source.name)));
        };
        let is_cut = to.contains(" + ");
        for (i, to) in to.split(" + ").enumerate() {
            let share = is_cut.then_some(i);
            let (to, piece) = match to.strip_suffix(']').and_then(|to| to.split_once('[')) {
                Some((to, piece)) => (to, piece.parse().unwrap_or(0)),
                None => (to, expert.unwrap_or(0)),
            };
            let mut full = match to.strip_suffix('!') {
                Some(whole) => whole.to_owned(),
                None => format!("{to}{}", name.end),
            };
            match (full.strip_prefix('/'), name.layer) {
                (Some(of_model), _) => full = of_model.to_owned(),
                (None, Some(layer)) => full = format!("blk.{layer}.{full}"),
                (None, None) => {}
            }
            for full in [(family.copy)(&full), Some(full)].into_iter().flatten() {
                if !parts.contains_key(&full) {
                    order.push(full.clone());
                }
                if let Some((twin, _)) = parts
                    .entry(full)
                    .or_default()
                    .insert(piece, (source, share))
                {
                    return Err(config.refuse(format_args!(
                        "{} and {} are the same tensor",
                        twin.name, source.name
                    )));
                }
            }
        }
    }
    if n_left_out > 0 {
        note(format!(
            "{n_left_out} tensors are left out: other parts of the model, blocks for multi-token prediction, or buffers"
        ));
    }
    let tensor = |name: String| {
        let pieces = parts.remove(&name).unwrap_or_default();
        stack(family, config, name, &pieces, n_vocab, types)
    };
    order.into_iter().map(tensor).collect()
}

/// What a tensor is called in the GGUF file, and the number of its expert.
fn look_up(family: &Family, name: &Name<'_>) -> (Option<&'static str>, Option<u32>) {
    let find = |path: &str| {
        family
            .names
            .iter()
            .chain(NAMES)
            .find(|(from, _)| *from == path)
            .map(|(_, to)| *to)
    };
    let exact = match name.expert {
        Some(number) => name.path.replace('*', &number.to_string()),
        None => name.path.clone(),
    };
    match find(&format!("{exact}{}", name.end)).or_else(|| find(&exact)) {
        Some(to) => (Some(to), None),
        None => (find(&name.path), name.expert),
    }
}

/// The key that a tensor with one number of a layer becomes part of.
fn scalar_of(family: &Family, name: &str) -> Option<(&'static str, u32)> {
    let is = |from: &str| {
        name.strip_suffix(from)
            .is_some_and(|rest| rest.ends_with('.'))
    };
    let key = family
        .scalars
        .iter()
        .find(|(from, _)| is(from))
        .map(|(_, to)| *to);
    key.zip(parse(name).layer)
}

/// The numbers of [`Family::scalars`] by key and layer.
pub(super) fn scalars(
    family: &Family,
    config: &Config,
    sources: &[Source<'_>],
) -> Result<BTreeMap<&'static str, Vec<f32>>, Failure> {
    let mut by_layer: BTreeMap<&'static str, BTreeMap<u32, f32>> = BTreeMap::new();
    for source in sources {
        let Some((key, layer)) = scalar_of(family, &source.name) else {
            continue;
        };
        let mut number = [0.0];
        let read = source
            .plain()
            .map(|data| dequantize_row(source.dtype, data, &mut number));
        if !matches!(read, Some(Ok(()))) {
            return Err(config.refuse(format_args!("{} is not one number", source.name)));
        }
        by_layer.entry(key).or_default().insert(layer, number[0]);
    }
    Ok(by_layer
        .into_iter()
        .map(|(key, numbers)| (key, numbers.into_values().collect()))
        .collect())
}

/// Whether a tensor belongs to another part of the model, is a buffer, or, named without
/// [`WRAPPERS`] or a part of a layer, one of [`Family::skips`].
pub(super) fn is_left_out(family: &Family, name: &str) -> bool {
    let own = without_wrappers(name);
    let skips = family
        .skips
        .iter()
        .any(|start| own.starts_with(start) || own.ends_with(&format!(".{start}")));
    let is_other = OTHER_PARTS
        .iter()
        .chain(BUFFERS)
        .any(|part| name.contains(part));
    scalar_of(family, name).is_none() && (is_other || skips)
}

fn unknown(family: &Family, name: &str) -> String {
    let packed = [
        ".qweight",
        ".qzeros",
        ".scales",
        ".g_idx",
        ".weight_scale",
        ".weight_scale_inv",
        ".weight_packed",
        "_blocks",
    ];
    match packed.iter().any(|end| name.ends_with(end)) {
        true => format!("tensor {name} belongs to quantised weights: {QUANTISED}"),
        false => format!("tensor {name} is none of {}'s", family.arch),
    }
}
