//! Matrices of 4 bits as GPTQ's and AWQ's tools pack them, in eighths of 32-bit words. A value is
//! `s·(q − z)`, with a scale `s` and a zero point `z` for a group of inputs of each output.
//!
//! | | `qweight` | `qzeros` | group of an input |
//! |---|---|---|---|
//! | GPTQ | `(n_in / 8, n_out)`, eight inputs a word | `(n_group, n_out / 8)`, less 1 but in version 2 | `g_idx`, which goes to and fro after sorting by activations (act-order) |
//! | AWQ | `(n_in, n_out / 8)`, eight outputs a word in [`AWQ_ORDER`] | `(n_group, n_out / 8)`, packed alike | by length |
//!
//! Where each 32 inputs in a row share a group, blocks hold these values exactly: Q4_0 if every `z`
//! is 8, else Q5_0, whose `q` reach from −16 to 15. Other matrices are given as F32.

use super::quantised::Method;
use super::raw::Raw;
use crate::io::Failure;
use ruvllm::quant::{DType, dequantize_row, quantize_row};
use safetensors::Dtype;
use std::collections::BTreeMap;

/// Which of its eight outputs a nibble of AWQ's words has, from the lowest nibble.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Values of a block of Q4_0 and Q5_0.
const BLOCK: usize = 32;

/// Ends of the names of a matrix's tensors.
const WEIGHT: &str = ".qweight";
const ENDS: &[&str] = &[WEIGHT, ".qzeros", ".scales", ".g_idx"];

/// A packed matrix.
#[derive(Debug)]
pub(super) struct Packed<'a> {
    method: Method,
    n_in: usize,
    n_out: usize,
    weights: Words<'a>,
    zeros: Words<'a>,
    /// Scales, `(n_group, n_out)`.
    scales: Floats<'a>,
    n_group: usize,
    /// The group of each input.
    groups: Vec<u32>,
}

/// Little-endian words in rows of `width`.
#[derive(Debug)]
struct Words<'a> {
    bytes: &'a [u8],
    width: usize,
}

impl Words<'_> {
    fn at(&self, row: usize, column: usize) -> u32 {
        let word = &self.bytes[4 * (row * self.width + column)..][..4];
        u32::from_le_bytes([word[0], word[1], word[2], word[3]])
    }
}

/// Numbers of a type of floats, all of them finite.
#[derive(Debug)]
struct Floats<'a> {
    bytes: &'a [u8],
    dtype: DType,
}

impl Floats<'_> {
    fn at(&self, i: usize) -> f32 {
        let size = self.dtype.block().1 as usize;
        let mut x = [0.0];
        // The length was checked.
        let _ = dequantize_row(self.dtype, &self.bytes[i * size..][..size], &mut x);
        x[0]
    }
}

