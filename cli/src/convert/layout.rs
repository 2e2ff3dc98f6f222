//! A tensor of a GGUF file from those of a checkpoint: shape, type, and which row comes from where.

use super::checkpoint::{Data, Source};
use super::config::Config;
use super::family::{Factor, Family, Map, Reorder, Run, Transpose};
use crate::io::Failure;
use ruvllm::quant::DType;
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
    pieces: Vec<TokenText<'a>>,
    n_rows: usize,
    /// The order of the values of a row, if it changes.
    columns: Option<Vec<Run>>,
}

/// Some of the rows of a tensor in the checkpoint.
struct TokenText<'a> {
    /// Its first row in the GGUF file.
    start: usize,
    source: &'a Source<'a>,
    /// Values of a row.
    width: usize,
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

    /// Whether its values are those of packed codes that no blocks hold, so that a quantised type
    /// is a second rounding.
    pub(super) fn is_repacked(&self) -> bool {
        let is_packed = |piece: &TokenText<'_>| matches!(piece.source.data, Data::Packed(_));
        let rounds = self.from != self.to || self.is_changed();
        rounds && self.to.block().0 > 1 && self.pieces.iter().any(is_packed)
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

impl<'a> TokenText<'a> {
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
                let at = |j: usize| ((row + j) * self.width + first + i * step) * size;
                // `Stack::new` refuses to transpose others.
                let data = self.source.plain().unwrap_or_default();
                return Cow::Owned(
                    (0..n)
                        .flat_map(|j| &data[at(j)..at(j) + size])
                        .copied()
                        .collect(),
                );
            }
            Order::Zeros => {
                return Cow::Owned(vec![0; self.width * self.source.dtype.block().1 as usize]);
            }
        };
        self.source.row(i, self.width)
    }
}

/// The types of matrices.
#[derive(Clone, Copy)]
pub(super) struct OutTypes {
    pub(super) base: DType,
    /// Whether quantised matrices keep their values: in the blocks that hold them, or, if none do,
    /// in Q8_0.
    pub(super) keeps_quantised: bool,
}

/// Tensors of a checkpoint by the number of the expert, each with the share of its rows that is
/// meant, if it is cut.
pub(super) type Pieces<'a> = BTreeMap<u32, (&'a Source<'a>, Option<usize>)>;

/// One tensor from its pieces.
pub(super) fn stack<'a>(
    family: &Family,
    config: &Config,
    name: String,
    pieces: &Pieces<'a>,
    n_vocab: usize,
    types: OutTypes,
) -> Result<Tensor<'a>, Failure> {
    let stack = Stack::new(family, config, &name, pieces)?;
    let shape = stack.shape(n_vocab)?;
    let reorder = (family.reorder)(config, stack.part)?;
    let m = stack.matrices(shape, reorder.as_ref())?;
    let lines = stack.lines(&m, reorder)?;
    let head = stack.head(m.height)?;
    let (mut laid, mut n_rows) = stack.pieces(pieces, &m, &lines, head);
    // Tokens of pictures and sounds that have no row.
    let n_missing = match (family.arch, &name[..]) {
        ("gemma3n", "token_embd.weight" | "per_layer_token_embd.weight") => {
            n_vocab.saturating_sub(n_rows)
        }
        _ => 0,
    };
    if n_missing > 0 {
        laid.push(TokenText {
            start: n_rows,
            source: stack.first,
            width: m.width,
            order: Order::Zeros,
        });
        n_rows += n_missing;
    }
    let n = match stack.transpose {
        None => m.width,
        Some(Transpose::BeforeCut) => m.height,
        Some(Transpose::AfterCut) => lines.n_out,
    };
    let shape = stack.shape_out(&m, lines.n_out, n_missing, n);
    if shape.len() > 4 || n_rows * n != shape.iter().product::<usize>() {
        return Err(stack.refuse(format_args!(
            "{} tensors of shape {:?} are not one",
            stack.n_pieces, stack.first.shape
        )));
    }
    let to = stack.dtype(&shape, n, types);
    Ok(Tensor {
        dims: shape.iter().rev().map(|&n| n as u64).collect(),
        from: stack.first.dtype,
        to,
        map: (family.map)(&name),
        factors: (family.factors)(config, &name)?,
        pieces: laid,
        n_rows,
        columns: lines.columns,
        name,
    })
}

/// A tensor at work.
struct Stack<'s, 'a> {
    family: &'s Family,
    config: &'s Config,
    name: &'s str,
    part: &'s str,
    /// One of the pieces, which all have its shape and type.
    first: &'a Source<'a>,
    /// Which share of its rows is meant, if it is cut.
    share: Option<usize>,
    n_pieces: usize,
    /// Whether the pieces have a dimension of their own.
    stacked: bool,
    /// Whether the halves of each head's rows are interleaved.
    pairs: bool,
    transpose: Option<Transpose>,
}

/// The pieces as matrices, of which each can hold several.
struct Matrices {
    width: usize,
    height: usize,
    /// Their dimensions, and their number.
    outer: Vec<usize>,
    n: usize,
    /// Whether a row is one value: a bias has one for each row of its matrix.
    by_value: bool,
    is_vector: bool,
}

