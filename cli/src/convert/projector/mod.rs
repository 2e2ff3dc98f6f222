//! A projector's file (mmproj) from the parts of a checkpoint that read images.
//!
//! `kinds.rs` is the table of kinds, `tensors.rs` lays their tensors out.

mod kinds;
mod tensors;

use super::checkpoint::Checkpoint;
use super::config::{Config, read_json};
use super::quantised::Method;
use super::{Conversions, OutFile, OutType, folder_name, rounded, title};
use crate::io::{Failure, check_overwrite, count, note, printable, size};
use crate::quantize::Rows;
use kinds::{KINDS, Kind};
use ruvllm::gguf::{Array, Value, Writer};
use ruvllm::quant::{Conversion, FileType};
use serde_json::{Map, Value as Json};
use std::path::Path;
use std::time::Instant;
use tensors::Tensor;

/// What the files of a folder say of images.
struct Settings {
    /// `config.json`, with the text model's keys.
    model: Config,
    /// `vision_config` in it.
    vision: Config,
    /// `preprocessor_config.json`, and what `processor_config.json` has in its place.
    pictures: Config,
    /// Files with added tokens.
    tokens: Vec<Json>,
}

impl Settings {
    fn open(folder: &Path) -> Result<Settings, Failure> {
        let path = folder.join("config.json");
        let model = Config::open(folder)?;
        let object = |json: Option<Json>| match json {
            Some(Json::Object(keys)) => keys,
            _ => Map::new(),
        };
        let vision = object(read_json(&path)?.and_then(|mut all| {
            let vision = all.get_mut("vision_config")?;
            Some(vision.take())
        }));
        if vision.is_empty() {
            return Err(model.refuse("there is no vision_config: the model reads no images"));
        }
        let of_pictures = folder.join("preprocessor_config.json");
        let mut pictures = object(read_json(&of_pictures)?);
        let mut all = object(read_json(&folder.join("processor_config.json"))?);
        pictures.extend(object(all.remove("image_processor")));
        let files = ["tokenizer_config.json", "tokenizer.json"];
        let files = files.map(|file| read_json(&folder.join(file)));
        Ok(Settings {
            model,
            vision: Config::of(path, vision),
            pictures: Config::of(of_pictures, pictures),
            tokens: files
                .into_iter()
                .filter_map(Result::transpose)
                .collect::<Result<_, _>>()?,
        })
    }

    fn refuse(&self, what: impl std::fmt::Display) -> Failure {
        self.model.refuse(what)
    }

    /// A count of the encoder; that of a list, for width and height, is the first.
    fn count(&self, name: &str) -> Result<u32, Failure> {
        if let Some((_, Json::Array(_))) = self.vision.get(&[name])
            && let Some([n, ..]) = self.vision.opt_counts(name)?.as_deref()
        {
            return Ok(*n as u32);
        }
        self.vision.u32(name)
    }

    fn first(&self, names: &[&str]) -> Result<u32, Failure> {
        let n = self.vision.opt_u32(names)?;
        n.ok_or_else(|| {
            self.vision
                .missing(&format!("vision_config: {}", names.join(" or ")))
        })
    }

    fn n_head(&self) -> Result<u32, Failure> {
        self.first(&["num_attention_heads", "num_heads"])
    }

    /// Layers that are computed: `vision_feature_layer` counts from the end, -1 being all of them.
    fn n_layer(&self) -> Result<u32, Failure> {
        const MAX: u32 = 1 << 10;
        let n = self.first(&["num_hidden_layers", "depth"])?;
        let from_end = match self.model.get(&["vision_feature_layer"]) {
            Some((_, layer)) => layer.as_i64().ok_or_else(|| {
                self.refuse(format_args!(
                    "vision_feature_layer is {layer}, and one layer's features are read"
                ))
            })?,
            None => -1,
        };
        let computed = i64::from(n) + 1 + from_end;
        match u32::try_from(computed) {
            Ok(computed) if n <= MAX && (1..=n).contains(&computed) && from_end < 0 => Ok(computed),
            _ => Err(self.refuse(format_args!("layer {from_end} of {n} of the encoder"))),
        }
    }

    /// Layers whose outputs reach the model.
    fn deepstack(&self) -> Result<Vec<i32>, Failure> {
        Ok(self
            .vision
            .opt_counts("deepstack_visual_indexes")?
            .unwrap_or_default())
    }

    /// Sizes of grids of tiles, height and width alternately.
    fn pinpoints(&self) -> Result<Option<Vec<i32>>, Failure> {
        let Some((name, list)) = self.model.get(&["image_grid_pinpoints"]) else {
            return Ok(None);
        };
        let number = |n: &Json| i32::try_from(n.as_u64()?).ok();
        let pair = |pair: &Json| match &pair.as_array()?[..] {
            [a, b] => Some([number(a)?, number(b)?]),
            _ => None,
        };
        let pairs: Option<Vec<[i32; 2]>> =
            list.as_array().and_then(|l| l.iter().map(pair).collect());
        let wrong = || self.refuse(format_args!("{name} is no list of pairs"));
        Ok(Some(pairs.ok_or_else(wrong)?.concat()))
    }

    /// The id of an added token.
    fn token(&self, text: &str) -> Result<usize, Failure> {
        let is = |token: &Json| token.get("content").and_then(Json::as_str) == Some(text);
        let find = |file: &Json| {
            let by_id = file.get("added_tokens_decoder").and_then(Json::as_object);
            let by_id = by_id.into_iter().flatten().find(|(_, token)| is(token));
            let listed = file.get("added_tokens").and_then(Json::as_array);
            let listed = listed.into_iter().flatten().find(|token| is(token));
            let listed = listed.and_then(|token| token.get("id")?.as_u64());
            by_id.and_then(|(id, _)| id.parse().ok()).or(listed)
        };
        let id = self.tokens.iter().find_map(find);
        let id = id.ok_or_else(|| {
            self.refuse(format_args!("the tokenizer's files have no token {text}"))
        })?;
        Ok(id as usize)
    }
}

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
        let (n, importance) = (tensor.n(), None);
        let conversion = Conversion {
            n,
            from,
            to,
            change,
            importance,
        };
        let row = |i| tensor.row(i);
        rows.converter
            .write(&tensor.name, tensor.n_rows(), row, conversion, out)
    });
}
