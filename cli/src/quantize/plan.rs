//! The types that the tensors of a file get, and the file of such a plan.

use super::rows::{Conversion, Rows};
use crate::io::Failure;
use ruvllm::gguf::{Gguf, TensorInfo, Value, Writer};
use ruvllm::quant::{DType, FileType, ModelShape};

pub(crate) fn file_type(name: &str) -> Result<FileType, String> {
    FileType::from_name(name).ok_or_else(|| {
        let names: Vec<String> = FileType::ALL.iter().map(FileType::to_string).collect();
        format!("there is no type {name:?}; there are {}", names.join(", "))
    })
}

/// The tensors and the types that they get.
pub(crate) fn plan(
    gguf: &Gguf,
    file_type: FileType,
    allow_requantize: bool,
) -> Result<Vec<(&TensorInfo, DType)>, Failure> {
    let shape = model_shape(gguf);
    let to = |t| Ok((t, target(t, file_type, allow_requantize, &shape)?));
    gguf.tensors().iter().map(to).collect()
}

/// The file of that plan, converted while it is written.
pub(crate) fn writer<'a>(
    gguf: &'a Gguf,
    plan: &[(&'a TensorInfo, DType)],
    file_type: FileType,
    rows: &'a Rows,
) -> Writer<'a> {
    let mut writer = Writer::new();
    for (key, value) in gguf
        .metadata()
        .iter()
        .filter(|(key, _)| !key.starts_with("split."))
    {
        writer.metadata(key, value.clone());
    }
    writer.metadata("general.quantization_version", 2u32);
    writer.metadata("general.file_type", Value::U32(file_type as u32));
    for &(t, to) in plan {
        let n = t.dims[0] as usize;
        let (n_rows, data) = ((t.n_elems() / t.dims[0]) as usize, gguf.data(t));
        let row_bytes = data.len() / n_rows;
        let conversion = Conversion {
            n,
            from: t.dtype,
            to,
            change: None,
        };
        writer.tensor_with(&t.name, &t.dims, to, move |out| {
            rows.write(
                &t.name,
                n_rows,
                |i| data[i * row_bytes..(i + 1) * row_bytes].into(),
                conversion,
                out,
            )
        });
    }
    writer
}

/// What the mix of types depends on; where the file does not say, as in a model without heads.
fn model_shape(gguf: &Gguf) -> ModelShape {
    let arch = gguf
        .metadata()
        .opt_str("general.architecture")
        .ok()
        .flatten()
        .unwrap_or_default();
    let number = |key: &str| {
        let key = format!("{arch}.{key}");
        let metadata = gguf.metadata();
        let single = metadata.opt_u32(&key).ok().flatten();
        // Some families have one value per layer.
        single
            .or_else(|| {
                metadata
                    .opt_u32s(&key)
                    .ok()
                    .flatten()?
                    .iter()
                    .copied()
                    .max()
            })
            .map(|n| n as usize)
    };
    let n_head = number("attention.head_count").unwrap_or(1);
    ModelShape {
        n_layer: number("block_count").unwrap_or(1),
        n_head,
        n_head_kv: number("attention.head_count_kv").unwrap_or(n_head),
        n_expert: number("expert_count").unwrap_or(0),
        tied_embeddings: gguf.tensor("output.weight").is_none(),
        importance: false,
    }
}

/// The type that a tensor gets.
fn target(
    t: &TensorInfo,
    file_type: FileType,
    allow_requantize: bool,
    shape: &ModelShape,
) -> Result<DType, Failure> {
    let Some(to) = file_type.tensor_type(&t.name, &t.dims, shape) else {
        return Ok(t.dtype);
    };
    let Some(from) = t.dtype.format() else {
        return Ok(t.dtype);
    };
    if to != t.dtype && from.block_elems > 1 && !allow_requantize {
        return Err(Failure::Work(format!(
            "tensor {} is quantised already ({}); start from an F16 or F32 file, or accept the loss with --allow-requantize",
            t.name, t.dtype
        )));
    }
    Ok(to)
}
