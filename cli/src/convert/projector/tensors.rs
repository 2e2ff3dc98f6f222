//! A projector's tensors from those of a checkpoint.

use super::kinds::{Change, Kind, Name};
use super::settings::Settings;
use crate::convert::checkpoint::Source;
use crate::io::Failure;
use ruvllm::quant::DType;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// What names of parts that read images begin with; those of a model begin otherwise.
const PARTS: &[&str] = &[
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "connector.",
    "embed_vision.",
    "merger.",
    "image_newline",
];
const DEEPSTACK: &str = "visual.deepstack_merger_list.";

/// A tensor of a projector's file.
pub(super) struct Tensor<'a> {
    pub(super) name: String,
    /// Row length first.
    pub(super) dims: Vec<u64>,
    pub(super) to: DType,
    pub(super) source: &'a Source<'a>,
    /// Values of a row as it is read, which is all that one index of the outermost dimension has.
    width: usize,
    /// Rows, in their order; of a vector, one.
    rows: Rows,
    /// The values of a row that are taken, if not all.
    columns: Option<Vec<usize>>,
    pub(super) plus_one: bool,
}

/// Which rows are taken.
#[derive(Clone, Copy)]
enum Rows {
    /// So many from one on.
    From(usize, usize),
    /// All of so many: in each head of so many, row `i` of the first half, then row `i` of the second.
    Pairs(usize, usize),
}

impl<'a> Tensor<'a> {
    /// Values of a row in the file.
    pub(super) fn n(&self) -> usize {
        self.columns.as_ref().map_or(self.width, Vec::len)
    }

    pub(super) fn n_rows(&self) -> usize {
        let (Rows::From(_, n) | Rows::Pairs(_, n)) = self.rows;
        n
    }

    /// The bytes of row `i`.
    pub(super) fn row(&self, i: usize) -> Cow<'a, [u8]> {
        let i = match self.rows {
            Rows::From(first, _) => first + i,
            Rows::Pairs(head, _) => {
                let in_head = i % head;
                i - in_head + in_head % 2 * (head / 2) + in_head / 2
            }
        };
        let row = self.source.row(i, self.width);
        let Some(columns) = &self.columns else {
            return row;
        };
        let size = self.source.dtype.block().1 as usize;
        let value = |&i: &usize| &row[i * size..][..size];
        Cow::Owned(columns.iter().flat_map(value).copied().collect())
    }
}

/// A name without what is around the parts, and its end.
fn parse(name: &str) -> (String, &str) {
    let own = name.strip_prefix("model.").unwrap_or(name);
    let own = own.replacen("vision_tower.vision_model.", "vision_tower.", 1);
    let own = own.replacen("language_model.model.", "language_model.", 1);
    let ends = [".weight", ".bias"];
    let end = ends
        .into_iter()
        .find(|end| own.ends_with(end))
        .unwrap_or("");
    let stem = &own[..own.len() - end.len()];
    // Some matrices have a module around them.
    (stem.strip_suffix(".linear").unwrap_or(stem).to_owned(), end)
}

/// Whether a tensor is no part of a projector: the model's, a buffer's, or one that the kind skips.
pub(super) fn is_left_out(kind: &Kind, n_layer: u32, name: &str) -> bool {
    let (stem, end) = parse(name);
    let full = format!("{stem}{end}");
    let is_part = PARTS.iter().any(|part| full.starts_with(part));
    let is_named = kind.names.iter().any(|(from, ..)| *from == stem);
    let is_skipped = kind.skips.iter().any(|skip| full.starts_with(skip))
        || full.ends_with("position_ids")
        || full.ends_with("inv_freq")
        || layer(kind, &stem).is_some_and(|(layer, _)| layer >= n_layer);
    !(is_part || is_named) || is_skipped
}

/// The number of a layer, and the module in it.
fn layer<'n>(kind: &Kind, stem: &'n str) -> Option<(u32, &'n str)> {
    let (number, module) = stem.strip_prefix(kind.layers.0)?.split_once('.')?;
    Some((number.parse().ok()?, module))
}

/// What a module is called in the file, before its end.
fn look_up(kind: &Kind, of: &Settings, stem: &str) -> Result<Option<(String, Name)>, Failure> {
    let find = |names: &[Name], stem: &str| names.iter().copied().find(|(from, ..)| *from == stem);
    if let Some((layer, module)) = layer(kind, stem) {
        let name = find(kind.layers.1, module);
        return Ok(name.map(|name| (format!("v.blk.{layer}."), name)));
    }
    if let Some((number, module)) = stem.strip_prefix(DEEPSTACK).and_then(|n| n.split_once('.')) {
        let layers = of.deepstack()?;
        let number = number.parse().ok();
        let layer = number.and_then(|i: usize| layers.get(i).copied());
        let name = find(kind.names, &format!("visual.deepstack.{module}"));
        return Ok(layer
            .zip(name)
            .map(|(layer, name)| (format!("v.deepstack.{layer}."), name)));
    }
    Ok(find(kind.names, stem).map(|name| (String::new(), name)))
}

