//! A tensor as a safetensors file has it.

use ruvllm::quant::DType;
use safetensors::Dtype;

/// A tensor as a file has it.
#[derive(Debug)]
pub(super) struct Raw<'a> {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: Dtype,
    pub(super) data: &'a [u8],
}

impl Raw<'_> {
    /// Its type, if it is one of floats that are weights as they are.
    pub(super) fn float(&self) -> Option<DType> {
        match self.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            _ => None,
        }
    }
}
