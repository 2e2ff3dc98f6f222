//! Matrices of FP8: codes of 8 bits (E4M3: a sign, four bits of an exponent, three of a fraction)
//! with one scale for all of them, for each output, or for each block of, say, 128 × 128. A value
//! is its code's times the scale, also where the scale is called `weight_scale_inv`.

use super::packed::floats;
use super::raw::Raw;
use crate::io::Failure;
use safetensors::Dtype;
use std::collections::BTreeMap;

/// Ends of the names of scales of weights.
const SCALES: &[&str] = &["weight_scale_inv", "weight_scale"];
/// Scales of activations, which are not quantised here, and of keys and values.
const OTHERS: &[&str] = &["input_scale", "output_scale", "k_scale", "v_scale"];

/// A matrix of FP8.
#[derive(Debug)]
pub(super) struct Float8<'a> {
    codes: &'a [u8],
    /// Rows, and values of a row.
    shape: [usize; 2],
    /// One for each block.
    scales: Vec<f32>,
    /// Rows and columns of a block.
    block: [usize; 2],
}

impl Float8<'_> {
    /// Its rows and columns.
    pub(super) fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Row `i`, as F32.
    pub(super) fn row(&self, i: usize) -> Vec<u8> {
        let n = self.shape[1];
        let scales = &self.scales[i / self.block[0] * n.div_ceil(self.block[1])..];
        let codes = self.codes[i * n..][..n].chunks(self.block[1]);
        let of_block = |(codes, scale): (&[u8], &f32)| -> Vec<u8> {
            codes
                .iter()
                .flat_map(|&code| (value(code) * scale).to_le_bytes())
                .collect()
        };
        codes.zip(scales).flat_map(of_block).collect()
    }
}

/// The value of a code: `±2^(e − 7)·(1 + m/8)`, below the least exponent `±2^−6·m/8`; without
/// infinities, and NaN for all bits set.
fn value(code: u8) -> f32 {
    let (exponent, fraction) = (code >> 3 & 15, f32::from(code & 7) / 8.0);
    let magnitude = match (exponent, code & 0x7f) {
        (_, 0x7f) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-6),
        (e, _) => (1.0 + fraction) * 2f32.powi(i32::from(e) - 7),
    };
    if code >> 7 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

/// Whether a tensor is a part of a matrix of FP8.
pub(super) fn is_part(raw: &Raw<'_>) -> bool {
    let end = raw.name.rsplit('.').next().unwrap_or_default();
    raw.dtype == Dtype::F8_E4M3 || SCALES.contains(&end) || OTHERS.contains(&end)
}

/// Makes matrices of codes and scales; `block` are the rows and columns that share a scale, as the
/// configuration has them.
pub(super) fn join<'a>(
    parts: Vec<Raw<'a>>,
    block: Option<[usize; 2]>,
) -> Result<Vec<(String, Float8<'a>)>, Failure> {
    let (codes, scales): (Vec<_>, Vec<_>) = parts
        .into_iter()
        .partition(|part| part.dtype == Dtype::F8_E4M3);
    let is_of_weight = |part: &Raw<'_>| SCALES.iter().any(|end| part.name.ends_with(end));
    let mut scales: BTreeMap<String, Raw<'a>> = scales
        .into_iter()
        .filter(is_of_weight)
        .map(|part| (part.name.clone(), part))
        .collect();
    let mut matrices = Vec::new();
    for part in codes {
        let name = part.name.strip_suffix("weight").unwrap_or(&part.name);
        let scale = SCALES
            .iter()
            .find_map(|end| scales.remove(&format!("{name}{end}")));
        let matrix = matrix(&part, scale, block);
        let matrix =
            matrix.map_err(|what| Failure::Work(format!("tensor {}: {what}", part.name)))?;
        matrices.push((part.name, matrix));
    }
    match scales.into_keys().next() {
        None => Ok(matrices),
        Some(name) => Err(Failure::Work(format!(
            "tensor {name} scales no matrix of FP8"
        ))),
    }
}

fn matrix<'a>(
    part: &Raw<'a>,
    scale: Option<Raw<'a>>,
    block: Option<[usize; 2]>,
) -> Result<Float8<'a>, String> {
    let scale = scale.ok_or("there is no weight_scale or weight_scale_inv of it")?;
    let &[rows, columns] = &part.shape[..] else {
        return Err(format!("the shape {:?} is no matrix's", part.shape));
    };
    let n_blocks: &[usize] = &scale.shape;
    let block = match (n_blocks, block) {
        ([] | [1] | [1, 1], _) => [rows, columns],
        (&[n] | &[n, 1], None) if n == rows => [1, columns],
        (&[a, b], Some([r, c])) if [a, b] == [rows.div_ceil(r), columns.div_ceil(c)] => [r, c],
        _ => {
            return Err(format!(
                "scales of shape {n_blocks:?} are not those of {:?} in blocks of {}",
                part.shape,
                block.map_or("one row".into(), |[r, c]| format!("{r} x {c}"))
            ));
        }
    };
    Ok(Float8 {
        codes: part.data,
        shape: [rows, columns],
        scales: floats(&scale)?,
        block,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of the format's definition (Micikevicius et al., "FP8 formats for deep learning",
    /// 2022, table 1).
    #[test]
    fn values_of_codes() {
        for (code, expected) in [
            (0x00, 0.0),
            (0x01, 2f32.powi(-9)),
            (0x07, 0.875 * 2f32.powi(-6)),
            (0x08, 2f32.powi(-6)),
            (0x38, 1.0),
            (0xb9, -1.125),
            (0x7e, 448.0),
        ] {
            assert_eq!(value(code), expected, "{code:#x}");
        }
        assert!(value(0x7f).is_nan() && value(0xff).is_nan());
    }
}