/// Lays out all tensors. `base` is the type of matrices.
pub(super) fn plan<'a>(
    kind: &Kind,
    of: &Settings,
    sources: &'a [Source<'a>],
    base: DType,
) -> Result<Vec<Tensor<'a>>, Failure> {
    let mut tensors: Vec<Tensor<'a>> = Vec::new();
    for source in sources {
        let (stem, end) = parse(&source.name);
        let Some((before, (_, to, change))) = look_up(kind, of, &stem)? else {
            let (name, kind) = (&source.name, kind.name);
            return Err(of.refuse(format_args!("tensor {name} is none of {kind}'s")));
        };
        let names: Vec<String> = to
            .split(" + ")
            .map(|to| match to.strip_suffix('!') {
                Some(whole) => format!("{before}{whole}"),
                None => format!("{before}{to}{end}"),
            })
            .collect();
        for tensor in pieces(of, source, names, change)? {
            if tensors.iter().any(|other| other.name == tensor.name) {
                let name = &source.name;
                return Err(of.refuse(format_args!("{name} and another are the same tensor")));
            }
            tensors.push(tensor);
        }
    }
    check_layers(of, &tensors)?;
    for tensor in &mut tensors {
        tensor.to = dtype(kind, tensor, base);
    }
    Ok(tensors)
}

/// A tensor of a checkpoint that becomes one or several.
struct Cut<'s, 'a> {
    of: &'s Settings,
    source: &'a Source<'a>,
    plus_one: bool,
}

impl<'a> Cut<'_, 'a> {
    fn refuse(&self, what: &str) -> Failure {
        let Source { name, shape, .. } = self.source;
        self.of
            .refuse(format_args!("tensor {name} of shape {shape:?} is {what}"))
    }

    fn is_vector(&self) -> bool {
        self.source.shape.len() < 2
    }

    /// A tensor of some rows, and of some of their columns.
    fn piece(
        &self,
        name: &str,
        shape: &[usize],
        rows: Rows,
        columns: Option<Vec<usize>>,
    ) -> Tensor<'a> {
        let width = match &self.source.shape[..] {
            [] | [_] => self.source.shape.iter().product(),
            [_, of_row @ ..] => of_row.iter().product(),
        };
        Tensor {
            name: name.to_owned(),
            dims: shape.iter().rev().map(|&n| n as u64).collect(),
            to: DType::F32,
            source: self.source,
            width,
            rows,
            columns,
            plus_one: self.plus_one,
        }
    }

    fn whole(&self, name: &str) -> Tensor<'a> {
        let shape = &self.source.shape[..];
        let n_rows = if self.is_vector() { 1 } else { shape[0] };
        self.piece(name, shape, Rows::From(0, n_rows), None)
    }

    /// As many parts of equal size as there are names.
    fn parts(&self, names: &[String]) -> Result<Vec<Tensor<'a>>, Failure> {
        let shape = &self.source.shape[..];
        let n = shape.first().copied().unwrap_or(0);
        if n == 0 || n % names.len() != 0 {
            return Err(self.refuse("not a whole number of parts"));
        }
        let n = n / names.len();
        let part = |(i, name): (usize, &String)| match self.is_vector() {
            true => {
                let columns = (i * n..(i + 1) * n).collect();
                self.piece(name, &[n], Rows::From(0, 1), Some(columns))
            }
            false => {
                let of_part = [&[n][..], &shape[1..]].concat();
                self.piece(name, &of_part, Rows::From(i * n, n), None)
            }
        };
        Ok(names.iter().enumerate().map(part).collect())
    }

    /// A convolution over two frames, as one of each.
    fn frames(&self, name: &str) -> Result<Vec<Tensor<'a>>, Failure> {
        let &[n_out, colours, 2, height, width] = &self.source.shape[..] else {
            return Err(self.refuse("not a convolution over two frames"));
        };
        let n = height * width;
        let columns = |frame: usize| {
            let of_colour = |colour: usize| (0..n).map(move |i| (colour * 2 + frame) * n + i);
            Some((0..colours).flat_map(of_colour).collect())
        };
        let shape = [n_out, colours, height, width];
        let rows = Rows::From(0, n_out);
        Ok(vec![
            self.piece(name, &shape, rows, columns(0)),
            self.piece(&format!("{name}.1"), &shape, rows, columns(1)),
        ])
    }

    /// A matrix on patches whose colours are neighbours, as a convolution.
    fn patches(&self, name: &str) -> Result<Tensor<'a>, Failure> {
        let &[n_out, width] = &self.source.shape[..] else {
            // Some checkpoints have a convolution.
            return Ok(self.whole(name));
        };
        let side = (width / 3).isqrt();
        if side * side * 3 != width {
            return Err(self.refuse("not of square patches of three colours"));
        }
        let of_colour = |colour: usize| (0..side * side).map(move |i| 3 * i + colour);
        let columns = (0..3).flat_map(of_colour).collect();
        let shape = [n_out, 3, side, side];
        Ok(self.piece(name, &shape, Rows::From(0, n_out), Some(columns)))
    }

    /// Heads whose rotated pairs become neighbours.
    fn pairs(&self, name: &str) -> Result<Tensor<'a>, Failure> {
        let shape = &self.source.shape[..];
        let n = shape.first().copied().unwrap_or(0);
        let head = n.checked_div(self.of.n_head()? as usize).unwrap_or(0);
        if head == 0 || head % 2 != 0 || n % head != 0 {
            return Err(self.refuse("not that of heads"));
        }
        if !self.is_vector() {
            return Ok(self.piece(name, shape, Rows::Pairs(head, n), None));
        }
        let at = |i: usize| i - i % head + i % head % 2 * (head / 2) + i % head / 2;
        let columns = Some((0..n).map(at).collect());
        Ok(self.piece(name, shape, Rows::From(0, 1), columns))
    }

    /// The row of a token.
    fn token(&self, name: &str, text: &str) -> Result<Tensor<'a>, Failure> {
        let (token, shape) = (self.of.token(text)?, &self.source.shape[..]);
        if self.is_vector() || token >= shape[0] {
            return Err(self.refuse(&format!("without a row for {text}")));
        }
        Ok(self.piece(name, &shape[1..], Rows::From(token, 1), None))
    }
}

