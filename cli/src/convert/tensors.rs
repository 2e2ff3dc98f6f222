//! From the tensors of a checkpoint to those of a GGUF file: names, shapes, types, and which row comes from where.

use super::checkpoint::{QUANTISED, Source};
use super::config::Config;
use super::family::{Family, Map, NAMES};
use super::{Failure, note};
use ruvllm::quant::DType;
use std::collections::BTreeMap;

/// A tensor of the GGUF file.
pub(super) struct Tensor<'a> {
    pub(super) name: String,
    /// Row length first.
    pub(super) dims: Vec<u64>,
    pub(super) from: DType,
    pub(super) to: DType,
    pub(super) map: Option<Map>,
    /// The pieces whose rows follow one another: the tensor, or each expert's.
    pieces: Vec<Piece<'a>>,
    n_rows: usize,
}

/// Some of the rows of a tensor in the checkpoint.
struct Piece<'a> {
    /// Its first row in the GGUF file.
    start: usize,
    data: &'a [u8],
    row_bytes: usize,
    order: Order,
}

#[derive(Clone, Copy)]
enum Order {
    /// From this row on.
    From(usize),
    /// In each group of so many rows (a head), row `i` of the first half, then row `i` of the second.
    Pairs(usize),
}

impl<'a> Tensor<'a> {
    pub(super) fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// The bytes of row `i`.
    pub(super) fn row(&self, i: usize) -> &'a [u8] {
        let piece = &self.pieces[self.pieces.partition_point(|piece| piece.start <= i) - 1];
        let i = i - piece.start;
        let i = match piece.order {
            Order::From(first) => first + i,
            Order::Pairs(head) => {
                let in_head = i % head;
                i - in_head + in_head % 2 * (head / 2) + in_head / 2
            }
        };
        &piece.data[i * piece.row_bytes..(i + 1) * piece.row_bytes]
    }
}

/// A module's name: its layer, its path with `*` for the number of an expert, that number, and its end.
struct Name<'n> {
    layer: Option<u32>,
    path: String,
    expert: Option<u32>,
    /// `.weight`, `.bias` or nothing.
    end: &'n str,
}

/// Parts of models that also see and hear.
const OTHER_PARTS: &[&str] =
    &["vision_", "visual.", "vision.", "audio_", "audio.", "projector.", "image_newline", "patch_embed"];
/// Buffers that older checkpoints have beside their weights.
const BUFFERS: &[&str] = &[".rotary_emb.inv_freq", ".attention.masked_bias", ".attention.bias"];

fn parse(name: &str) -> Name<'_> {
    let (stem, end) = match (name.strip_suffix(".weight"), name.strip_suffix(".bias")) {
        (Some(stem), _) => (stem, ".weight"),
        (_, Some(stem)) => (stem, ".bias"),
        _ => (name, ""),
    };
    let (mut layer, mut expert) = (None, None);
    let mut path = Vec::new();
    for part in stem.split('.') {
        match part.parse::<u32>() {
            Ok(number) if layer.is_none() && path.last() == Some(&"layers") => {
                layer = Some(number);
                path.clear();
            }
            Ok(number) if layer.is_some() && expert.is_none() => {
                expert = Some(number);
                path.push("*");
            }
            _ if layer.is_none() && matches!(part, "model" | "language_model" | "backbone") => {}
            _ => path.push(part),
        }
    }
    Name { layer, path: path.join("."), expert, end }
}

/// Lays out all tensors. `n_vocab` tokens have a row in the embedding; `outtype` is the type of matrices.
pub(super) fn plan<'a>(
    family: &Family,
    config: &Config,
    sources: &[Source<'a>],
    n_layer: u32,
    n_vocab: usize,
    outtype: DType,
) -> Result<Vec<Tensor<'a>>, Failure> {
    // Pieces by the number of the expert, in the order of the checkpoint.
    let (mut order, mut n_left_out) = (Vec::new(), 0);
    let mut parts: BTreeMap<String, BTreeMap<u32, (&Source<'a>, Half)>> = BTreeMap::new();
    for source in sources {
        let skipped = |list: &[&str]| list.iter().any(|part| source.name.contains(part));
        let name = parse(&source.name);
        if skipped(OTHER_PARTS) || skipped(BUFFERS) || is_left_out(family, &source.name) {
            n_left_out += 1;
            continue;
        }
        let known = family.names.iter().chain(NAMES).find(|(from, _)| *from == name.path);
        let Some((_, to)) = known.filter(|_| name.layer.is_none_or(|layer| layer < n_layer)) else {
            return Err(config.refuse(unknown(family, &source.name)));
        };
        let halves = match to.split_once(" + ") {
            None => vec![(*to, Half::Both)],
            Some((first, second)) => vec![(first, Half::First), (second, Half::Second)],
        };
        for (to, half) in halves {
            let mut full = format!("{to}{}", name.end);
            if let Some(layer) = name.layer {
                full = format!("blk.{layer}.{full}");
            }
            if !parts.contains_key(&full) {
                order.push(full.clone());
            }
            let pieces = parts.entry(full).or_default();
            if let Some((twin, _)) = pieces.insert(name.expert.unwrap_or(0), (source, half)) {
                return Err(config.refuse(format_args!("{} and {} are the same tensor", twin.name, source.name)));
            }
        }
    }
    if n_left_out > 0 {
        note(format!("{n_left_out} tensors are left out: other parts of the model, or buffers"));
    }
    let tensor = |name: String| {
        let pieces = parts.remove(&name).unwrap_or_default();
        stack(family, config, name, pieces, n_vocab, outtype)
    };
    order.into_iter().map(tensor).collect()
}

