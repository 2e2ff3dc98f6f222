//! From the tensors of a checkpoint to those of a GGUF file: names, shapes, types, and which row
//! comes from where.

use super::checkpoint::{QUANTISED, Source};
use super::config::Config;
use super::family::{Factor, Family, Map, NAMES, Reorder, Run, Transpose};
use crate::io::{Failure, note};
use ruvllm::quant::{DType, dequantize_row};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// A tensor of the GGUF file.
pub(super) struct Tensor<'a> {
    pub(super) name: String,
    /// Row length first.
    pub(super) dims: Vec<u64>,
    pub(super) from: DType,
    pub(super) to: DType,
    map: Option<Map>,
    factors: Vec<Factor>,
    /// The pieces whose rows follow one another: the tensor, parts of it, or each expert's.
    pieces: Vec<Piece<'a>>,
    n_rows: usize,
    /// The order of the values of a row, if it changes.
    columns: Option<Vec<Run>>,
}

/// Some of the rows of a tensor in the checkpoint.
struct Piece<'a> {
    /// Its first row in the GGUF file.
    start: usize,
    source: &'a Source<'a>,
    row_bytes: usize,
    order: Order,
}

#[derive(Clone, Copy)]
enum Order {
    /// From a row on, every so many.
    Rows { first: usize, step: usize },
    /// In each group of so many rows (a head), row `i` of the first half, then row `i` of the
    /// second.
    Pairs(usize),
    /// Columns, from one on, every so many, of `n` rows beginning with `row`.
    Columns {
        row: usize,
        n: usize,
        first: usize,
        step: usize,
    },
    /// Rows that the checkpoint lacks.
    Zeros,
}

impl<'a> Tensor<'a> {
    pub(super) fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Whether the values are not those of the checkpoint.
    pub(super) fn is_changed(&self) -> bool {
        self.map.is_some() || !self.factors.is_empty()
    }

    /// Makes the values of row `i` what they are in the GGUF file.
    pub(super) fn change(&self, i: usize, values: &mut [f32]) {
        if let Some(map) = self.map {
            values.iter_mut().for_each(|x| *x = map(*x));
        }
        for (_, factor) in self.factors.iter().filter(|(rows, _)| rows.contains(&i)) {
            values.iter_mut().for_each(|x| *x *= factor);
        }
    }

    /// The bytes of row `i`.
    pub(super) fn row(&self, i: usize) -> Cow<'a, [u8]> {
        let piece = &self.pieces[self.pieces.partition_point(|piece| piece.start <= i) - 1];
        let row = piece.row(i - piece.start);
        let Some(columns) = &self.columns else {
            return row;
        };
        let size = self.from.block().1 as usize;
        Cow::Owned(
            columns
                .iter()
                .flat_map(|run| &row[run.first * size..(run.first + run.n) * size])
                .copied()
                .collect(),
        )
    }
}

impl<'a> Piece<'a> {
    fn row(&self, i: usize) -> Cow<'a, [u8]> {
        let i = match self.order {
            Order::Rows { first, step } => first + i * step,
            Order::Pairs(head) => {
                let in_head = i % head;
                i - in_head + in_head % 2 * (head / 2) + in_head / 2
            }
            Order::Columns {
                row,
                n,
                first,
                step,
            } => {
                let size = self.source.dtype.block().1 as usize;
                let at = |j: usize| (row + j) * self.row_bytes + (first + i * step) * size;
                return Cow::Owned(
                    (0..n)
                        .flat_map(|j| &self.source.data[at(j)..at(j) + size])
                        .copied()
                        .collect(),
                );
            }
            Order::Zeros => return Cow::Owned(vec![0; self.row_bytes]),
        };
        let row = &self.source.data[i * self.row_bytes..(i + 1) * self.row_bytes];
        if self.source.dtype != DType::MXFP4 {
            return Cow::Borrowed(row);
        }
        let n_blocks = self.row_bytes / 16;
        Cow::Owned(mxfp4_row(
            row,
            &self.source.scales[i * n_blocks..(i + 1) * n_blocks],
        ))
    }
}

/// Blocks of a GGUF file, whose byte `j` has the codes of values `j` and `j + 16`, from those of
/// gpt-oss, whose byte `j` has `2j` and `2j + 1`; the first of the two is in the lower half.
fn mxfp4_row(codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let mut row = Vec::with_capacity(17 * scales.len());
    for (codes, scale) in codes.chunks_exact(16).zip(scales) {
        let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
        row.push(*scale);
        row.extend((0..16).map(|j| code(j) | code(j + 16) << 4));
    }
    row
}

/// A module's name: its layer, its path with `*` for the number of an expert, that number, and its
/// end.
struct Name<'n> {
    layer: Option<u32>,
    path: String,
    expert: Option<u32>,
    /// `.weight`, `.bias` or nothing.
    end: &'n str,
}