impl Packed<'_> {
    /// Its outputs and inputs.
    pub(super) fn shape(&self) -> [usize; 2] {
        [self.n_out, self.n_in]
    }

    /// The code of an input of an output, 0 to 15.
    fn code(&self, i: usize, out: usize) -> u32 {
        match self.method {
            Method::Awq => self.of_output(&self.weights, i, out),
            _ => self.weights.at(i / 8, out) >> (4 * (i % 8)) & 15,
        }
    }

    /// The zero point of an output in a group, 0 to 15.
    fn zero(&self, group: usize, out: usize) -> u32 {
        let stored = self.of_output(&self.zeros, group, out);
        match self.method {
            Method::Gptq { is_v2: false } => (stored + 1) & 15,
            _ => stored,
        }
    }

    /// The nibble of an output in row `row` of words that have eight outputs each.
    fn of_output(&self, words: &Words<'_>, row: usize, out: usize) -> u32 {
        let nibble = match self.method {
            Method::Awq => AWQ_ORDER.iter().position(|&i| i == out % 8).unwrap_or(0),
            _ => out % 8,
        };
        words.at(row, out / 8) >> (4 * nibble) & 15
    }

    fn scale(&self, group: usize, out: usize) -> f32 {
        self.scales.at(group * self.n_out + out)
    }

    /// Row `out` of the matrix, as blocks of Q4_0 or Q5_0 or as F32.
    pub(super) fn row(&self, out: usize, dtype: DType) -> Vec<u8> {
        let mut row = Vec::new();
        for first in (0..self.n_in).step_by(BLOCK) {
            let inputs = first..self.n_in.min(first + BLOCK);
            if dtype == DType::F32 {
                for i in inputs {
                    let group = self.groups[i] as usize;
                    let (q, z) = (self.code(i, out), self.zero(group, out));
                    let x = self.scale(group, out) * (q as f32 - z as f32);
                    row.extend(x.to_le_bytes());
                }
                continue;
            }
            let group = self.groups[first] as usize;
            row.extend(f16_bytes(self.scale(group, out)));
            // Q4_0 takes 8 off itself, Q5_0 takes 16 off.
            let shift = match dtype {
                DType::Q4_0 => 0,
                _ => 16 - self.zero(group, out),
            };
            let codes: Vec<u32> = inputs.map(|i| self.code(i, out) + shift).collect();
            if dtype == DType::Q5_0 {
                let high = codes.iter().zip(0..).map(|(q, bit)| (q >> 4) << bit);
                row.extend(high.fold(0, |all, bit| all | bit).to_le_bytes());
            }
            let half = BLOCK / 2;
            row.extend((0..half).map(|j| (codes[j] & 15 | (codes[j + half] & 15) << 4) as u8));
        }
        row
    }

    /// The smallest type that holds all values exactly; F32 if no blocks do.
    fn exact_type(&self) -> DType {
        let in_blocks = self.n_in.is_multiple_of(BLOCK)
            && self
                .groups
                .chunks(BLOCK)
                .all(|groups| groups.iter().all(|g| *g == groups[0]));
        let is_f16 = |i| {
            let (s, mut back) = (self.scales.at(i), [0.0]);
            dequantize_row(DType::F16, &f16_bytes(s), &mut back).is_ok() && back[0] == s
        };
        let n_scales = self.n_group * self.n_out;
        if !in_blocks || self.scales.dtype != DType::F16 && !(0..n_scales).all(is_f16) {
            return DType::F32;
        }
        let is_symmetric =
            (0..self.n_group).all(|group| (0..self.n_out).all(|out| self.zero(group, out) == 8));
        if is_symmetric {
            DType::Q4_0
        } else {
            DType::Q5_0
        }
    }
}

fn f16_bytes(x: f32) -> [u8; 2] {
    let mut bytes = [0; 2];
    // Scales were checked to be finite.
    let _ = quantize_row(DType::F16, &[x], None, &mut bytes);
    bytes
}

/// Whether a tensor is a part of a packed matrix.
pub(super) fn is_part(name: &str) -> bool {
    ENDS.iter().any(|end| name.ends_with(end))
}

/// A matrix with its name, and the type of its rows.
type Named<'a> = (String, DType, Packed<'a>);

/// Makes matrices of their parts.
pub(super) fn join<'a>(parts: Vec<Raw<'a>>, method: Method) -> Result<Vec<Named<'a>>, Failure> {
    let (weights, others): (Vec<_>, Vec<_>) = parts
        .into_iter()
        .partition(|part| part.name.ends_with(WEIGHT));
    let mut others: BTreeMap<String, Raw<'a>> = others
        .into_iter()
        .map(|part| (part.name.clone(), part))
        .collect();
    let mut matrices = Vec::new();
    for part in weights {
        let name = part.name.trim_end_matches(WEIGHT).to_owned();
        let mut other = |end: &str| others.remove(&format!("{name}{end}"));
        let matrix = matrix(
            method,
            &part,
            other(".qzeros"),
            other(".scales"),
            other(".g_idx"),
        );
        let matrix =
            matrix.map_err(|what| Failure::Work(format!("tensor {}: {what}", part.name)))?;
        matrices.push((format!("{name}.weight"), matrix));
    }
    if let Some(name) = others.keys().next() {
        return Err(Failure::Work(format!("tensor {name} has no {WEIGHT}")));
    }
    let types = types_by_role(&matrices);
    let matrices = matrices.into_iter().map(|(name, packed)| {
        let dtype = types[&role(&name)];
        (name, dtype, packed)
    });
    Ok(matrices.collect())
}

/// A name without its numbers: matrices of one role become one tensor in a mixture, and so have one
/// type.
fn role(name: &str) -> String {
    name.split(|c: char| c.is_ascii_digit()).collect()
}