/// What a tensor of the checkpoint becomes.
fn pieces<'a>(
    of: &Settings,
    source: &'a Source<'a>,
    names: Vec<String>,
    change: Change,
) -> Result<Vec<Tensor<'a>>, Failure> {
    let cut = Cut {
        of,
        source,
        plus_one: change == Change::PlusOne,
    };
    let is_whole = names.len() == 1 && matches!(change, Change::Same | Change::PlusOne);
    if source.plain().is_none() && !(is_whole && source.shape.len() == 2) {
        return Err(cut.refuse("quantised, and has to be cut"));
    }
    let name = &names[0][..];
    match change {
        Change::Same | Change::PlusOne if is_whole => Ok(vec![cut.whole(name)]),
        Change::Same | Change::PlusOne => cut.parts(&names),
        // The bias is of both frames.
        Change::Frames | Change::Patches if cut.is_vector() => Ok(vec![cut.whole(name)]),
        Change::Frames => cut.frames(name),
        Change::Patches => Ok(vec![cut.patches(name)?]),
        Change::Pairs => Ok(vec![cut.pairs(name)?]),
        Change::Token(text) => Ok(vec![cut.token(name, text)?]),
    }
}

/// Refuses a checkpoint without an encoder, and one in which layers lack what others have.
fn check_layers(of: &Settings, tensors: &[Tensor<'_>]) -> Result<(), Failure> {
    let mut layers = BTreeMap::<usize, BTreeSet<&str>>::new();
    for tensor in tensors {
        let of_layer = tensor.name.strip_prefix("v.blk.");
        let Some((i, part)) = of_layer.and_then(|name| name.split_once('.')) else {
            continue;
        };
        if let Ok(i) = i.parse() {
            layers.entry(i).or_default().insert(part);
        }
    }
    let n_layer = of.n_layer()? as usize;
    let all: BTreeSet<&str> = layers.values().flatten().copied().collect();
    for i in 0..n_layer {
        let found = layers.get(&i);
        let absent = all
            .iter()
            .find(|part| !found.is_some_and(|found| found.contains(*part)));
        if let Some(part) = absent.or_else(|| all.is_empty().then_some(&"*")) {
            return Err(of.refuse(format_args!(
                "the checkpoint has no v.blk.{i}.{part}, so the encoder is not whole: a file of it is missing, or the model reads no images"
            )));
        }
    }
    Ok(())
}

/// The type of a tensor in the file.
fn dtype(kind: &Kind, tensor: &Tensor<'_>, base: DType) -> DType {
    let name = &tensor.name[..];
    let is_wide = base != DType::F16 || kind.wide_patches;
    let is_embedding = name.contains("_embd.") && !name.contains("patch_embd");
    if tensor.dims.len() == 1 || is_embedding || name == "v.class_embd" {
        DType::F32
    } else if name.contains("patch_embd.weight") || name.contains("patch_merger.weight") {
        if is_wide { DType::F32 } else { DType::F16 }
    } else if name == "mm.input_projection.weight" && kind.name == "gemma3" {
        // Readers multiply by its transpose, for which they have no kernels of blocks.
        DType::F16
    } else if !tensor.n().is_multiple_of(base.block().0 as usize) {
        DType::F16
    } else {
        base
    }
}