/// The rows of a matrix that are taken, or its columns, if they become rows.
struct Lines {
    runs: Vec<Run>,
    n_out: usize,
    /// The order of the values of a row, if it changes.
    columns: Option<Vec<Run>>,
}

impl<'s, 'a> Stack<'s, 'a> {
    fn new(
        family: &'s Family,
        config: &'s Config,
        name: &'s str,
        pieces: &Pieces<'a>,
    ) -> Result<Stack<'s, 'a>, Failure> {
        let Some((&last, &(first, share))) = pieces.last_key_value() else {
            unreachable!("a name has a piece")
        };
        let part = part_of(name);
        let stack = Stack {
            family,
            config,
            name,
            part,
            first,
            share,
            n_pieces: pieces.len(),
            stacked: name.contains("_exps")
                || name.starts_with("altup_")
                || name.contains("_lerp_fused"),
            pairs: family.pairs && matches!(part, "attn_q" | "attn_k"),
            transpose: (family.transpose)(part)
                .filter(|_| first.dtype != DType::MXFP4 && name.ends_with(".weight")),
        };
        let n_pieces = stack.n_pieces;
        if last as usize + 1 != n_pieces {
            return Err(stack.refuse(format_args!(
                "there are {n_pieces} experts, and one has number {last}"
            )));
        }
        if let Some((other, _)) = pieces
            .values()
            .find(|(piece, _)| (&piece.shape, piece.dtype) != (&first.shape, first.dtype))
        {
            let (a, b) = (&first.shape, &other.shape);
            return Err(stack.refuse(format_args!(
                "its experts have the shapes {a:?} and {b:?}, or different types"
            )));
        }
        if first.plain().is_none() && stack.transpose.is_some() {
            return Err(stack.refuse("a quantised matrix that has to be transposed"));
        }
        Ok(stack)
    }

    fn refuse(&self, what: impl std::fmt::Display) -> Failure {
        self.config.refuse(format_args!("{}: {what}", self.name))
    }

    /// The shape of a piece, as the family sees it.
    fn shape(&self, n_vocab: usize) -> Result<Vec<usize>, Failure> {
        let mut shape = if self.first.shape.is_empty() {
            vec![1]
        } else {
            self.first.shape.clone()
        };
        // A convolution by channels has one input.
        if let [channels, 1, taps] = shape[..] {
            shape = vec![channels, taps];
        }
        let n_values: usize = shape.iter().product();
        (self.family.reshape)(self.config, self.part, &mut shape)?;
        if shape.iter().product::<usize>() != n_values {
            return Err(self.refuse(format_args!(
                "{:?} is not of the shape that the configuration tells, {shape:?}",
                self.first.shape
            )));
        }
        if self.name == "token_embd.weight"
            && shape[0] > n_vocab
            && matches!(self.family.arch, "gemma3" | "gemma4" | "gemma-embedding")
        {
            // Rows that no token has.
            shape[0] = n_vocab;
        }
        Ok(shape)
    }

    /// One matrix or several, such as those of experts.
    fn matrices(
        &self,
        mut shape: Vec<usize>,
        reorder: Option<&Reorder>,
    ) -> Result<Matrices, Failure> {
        let by_value = match shape.len() {
            1 => self.pairs || matches!(reorder, Some(Reorder::Rows(_))),
            _ => self.share.is_some() && !self.name.ends_with(".weight"),
        };
        let is_vector = shape.len() == 1 && !by_value;
        let is_mxfp4 = self.first.dtype == DType::MXFP4;
        if is_mxfp4 && (!self.stacked || !self.name.ends_with(".weight")) {
            return Err(self.refuse("only experts are MXFP4"));
        }
        let width = if by_value {
            1
        } else {
            shape.pop().unwrap_or(1)
        };
        if self.first.plain().is_none() && width != self.first.n() {
            return Err(self.refuse("a quantised matrix whose rows have to be cut"));
        }
        Ok(Matrices {
            width,
            height: shape.pop().unwrap_or(1),
            n: shape.iter().product(),
            outer: shape,
            by_value,
            is_vector,
        })
    }