/// The type that holds all matrices of a role.
fn types_by_role(matrices: &[(String, Packed<'_>)]) -> BTreeMap<String, DType> {
    let mut types = BTreeMap::new();
    let size = |dtype: DType| dtype.block().1 * BLOCK as u64 / dtype.block().0;
    for (name, packed) in matrices {
        let own = packed.exact_type();
        let of_role = types.entry(role(name)).or_insert(own);
        if size(own) > size(*of_role) {
            *of_role = own;
        }
    }
    types
}

/// A matrix from its parts, whose shapes have to agree.
fn matrix<'a>(
    method: Method,
    weights: &Raw<'a>,
    zeros: Option<Raw<'a>>,
    scales: Option<Raw<'a>>,
    g_idx: Option<Raw<'a>>,
) -> Result<Packed<'a>, String> {
    let zeros = zeros.ok_or("there are no .qzeros")?;
    let scales = scales.ok_or("there are no .scales")?;
    for part in [Some(weights), Some(&zeros), g_idx.as_ref()]
        .into_iter()
        .flatten()
    {
        if part.dtype != Dtype::I32 {
            return Err(format!(
                "{} has the type {:?}, not I32",
                part.name, part.dtype
            ));
        }
    }
    let ([a, b], [n_group, n_out]) = (pair(weights)?, pair(&scales)?);
    let (n_in, width) = match method {
        Method::Awq => (a, n_out / 8),
        _ => (a.saturating_mul(8), n_out),
    };
    let zeros_shape = pair(&zeros)?;
    if !n_out.is_multiple_of(8) || b != width || zeros_shape != [n_group, n_out / 8] {
        return Err(format!(
            "{:?}, {:?} of zero points and {:?} of scales are not of one matrix",
            weights.shape, zeros.shape, scales.shape
        ));
    }
    let groups = match &g_idx {
        Some(g_idx) => groups(g_idx, n_in, n_group)?,
        None => {
            let size = n_in / n_group;
            if size == 0 || !n_in.is_multiple_of(n_group) {
                return Err(format!("{n_group} groups of {n_in} inputs"));
            }
            (0..n_in).map(|i| (i / size) as u32).collect()
        }
    };
    // That they are finite is checked once, and here.
    floats(&scales)?;
    let dtype = scales.float().unwrap_or(DType::F32);
    Ok(Packed {
        method,
        n_in,
        n_out,
        weights: Words {
            bytes: weights.data,
            width,
        },
        zeros: Words {
            bytes: zeros.data,
            width: n_out / 8,
        },
        scales: Floats {
            bytes: scales.data,
            dtype,
        },
        n_group,
        groups,
    })
}

fn pair(part: &Raw<'_>) -> Result<[usize; 2], String> {
    let shape = part.shape[..].try_into();
    shape.map_err(|_| {
        format!(
            "{} has the shape {:?}, not two dimensions",
            part.name, part.shape
        )
    })
}

/// The group of each input.
fn groups(g_idx: &Raw<'_>, n_in: usize, n_group: usize) -> Result<Vec<u32>, String> {
    if g_idx.shape != [n_in] {
        return Err(format!(
            "{} has the shape {:?}, not [{n_in}]",
            g_idx.name, g_idx.shape
        ));
    }
    let words = Words {
        bytes: g_idx.data,
        width: 1,
    };
    let groups: Vec<u32> = (0..n_in).map(|i| words.at(i, 0)).collect();
    match groups.iter().position(|&group| group as usize >= n_group) {
        None => Ok(groups),
        Some(i) => Err(format!(
            "{} puts input {i} into group {}, and there are {n_group}",
            g_idx.name, groups[i] as i32
        )),
    }
}

/// The values of scales, all of them finite.
pub(super) fn floats(part: &Raw<'_>) -> Result<Vec<f32>, String> {
    let dtype = part
        .float()
        .ok_or_else(|| format!("{} has the type {:?}, not a float's", part.name, part.dtype))?;
    let mut values = vec![0.0; part.shape.iter().product()];
    dequantize_row(dtype, part.data, &mut values).map_err(|error| error.to_string())?;
    match values.iter().position(|x| !x.is_finite()) {
        None => Ok(values),
        Some(i) => Err(format!("value {i} of {} is {}", part.name, values[i])),
    }
}
