//! How a checkpoint is quantised, as `quantization_config` says.

use super::config::Config;
use crate::io::Failure;
use serde_json::Value as Json;

/// How the matrices of a checkpoint are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// As floats.
    None,
    /// Experts of MXFP4, in gpt-oss's layout.
    Mxfp4,
    Awq,
    Gptq {
        /// Whether zero points are stored as they are.
        is_v2: bool,
    },
    /// FP8 with scales of blocks of so many rows and columns, or of matrices or rows.
    Float8 {
        block: Option<[usize; 2]>,
    },
}

/// What is told of methods that are not read.
pub(super) const QUANTISED: &str = "weights of F32, F16, BF16, FP8 (E4M3), of 4 bits as GPTQ and AWQ pack them, and gpt-oss's MXFP4 are converted; take the checkpoint from which it was quantised";

impl Method {
    /// # Errors
    /// If it is another one, or a variant that is not known.
    pub(super) fn of(config: &Config) -> Result<Method, Failure> {
        let Some((_, how)) = config.get(&["quantization_config"]) else {
            return Ok(Method::None);
        };
        let text = |key: &str| how.get(key).and_then(Json::as_str).unwrap_or_default();
        let method = text("quant_method");
        let refuse = |what: &str| {
            let method = if method.is_empty() { "unknown" } else { method };
            config.refuse(format!(
                "the checkpoint is quantised ({method}{what}): {QUANTISED}"
            ))
        };
        let bits = || match how.get("bits").and_then(Json::as_u64) {
            Some(4) => Ok(()),
            Some(bits) => Err(refuse(&format!(", {bits} bits"))),
            None => Err(refuse(", no number of bits")),
        };
        match method {
            "mxfp4" => Ok(Method::Mxfp4),
            "awq" => {
                bits()?;
                match text("version").to_ascii_lowercase().as_str() {
                    "" | "gemm" => Ok(Method::Awq),
                    other => Err(refuse(&format!(", layout {other:?}"))),
                }
            }
            "gptq" => {
                bits()?;
                match text("checkpoint_format") {
                    "" | "gptq" => Ok(Method::Gptq { is_v2: false }),
                    "gptq_v2" => Ok(Method::Gptq { is_v2: true }),
                    other => Err(refuse(&format!(", layout {other:?}"))),
                }
            }
            "fp8" | "fbgemm_fp8" => Ok(Method::Float8 {
                block: block(how, &refuse)?,
            }),
            "compressed-tensors" if text("format") == "float-quantized" => {
                Ok(Method::Float8 { block: None })
            }
            _ => Err(refuse("")),
        }
    }

    /// Whether matrices have 4 bits.
    pub(super) fn is_packed(self) -> bool {
        matches!(self, Method::Awq | Method::Gptq { .. })
    }
}

/// `weight_block_size`: rows and columns of a block.
fn block(how: &Json, refuse: &dyn Fn(&str) -> Failure) -> Result<Option<[usize; 2]>, Failure> {
    let Some(size) = how.get("weight_block_size").filter(|size| !size.is_null()) else {
        return Ok(None);
    };
    let numbers = size.as_array().into_iter().flatten();
    let numbers: Option<Vec<usize>> = numbers
        .map(|n| {
            n.as_u64()
                .and_then(|n| usize::try_from(n).ok())
                .filter(|&n| n > 0)
        })
        .collect();
    match numbers.as_deref() {
        Some(&[rows, columns]) => Ok(Some([rows, columns])),
        _ => Err(refuse(&format!(", weight_block_size {size}"))),
    }
}
