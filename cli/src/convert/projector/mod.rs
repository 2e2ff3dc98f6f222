//! A projector's file (mmproj) from the parts of a checkpoint that read images.
//!
//! `kinds.rs` is the table of kinds, `tensors.rs` lays their tensors out.

mod kinds;
mod settings;
mod tensors;

use super::checkpoint::Checkpoint;
use super::quantised::Method;
use super::{Conversions, OutFile, OutType, folder_name, rounded, title};
use crate::io::{Failure, check_overwrite, count, note, printable, size};
use crate::quantize::Rows;
use kinds::{KINDS, Kind};
use ruvllm::gguf::{Array, Value, Writer};
use ruvllm::quant::{Conversion, FileType};
use settings::Settings;
use std::path::Path;
use std::time::Instant;
use tensors::Tensor;

/// Converts the parts of a folder that read images.
pub(crate) fn convert(what: &Conversions<'_>, to: &OutFile<'_>) -> Result<(), Failure> {
    let (start, folder) = (Instant::now(), what.folder);
    let mut settings = Settings::open(folder)?;
    let kind = kind(&settings)?;
    settings.vision.add_defaults(kind.defaults);
    let n_layer = settings.n_layer()?;
    let checkpoint = Checkpoint::open(folder)?;
    let method = Method::of(&settings.model)?;
    let left_out = |name: &str| tensors::is_left_out(kind, n_layer, name);
    let (sources, _) = checkpoint.tensors(method, left_out)?;
    let file_type = what.outtype.file_type(&sources);
    if matches!(what.outtype, OutType::Mix(_)) {
        return Err(settings.refuse("projectors have one type of matrices"));
    }
    let tensors = tensors::plan(kind, &settings, &sources, file_type.base())?;
    let output = to.path.map(Path::to_owned).unwrap_or_else(|| {
        let name = format!(
            "mmproj-{}-{file_type}.gguf",
            folder_name(folder).unwrap_or_default()
        );
        folder.join("..").join(name)
    });
    check_overwrite(&output, to.overwrite)?;
    let n_values = tensors
        .iter()
        .map(|tensor| tensor.dims.iter().product::<u64>())
        .sum();
    let rows = Rows::new("converting", n_values, what.n_threads)?;
    let mut writer = Writer::new();
    if to.overwrite {
        writer.overwrite();
    }
    write_metadata(
        kind,
        &settings,
        &folder_name(folder)?,
        n_values,
        file_type,
        &mut writer,
    )?;
    tensors
        .iter()
        .for_each(|tensor| write(tensor, &rows, what.verbose, &mut writer));
    let written = writer.write(&output);
    rows.finish(written)?;
    let bytes = std::fs::metadata(&output)
        .map_err(Failure::file(&output))?
        .len();
    let (path, seconds) = (output.display(), start.elapsed().as_secs_f64());
    let (name, parameters, size) = (kind.name, count(n_values), size(bytes));
    note(format!(
        "{path}: projector {name}, {parameters} parameters, {size}, {file_type}, {seconds:.1} s"
    ));
    Ok(())
}

fn kind(settings: &Settings) -> Result<&'static Kind, Failure> {
    let names = settings
        .model
        .opt_strs("architectures")?
        .unwrap_or_default();
    let fits = |kind: &&Kind| kind.hf.iter().any(|hf| names.contains(hf)) && (kind.fits)(settings);
    KINDS.iter().find(fits).ok_or_else(|| {
        let known: Vec<&str> = KINDS.iter().flat_map(|kind| kind.hf).copied().collect();
        let known = known.join(", ");
        settings.refuse(format_args!(
            "architectures is {names:?}, and projectors are made of {known}"
        ))
    })
}

fn write_metadata(
    kind: &Kind,
    of: &Settings,
    name: &str,
    n_values: u64,
    file_type: FileType,
    writer: &mut Writer<'_>,
) -> Result<(), Failure> {
    writer.metadata("general.architecture", "clip");
    writer.metadata("general.type", "mmproj");
    writer.metadata("general.name", title(name));
    writer.metadata("general.size_label", rounded(n_values));
    writer.metadata("general.file_type", file_type as u32);
    let key = if kind.name == "gemma4v" {
        "clip.vision.projector_type"
    } else {
        "clip.projector_type"
    };
    writer.metadata(key, kind.name);
    writer.metadata("clip.has_vision_encoder", true);
    let patch = of.count("patch_size")?;
    let image = match (kind.name, of.pictures.opt_u32(&["scale_resolution"])?) {
        ("minicpmv4_6", Some(n)) => n,
        ("qwen3vl_merger", _) if of.vision.get(&["image_size"]).is_none() => {
            of.count("num_position_embeddings")?.isqrt() * patch
        }
        _ => of.count("image_size")?,
    };
    // Qwen 2's hidden size is that of the model.
    let embed_dim = of.vision.opt_u32(&["embed_dim"])?;
    let width = match embed_dim {
        Some(width) => width,
        None => of.count("hidden_size")?,
    };
    let n_ff = match embed_dim {
        Some(_) => of.count("hidden_size")?,
        None => of.count("intermediate_size")?,
    };
    let n_embd = match of.model.opt_u32(&["hidden_size"])? {
        Some(n) => n,
        // What transformers' Llama has without it.
        None if kind.name == "mlp" => 4096,
        None => return Err(of.model.missing("hidden_size")),
    };
    for (key, n) in [
        ("projection_dim", n_embd),
        ("image_size", image),
        ("patch_size", patch),
        ("embedding_length", width),
        ("feed_forward_length", n_ff),
        ("block_count", of.n_layer()?),
        ("attention.head_count", of.n_head()?),
    ] {
        writer.metadata(format!("clip.vision.{key}"), n);
    }
    for key in ["image_mean", "image_std"] {
        let numbers = of.pictures.opt_numbers(key)?.unwrap_or_default();
        if numbers.len() != 3 {
            return Err(of
                .pictures
                .refuse(format_args!("{key} is not three numbers")));
        }
        let numbers = numbers.into_iter().map(|x| x as f32).collect();
        writer.metadata(
            format!("clip.vision.{key}"),
            Value::Array(Array::F32(numbers)),
        );
    }
    (kind.keys)(of, &mut |key, value| {
        writer.metadata(format!("clip.{key}"), value);
    })?;
    writer.metadata("general.quantization_version", 2u32);
    Ok(())
}

/// Converts a tensor while the file is written.
fn write<'p>(tensor: &'p Tensor<'p>, rows: &'p Rows, verbose: bool, writer: &mut Writer<'p>) {
    let (from, to) = (tensor.source.dtype, tensor.to);
    if verbose {
        let (name, from) = (printable(&tensor.name), from.to_string());
        note(format!("{name:<40} {from:>8} -> {to}"));
    }
    writer.tensor_with(&tensor.name, &tensor.dims, to, move |out| {
        let add = |_: usize, values: &mut [f32]| values.iter_mut().for_each(|x| *x += 1.0);
        let change = tensor
            .plus_one
            .then_some(&add as &(dyn Fn(usize, &mut [f32]) + Sync));
        let conversion = Conversion {
            n: tensor.n(),
            from,
            to,
            change,
            rows_per_matrix: tensor.n_rows(),
            importance: None,
            feedback: &[],
        };
        let row = |i| tensor.row(i);
        rows.converter
            .write(&tensor.name, tensor.n_rows(), row, conversion, out)
    });
}