/// Parts of models that also see and hear.
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
/// `outtype` is the type of matrices.
pub(super) fn plan<'a>(
    family: &Family,
    config: &Config,
    sources: &'a [Source<'a>],
    mut n_left_out: usize,
    (n_layer, n_block): (u32, u32),
    n_vocab: usize,
    outtype: DType,
) -> Result<Vec<Tensor<'a>>, Failure> {
    let n_next = n_next(config, sources)?;
    let end = n_layer.saturating_add(n_block);
    // Pieces by the number of the expert, in the order of the checkpoint.
    let mut order = Vec::new();
    let mut parts: BTreeMap<String, BTreeMap<u32, (&'a Source<'a>, Option<usize>)>> =
        BTreeMap::new();
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
        stack(family, config, name, pieces, n_vocab, outtype)
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
        if dequantize_row(source.dtype, source.data, &mut number).is_err() {
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

/// One tensor from its pieces by the number of the expert. Long, as each step needs most of what the
/// ones before found: shape, rows and their order, pieces, type.
fn stack<'a>(
    family: &Family,
    config: &Config,
    name: String,
    pieces: BTreeMap<u32, (&'a Source<'a>, Option<usize>)>,
    n_vocab: usize,
    outtype: DType,
) -> Result<Tensor<'a>, Failure> {
    let refuse = |what: String| Err(config.refuse(format_args!("{name}: {what}")));
    let stacked =
        name.contains("_exps") || name.starts_with("altup_") || name.contains("_lerp_fused");
    let Some((&last, &(first, share))) = pieces.last_key_value() else {
        unreachable!("a name has a piece")
    };
    let n_pieces = pieces.len();
    if last as usize + 1 != n_pieces {
        return refuse(format!(
            "there are {n_pieces} experts, and one has number {last}"
        ));
    }
    if let Some((other, _)) = pieces
        .values()
        .find(|(piece, _)| (&piece.shape, piece.dtype) != (&first.shape, first.dtype))
    {
        let (a, b) = (&first.shape, &other.shape);
        return refuse(format!(
            "its experts have the shapes {a:?} and {b:?}, or different types"
        ));
    }
    let mut shape = if first.shape.is_empty() {
        vec![1]
    } else {
        first.shape.clone()
    };
    // A convolution by channels has one input.
    if let [channels, 1, taps] = shape[..] {
        shape = vec![channels, taps];
    }
    let part = part_of(&name);
    let n_values: usize = shape.iter().product();
    (family.reshape)(config, part, &mut shape)?;
    if shape.iter().product::<usize>() != n_values {
        return refuse(format!(
            "{:?} is not of the shape that the configuration tells, {shape:?}",
            first.shape
        ));
    }
    if name == "token_embd.weight"
        && shape[0] > n_vocab
        && matches!(family.arch, "gemma3" | "gemma4" | "gemma-embedding")
    {
        // Rows that no token has.
        shape[0] = n_vocab;
    }
    let pairs = family.pairs && matches!(part, "attn_q" | "attn_k");
    let reorder = (family.reorder)(config, part)?;
    let transpose = (family.transpose)(part)
        .filter(|_| first.dtype != DType::MXFP4 && name.ends_with(".weight"));
    // A bias has a value for each row of its matrix.
    let by_value = match shape.len() {
        1 => pairs || matches!(reorder, Some(Reorder::Rows(_))),
        _ => share.is_some() && !name.ends_with(".weight"),
    };
    let is_vector = shape.len() == 1 && !by_value;
    if first.dtype == DType::MXFP4 && (!stacked || !name.ends_with(".weight")) {
        return refuse("only experts are MXFP4".into());
    }
    // One matrix or several, such as those of experts.
    let width = if by_value {
        1
    } else {
        shape.pop().unwrap_or(1)
    };
    let height = shape.pop().unwrap_or(1);
    let n_matrices: usize = shape.iter().product();
    let row_bytes = if first.dtype == DType::MXFP4 {
        width / 2
    } else {
        width * first.dtype.block().1 as usize
    };

    // Rows, or columns that become rows, and their order.
    let n_lines = if transpose == Some(Transpose::BeforeCut) {
        width
    } else {
        height
    };
    let mut runs = vec![Run {
        first: 0,
        n: n_lines,
        step: 1,
    }];
    if let Some(i) = share {
        if is_vector {
            return refuse("it is a vector".into());
        }
        runs = (family.cut)(config, n_lines)?
            .into_iter()
            .nth(i)
            .unwrap_or_default();
    } else if let Some(Reorder::Rows(order)) = &reorder {
        runs.clone_from(order);
    } else if let Some(Reorder::RowsFrom(first)) = reorder {
        runs = vec![Run {
            first,
            n: n_lines.saturating_sub(first),
            step: 1,
        }];
    }
    let is_part = share.is_some() || matches!(reorder, Some(Reorder::RowsFrom(_)));
    let columns = match reorder {
        Some(Reorder::Columns(columns)) => Some(columns),
        _ => None,
    };
    let inside = |runs: &[Run], n: usize| {
        runs.iter()
            .all(|run| run.n > 0 && run.first + (run.n - 1) * run.step < n)
    };
    let all = |runs: &[Run]| runs.iter().map(|run| run.n).sum::<usize>();
    let n_lines_out = all(&runs);
    if !inside(&runs, n_lines)
        || (!is_part && n_lines_out != n_lines)
        || columns
            .as_ref()
            .is_some_and(|columns| !inside(columns, width) || all(columns) != width)
    {
        return refuse(format!(
            "{:?} is not of the shape that the configuration tells",
            first.shape
        ));
    }
    let mut head = 0;
    if pairs {
        let n_head = match part {
            "attn_k" => config.opt_u32(&["num_key_value_heads", "num_attention_heads"])?,
            _ => config.opt_u32(&["num_attention_heads"])?,
        };
        head = n_head
            .and_then(|n| height.checked_div(n as usize))
            .unwrap_or(0);
        if head == 0 || head % 2 != 0 || !height.is_multiple_of(head) {
            return refuse(format!(
                "{height} rows are not {} heads",
                n_head.unwrap_or(0)
            ));
        }
    }

    let (mut n_rows, mut laid) = (0, Vec::new());
    for (source, _) in pieces.values() {
        let mut piece = |order, n: usize| {
            laid.push(Piece {
                start: n_rows,
                source,
                row_bytes,
                order,
            });
            n_rows += n;
        };
        if pairs {
            piece(Order::Pairs(head), height);
            continue;
        }
        if transpose.is_none()
            && runs[..]
                == [Run {
                    first: 0,
                    n: height,
                    step: 1,
                }]
        {
            piece(Order::Rows { first: 0, step: 1 }, n_matrices * height);
            continue;
        }
        for row in (0..n_matrices).map(|i| i * height) {
            for &Run { first, n, step } in &runs {
                match transpose {
                    None => piece(
                        Order::Rows {
                            first: row + first,
                            step,
                        },
                        n,
                    ),
                    Some(Transpose::BeforeCut) => piece(
                        Order::Columns {
                            row,
                            n: height,
                            first,
                            step,
                        },
                        n,
                    ),
                    Some(Transpose::AfterCut) => {
                        piece(
                            Order::Columns {
                                row: row + first,
                                n,
                                first: 0,
                                step: 1,
                            },
                            width,
                        );
                    }
                }
            }
        }
    }
    // Tokens of pictures and sounds that have no row.
    let n_missing = match (family.arch, &name[..]) {
        ("gemma3n", "token_embd.weight" | "per_layer_token_embd.weight") => {
            n_vocab.saturating_sub(n_rows)
        }
        _ => 0,
    };
    if n_missing > 0 {
        laid.push(Piece {
            start: n_rows,
            source: first,
            row_bytes,
            order: Order::Zeros,
        });
        n_rows += n_missing;
    }
    let n = match transpose {
        None => width,
        Some(Transpose::BeforeCut) => height,
        Some(Transpose::AfterCut) => n_lines_out,
    };
    match transpose {
        _ if is_vector => shape.push(n),
        _ if by_value => shape.push(n_lines_out),
        Some(Transpose::AfterCut) => shape.extend([width, n]),
        _ => shape.extend([n_lines_out + n_missing, n]),
    }
    if stacked && (shape.len() == 2 || n_pieces > 1) && name.ends_with(".weight") {
        shape.insert(0, n_pieces);
    }
    if shape.len() > 4 || n_rows * n != shape.iter().product::<usize>() {
        return refuse(format!(
            "{n_pieces} tensors of shape {:?} are not one",
            first.shape
        ));
    }
    let is_norm = name.ends_with("norm.weight");
    let map = (family.map)(&name);
    let factors = (family.factors)(config, &name)?;
    let to = if shape.len() == 1
        || is_norm
        || !name.ends_with(".weight")
        || is_small(&name) && family.arch != "dbrx"
    {
        DType::F32
    } else if first.dtype == DType::MXFP4 {
        DType::MXFP4
    } else if !n.is_multiple_of(outtype.block().0 as usize) {
        DType::F16
    } else {
        outtype
    };
    let dims = shape.iter().rev().map(|&n| n as u64).collect();
    Ok(Tensor {
        name,
        dims,
        from: first.dtype,
        to,
        map,
        factors,
        pieces: laid,
        n_rows,
        columns,
    })
}

/// The name of a tensor without its layer and end: `attn_q`, `ssm_a`.
fn part_of(name: &str) -> &str {
    let name = name
        .strip_suffix(".weight")
        .or(name.strip_suffix(".bias"))
        .unwrap_or(name);
    let mut parts = name.splitn(3, '.');
    match (parts.next(), parts.next(), parts.next()) {
        (Some("blk"), Some(_), Some(part)) => part,
        _ => name,
    }
}

/// Matrices that stay F32: routers, convolutions, and the small ones of RWKV.
fn is_small(name: &str) -> bool {
    const SMALL: &[&str] = &[
        ".ffn_gate_inp.",
        ".ffn_gate_inp_shexp.",
        ".ssm_conv1d.",
        ".ssm_conv1d_",
        ".time_mix_lerp_",
        ".time_mix_first.",
        ".time_mix_decay_w",
        ".time_mix_w1.",
        ".time_mix_w2.",
        ".shortconv.conv.",
        ".altup_correct_coef.",
        ".altup_predict_coef.",
        "position_embd.",
        "token_types.",
    ];
    SMALL.iter().any(|part| name.contains(part))
}