/// Whether a tensor is one of [`Family::skips`].
fn is_left_out(family: &Family, name: &str) -> bool {
    let name = name.trim_start_matches("model.").trim_start_matches("language_model.");
    family.skips.iter().any(|start| name.starts_with(start))
}

/// What part of a tensor's rows.
#[derive(Clone, Copy, PartialEq)]
enum Half {
    Both,
    First,
    Second,
}

fn unknown(family: &Family, name: &str) -> String {
    let packed =
        [".qweight", ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".weight_packed", "_blocks"];
    match packed.iter().any(|end| name.ends_with(end)) {
        true => format!("tensor {name} belongs to quantised weights: {QUANTISED}"),
        false => format!("tensor {name} is none of {}'s", family.arch),
    }
}

/// One tensor from its pieces by the number of the expert.
fn stack<'a>(
    family: &Family,
    config: &Config,
    name: String,
    pieces: BTreeMap<u32, (&Source<'a>, Half)>,
    n_vocab: usize,
    outtype: DType,
) -> Result<Tensor<'a>, Failure> {
    let refuse = |what: String| Err(config.refuse(format_args!("{name}: {what}")));
    let stacked = name.contains("_exps");
    let Some((&last, &(first, half))) = pieces.last_key_value() else { unreachable!("a name has a piece") };
    let n_pieces = pieces.len();
    if last as usize + 1 != n_pieces {
        return refuse(format!("there are {n_pieces} experts, and one has number {last}"));
    }
    if let Some((other, _)) =
        pieces.values().find(|(piece, _)| (&piece.shape, piece.dtype) != (&first.shape, first.dtype))
    {
        let (a, b) = (&first.shape, &other.shape);
        return refuse(format!("its experts have the shapes {a:?} and {b:?}, or different types"));
    }
    let mut shape = if first.shape.is_empty() { vec![1] } else { first.shape.clone() };
    // A convolution by channels has one input.
    if let [channels, 1, taps] = shape[..] {
        shape = vec![channels, taps];
    }
    let pairs = family.pairs && (name.contains(".attn_q.") || name.contains(".attn_k."));
    // A bias has a value for each row of its matrix.
    let n = if pairs && shape.len() == 1 { 1 } else { first.n() };
    let row_bytes = n * first.data.len() / shape.iter().product::<usize>();
    let mut rows = first.data.len() / row_bytes;
    if name == "token_embd.weight" && shape[0] > n_vocab && family.arch == "gemma3" {
        // Rows that no token has.
        (shape[0], rows) = (n_vocab, n_vocab);
    }
    // Rows of a tensor that is cut, by expert where the checkpoint has stacked them.
    let mut ranges = Vec::new();
    if half != Half::Both {
        let Some(cut) = shape.iter_mut().rev().nth(1) else { return refuse("it is a vector".into()) };
        let of_expert = *cut;
        let parts = (family.cut)(config, of_expert)?;
        let part = &parts[usize::from(half == Half::Second)];
        *cut = part.iter().map(|(_, n)| n).sum();
        let experts = (0..rows / of_expert).map(|expert| expert * of_expert);
        ranges = experts.flat_map(|at| part.iter().map(move |&(first, n)| (at + first, n))).collect();
    }
    let mut head = 0;
    if pairs {
        let n_head = match name.contains(".attn_k.") {
            true => config.opt_u32(&["num_key_value_heads", "num_attention_heads"])?,
            false => config.opt_u32(&["num_attention_heads"])?,
        };
        head = n_head.and_then(|n| rows.checked_div(n as usize)).unwrap_or(0);
        if head == 0 || head % 2 != 0 || !rows.is_multiple_of(head) {
            return refuse(format!("{rows} rows are not {} heads", n_head.unwrap_or(0)));
        }
    }
    let (mut n_rows, mut laid) = (0, Vec::new());
    for (source, _) in pieces.values() {
        let mut piece = |order, n: usize| {
            laid.push(Piece { start: n_rows, data: source.data, row_bytes, order });
            n_rows += n;
        };
        match half {
            Half::Both if pairs => piece(Order::Pairs(head), rows),
            Half::Both => piece(Order::From(0), rows),
            _ => ranges.iter().for_each(|&(first, n)| piece(Order::From(first), n)),
        }
    }
    if stacked && shape.len() == 2 {
        shape.insert(0, n_pieces);
    }
    if shape.len() > 4 || n_rows * n != shape.iter().product::<usize>() {
        return refuse(format!("{n_pieces} tensors of shape {:?} are not one", first.shape));
    }
    let is_norm = name.ends_with("norm.weight");
    let map = (family.map)(&name);
    let to = if shape.len() == 1 || is_norm || !name.ends_with(".weight") || is_small(&name) {
        DType::F32
    } else if !n.is_multiple_of(outtype.block().0 as usize) {
        DType::F16
    } else {
        outtype
    };
    let dims = shape.iter().rev().map(|&n| n as u64).collect();
    Ok(Tensor { name, dims, from: first.dtype, to, map, pieces: laid, n_rows })
}

/// Matrices that stay F32: routers and convolutions.
fn is_small(name: &str) -> bool {
    const SMALL: &[&str] = &[
        ".ffn_gate_inp.",
        ".ffn_gate_inp_shexp.",
        ".ssm_conv1d.",
        ".shortconv.conv.",
        "position_embd.",
        "token_types.",
    ];
    SMALL.iter().any(|part| name.contains(part))
}