    /// Rows, or columns that become rows, and their order.
    fn lines(&self, m: &Matrices, reorder: Option<Reorder>) -> Result<Lines, Failure> {
        let n = if self.transpose == Some(Transpose::BeforeCut) {
            m.width
        } else {
            m.height
        };
        let from = |first: usize| {
            vec![Run {
                first,
                n: n.saturating_sub(first),
                step: 1,
            }]
        };
        let is_part = self.share.is_some() || matches!(reorder, Some(Reorder::RowsFrom(_)));
        let (mut runs, mut columns) = (from(0), None);
        match reorder {
            Some(Reorder::Columns(order)) => columns = Some(order),
            Some(Reorder::Rows(order)) => runs = order,
            Some(Reorder::RowsFrom(first)) => runs = from(first),
            None => {}
        }
        if let Some(i) = self.share {
            if m.is_vector {
                return Err(self.refuse("it is a vector"));
            }
            let shares = (self.family.cut)(self.config, n)?;
            runs = shares.into_iter().nth(i).unwrap_or_default();
        }
        let inside = |runs: &[Run], n: usize| {
            runs.iter()
                .all(|run| run.n > 0 && run.first + (run.n - 1) * run.step < n)
        };
        let all = |runs: &[Run]| runs.iter().map(|run| run.n).sum::<usize>();
        let n_out = all(&runs);
        let is_whole = |columns: &Vec<Run>| inside(columns, m.width) && all(columns) == m.width;
        if columns.is_some() && self.first.dtype.block().0 > 1 {
            return Err(self.refuse("a quantised matrix whose columns have to be sorted"));
        }
        if !inside(&runs, n) || (!is_part && n_out != n) || !columns.as_ref().is_none_or(is_whole) {
            return Err(self.refuse(format_args!(
                "{:?} is not of the shape that the configuration tells",
                self.first.shape
            )));
        }
        Ok(Lines {
            runs,
            n_out,
            columns,
        })
    }

    /// Rows of a head, of which the halves are interleaved; 0 if none are.
    fn head(&self, height: usize) -> Result<usize, Failure> {
        if !self.pairs {
            return Ok(0);
        }
        let n_head = match self.part {
            "attn_k" => self
                .config
                .opt_u32(&["num_key_value_heads", "num_attention_heads"])?,
            _ => self.config.opt_u32(&["num_attention_heads"])?,
        };
        let head = n_head.and_then(|n| height.checked_div(n as usize));
        let head = head.unwrap_or(0);
        if head == 0 || head % 2 != 0 || !height.is_multiple_of(head) {
            return Err(self.refuse(format_args!(
                "{height} rows are not {} heads",
                n_head.unwrap_or(0)
            )));
        }
        Ok(head)
    }

    /// The pieces in the order of their rows, and the number of these.
    fn pieces(
        &self,
        pieces: &Pieces<'a>,
        m: &Matrices,
        lines: &Lines,
        head: usize,
    ) -> (Vec<TokenText<'a>>, usize) {
        let whole = [Run {
            first: 0,
            n: m.height,
            step: 1,
        }];
        let (mut n_rows, mut laid) = (0, Vec::new());
        for (source, _) in pieces.values() {
            let mut piece = |order, n: usize| {
                laid.push(TokenText {
                    start: n_rows,
                    source,
                    width: m.width,
                    order,
                });
                n_rows += n;
            };
            if self.pairs {
                piece(Order::Pairs(head), m.height);
                continue;
            }
            if self.transpose.is_none() && lines.runs[..] == whole {
                piece(Order::Rows { first: 0, step: 1 }, m.n * m.height);
                continue;
            }
            for row in (0..m.n).map(|i| i * m.height) {
                for &Run { first, n, step } in &lines.runs {
                    let (order, n) = match self.transpose {
                        None => {
                            let first = row + first;
                            (Order::Rows { first, step }, n)
                        }
                        Some(Transpose::BeforeCut) => {
                            let columns = Order::Columns {
                                row,
                                n: m.height,
                                first,
                                step,
                            };
                            (columns, n)
                        }
                        Some(Transpose::AfterCut) => {
                            let columns = Order::Columns {
                                row: row + first,
                                n,
                                first: 0,
                                step: 1,
                            };
                            (columns, m.width)
                        }
                    };
                    piece(order, n);
                }
            }
        }
        (laid, n_rows)
    }

    /// The shape in the GGUF file, whose rows have `n` values.
    fn shape_out(&self, m: &Matrices, n_lines: usize, n_missing: usize, n: usize) -> Vec<usize> {
        let mut shape = m.outer.clone();
        match self.transpose {
            _ if m.is_vector => shape.push(n),
            _ if m.by_value => shape.push(n_lines),
            Some(Transpose::AfterCut) => shape.extend([m.width, n]),
            _ => shape.extend([n_lines + n_missing, n]),
        }
        if self.stacked && (shape.len() == 2 || self.n_pieces > 1) && self.name.ends_with(".weight")
        {
            shape.insert(0, self.n_pieces);
        }
        shape
    }

    /// The type in the GGUF file of a tensor with rows of `n` values.
    fn dtype(&self, shape: &[usize], n: usize, types: OutTypes) -> DType {
        let (name, outtype) = (self.name, types.base);
        let is_packed = matches!(self.first.data, Data::Packed(_)) && types.keeps_quantised;
        if shape.len() == 1
            || name.ends_with("norm.weight")
            || !name.ends_with(".weight")
            || is_small(name) && self.family.arch != "dbrx"
        {
            DType::F32
        } else if self.first.dtype == DType::MXFP4 {
            DType::MXFP4
        } else if is_packed && self.first.dtype != DType::F32 {
            self.first.dtype
        } else if is_packed && n.is_multiple_of(DType::Q8_0.block().0 as usize) {
            DType::Q8_0
        } else if !n.is_multiple_of(outtype.block().0 as usize) {
            DType::F16
        } else {
            outtype
        }
    }
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
