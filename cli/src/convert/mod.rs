//! A GGUF file from a folder of Hugging Face.
//!
//! `config.rs` reads the configuration, `family/` the table of families, `tensors.rs` lays the
//! tensors out, `tokenizer.rs` reads the vocabulary. What is written is what llama.cpp's
//! `convert_hf_to_gguf.py` writes, but for what `docs/guide/convert.md` lists.

mod checkpoint;
mod config;
mod family;
mod layout;
mod sentencepiece;
mod tensors;
mod tokenizer;
mod world;

use crate::flags::{OverwriteArg, ThreadsArg};
use crate::io::{Failure, count, note, printable, size};
use crate::quantize::{Change, Conversion, Rows};
use checkpoint::{Checkpoint, Source};
use config::{Config, read_any_json, read_json};
use family::{Extra, Family};
use ruvllm::Model;
use ruvllm::gguf::{Array, Value, Writer};
use ruvllm::quant::{DType, FileType};
use serde_json::Value as Json;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tokenizer::Tokenizer;

/// What to convert, and how.
#[derive(clap::Args)]
pub(crate) struct ConvertArgs {
    /// Folder with config.json, model*.safetensors and the tokenizer's files
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// GGUF file to write; without it, the folder's name and the type
    #[arg(short, long, value_name = "FILE")]
    outfile: Option<PathBuf>,
    /// Type of the matrices; auto is that of the checkpoint, if that has 16 bits, and f16
    /// otherwise
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    outtype: OutType,
    /// Leave out blocks for multi-token prediction, which draft (--spec mtp)
    #[arg(long)]
    no_mtp: bool,
    #[command(flatten)]
    overwrite: OverwriteArg,
    #[command(flatten)]
    threads: ThreadsArg,
    /// Tell the type of each tensor
    #[arg(short, long)]
    verbose: bool,
}

/// `general.file_type` of files whose experts are MXFP4 (llama.cpp's `MOSTLY_MXFP4_MOE`).
const MXFP4_EXPERTS: u32 = 38;

#[derive(Clone, Copy, clap::ValueEnum)]
enum OutType {
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
    Auto,
}

impl OutType {
    fn file_type(self, sources: &[Source<'_>]) -> FileType {
        match self {
            OutType::F32 => FileType::F32,
            OutType::F16 => FileType::F16,
            OutType::Bf16 => FileType::BF16,
            OutType::Q8_0 => FileType::Q8_0,
            OutType::Auto => {
                let types = sources
                    .iter()
                    .filter(|source| source.shape.len() > 1)
                    .map(|source| source.dtype);
                match types
                    .into_iter()
                    .find(|dtype| !matches!(dtype, DType::F32 | DType::MXFP4))
                {
                    Some(DType::BF16) => FileType::BF16,
                    _ => FileType::F16,
                }
            }
        }
    }
}

/// Converts a folder into a file.
pub(crate) fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let (family, mut config) = open(&args.folder)?;
    let n_layer = config.u32("num_hidden_layers")?;
    let mut checkpoint = Checkpoint::open(&args.folder)?;
    if family.arch == "gemma-embedding" {
        add_dense(&args.folder, &mut checkpoint)?;
    }
    let (sources, n_left_out) = checkpoint.tensors(|name| tensors::is_left_out(family, name))?;
    let n_block = if args.no_mtp {
        0
    } else {
        tensors::n_blocks(family, &config, &sources, n_layer)?
    };
    config.add_layers(n_block)?;
    let blocks = (n_layer, n_block);
    let tokenizer = Tokenizer::open(&args.folder, &config)?;
    let file_type = args.outtype.file_type(&sources);
    let tensors = tensors::plan(
        family,
        &config,
        &sources,
        n_left_out,
        blocks,
        tokenizer.len(),
        file_type.base(),
    )?;
    let plan = Plan {
        folder: &args.folder,
        family,
        config: &config,
        sources: &sources,
        blocks,
        tokenizer: &tokenizer,
        tensors: &tensors,
        extra: (family.extra)(&config)?,
        file_type,
    };

    let name = folder_name(&args.folder)?;
    let output = args.outfile.clone().unwrap_or_else(|| {
        // Beside the folder, whatever its path looks like.
        args.folder
            .join("..")
            .join(format!("{name}-{file_type}.gguf"))
    });
    args.overwrite.check(&output)?;
    let total = plan.n_values();
    let rows = Rows::new("converting", total, args.threads)?;
    let mut writer = Writer::new();
    plan.write_metadata(&name, &mut writer)?;
    plan.write_tensors(&rows, args.verbose, &mut writer);
    args.overwrite.apply(&mut writer);
    let written = writer.write(&output);
    rows.finish(written)?;
    // A tensor may be missing, or have a shape that the configuration does not tell.
    if let Err(error) = Model::open(&output) {
        let _ = std::fs::remove_file(&output);
        return Err(Failure::Work(format!(
            "{}: what is in it makes no model: {error}",
            args.folder.display()
        )));
    }
    let bytes = std::fs::metadata(&output)
        .map_err(Failure::file(&output))?
        .len();
    let seconds = start.elapsed().as_secs_f64();
    let path = output.display();
    note(format!(
        "{path}: {}, {} parameters, {}, {file_type}, {seconds:.1} s",
        family.arch,
        count(total),
        size(bytes)
    ));
    Ok(())
}

/// The family of a folder, and its configuration with what the family takes for granted.
fn open(folder: &Path) -> Result<(&'static Family, Config), Failure> {
    let mut config = Config::open(folder)?;
    let family = family::by_name(&config)?;
    config.add_defaults(family.defaults);
    if family.head_dim {
        config.set("head_dim", config.head_dim()?);
    }
    if let Some((_, how)) = config.get(&["quantization_config"]) {
        let method = how
            .get("quant_method")
            .and_then(Json::as_str)
            .unwrap_or("unknown");
        if method != "mxfp4" {
            let what = format!(
                "the checkpoint is quantised ({method}): {}",
                checkpoint::QUANTISED
            );
            return Err(config.refuse(what));
        }
    }
    Ok((family, config))
}

/// What the file will hold.
struct Plan<'p> {
    folder: &'p Path,
    family: &'static Family,
    config: &'p Config,
    sources: &'p [Source<'p>],
    /// Layers, and blocks for multi-token prediction behind them.
    blocks: (u32, u32),
    tokenizer: &'p Tokenizer,
    tensors: &'p [layout::Tensor<'p>],
    /// Tensors made from the configuration.
    extra: Vec<Extra>,
    file_type: FileType,
}

impl<'p> Plan<'p> {
    /// Values of all tensors but those made from the configuration.
    fn n_values(&self) -> u64 {
        self.tensors
            .iter()
            .map(|tensor| tensor.dims.iter().product::<u64>())
            .sum()
    }

    fn write_metadata(&self, name: &str, writer: &mut Writer<'_>) -> Result<(), Failure> {
        let Plan {
            folder,
            family,
            config,
            tensors,
            ..
        } = self;
        writer.metadata("general.architecture", family.arch);
        writer.metadata("general.type", "model");
        write_sampling(folder, writer)?;
        writer.metadata("general.name", title(name));
        let n_expert = config.opt_u32(&[
            "num_local_experts",
            "num_experts",
            "n_routed_experts",
            "moe_num_experts",
            "moe_num_primary_experts",
            "ffn_config.moe_num_experts",
        ])?;
        let n_extra: u64 = self
            .extra
            .iter()
            .map(|(_, values)| values.len() as u64)
            .sum();
        writer.metadata(
            "general.size_label",
            size_label(self.n_values() + n_extra, tensors, n_expert),
        );
        family::write_keys(family, config, self.blocks, &mut |key, value| {
            writer.metadata(key, value);
        })?;
        for (key, numbers) in tensors::scalars(family, config, self.sources)? {
            writer.metadata(key, Value::Array(Array::F32(numbers)));
        }
        if let Some(pooling) = pooling(folder)? {
            writer.metadata(format!("{}.pooling_type", family.arch), pooling);
        }
        for tensor in tensors
            .iter()
            .filter(|tensor| tensor.name.starts_with("dense_"))
        {
            for (part, n) in ["in", "out"].into_iter().zip(&tensor.dims) {
                let name = tensor.name.trim_end_matches(".weight");
                writer.metadata(format!("{}.{name}_feat_{part}", family.arch), *n as u32);
            }
        }
        let mxfp4 = tensors.iter().any(|tensor| tensor.to == DType::MXFP4);
        writer.metadata(
            "general.file_type",
            if mxfp4 {
                MXFP4_EXPERTS
            } else {
                self.file_type as u32
            },
        );
        writer.metadata("general.quantization_version", 2u32);
        self.tokenizer.write(config, family, &mut |key, value| {
            writer.metadata(key, value);
        })?;
        Ok(())
    }

    /// Converts the tensors while the file is written.
    fn write_tensors(&self, rows: &'p Rows, verbose: bool, writer: &mut Writer<'p>) {
        for (name, values) in &self.extra {
            let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            writer.tensor(*name, &[values.len() as u64], DType::F32, data);
        }
        for tensor in self.tensors {
            if verbose {
                note(format!(
                    "{:<40} {:>8} -> {}",
                    printable(&tensor.name),
                    tensor.from.to_string(),
                    tensor.to
                ));
            }
            let n_rows = tensor.n_rows();
            let n = tensor.dims.iter().product::<u64>() as usize / n_rows;
            writer.tensor_with(&tensor.name, &tensor.dims, tensor.to, move |out| {
                let change = |i: usize, values: &mut [f32]| tensor.change(i, values);
                let change = tensor.is_changed().then_some(&change as &Change<'_>);
                let conversion = Conversion {
                    n,
                    from: tensor.from,
                    to: tensor.to,
                    change,
                    importance: None,
                };
                rows.write(&tensor.name, n_rows, |i| tensor.row(i), conversion, out)
            });
        }
    }
}
/// The name of a folder, also of `.`.
fn folder_name(folder: &Path) -> Result<String, Failure> {
    let path = std::fs::canonicalize(folder).map_err(Failure::file(folder))?;
    Ok(path.file_name().map_or_else(
        || "model".into(),
        |name| name.to_string_lossy().into_owned(),
    ))
}

/// A name for people: `qwen3-0.6b` becomes `Qwen3 0.6b`.
fn title(name: &str) -> String {
    let word = |word: &str| {
        let mut chars = word.chars();
        let is_version = word.starts_with(|c: char| c.is_ascii_digit());
        match chars.next() {
            Some(first) if !is_version && !word.contains(char::is_uppercase) => {
                first.to_uppercase().chain(chars).collect()
            }
            _ => word.to_owned(),
        }
    };
    name.split(['-', ' '])
        .filter(|part| !part.is_empty())
        .map(word)
        .collect::<Vec<String>>()
        .join(" ")
}

/// The modules of sentence-transformers whose type ends so: their folders and configurations.
fn modules(folder: &Path, kind: &str) -> Result<Vec<(PathBuf, Json)>, Failure> {
    let list = read_any_json(&folder.join("modules.json"))?;
    let all = list
        .iter()
        .flat_map(|modules| modules.as_array().into_iter().flatten());
    let modules = all
        .filter(|module| text(module, "type").ends_with(kind))
        .map(|module| {
            let path = text(module, "path");
            if !checkpoint::is_plain(path) {
                return Err(wrong_modules(
                    folder,
                    "the path of a module is not a folder in this one",
                ));
            }
            let config = read_json(&folder.join(path).join("config.json"))?.unwrap_or_default();
            Ok((folder.join(path), config))
        });
    modules.collect()
}

fn wrong_modules(folder: &Path, what: &str) -> Failure {
    Failure::Work(format!("{}: {what}", folder.join("modules.json").display()))
}

fn text<'j>(json: &'j Json, key: &str) -> &'j str {
    json.get(key).and_then(Json::as_str).unwrap_or("")
}

/// Adds the matrices that a model of sentence-transformers applies to its vectors.
fn add_dense(folder: &Path, checkpoint: &mut Checkpoint) -> Result<(), Failure> {
    for (i, (path, config)) in (2..).zip(modules(folder, "Dense")?) {
        if !matches!(
            text(&config, "activation_function"),
            "" | "torch.nn.modules.linear.Identity"
        ) {
            return Err(wrong_modules(
                folder,
                "a dense module with an activation function",
            ));
        }
        checkpoint.add(format!("dense_{i}."), path.join("model.safetensors"))?;
    }
    Ok(())
}

/// How a model of sentence-transformers makes one vector of a text's: 1 the mean, 2 the first, 3
/// the last.
fn pooling(folder: &Path) -> Result<Option<u32>, Failure> {
    let modules = modules(folder, "Pooling")?;
    let Some((_, config)) = modules.first() else {
        return Ok(None);
    };
    let is = |key: &str, mode: &str| {
        config.get(key) == Some(&Json::Bool(true)) || text(config, "pooling_mode") == mode
    };
    let modes = [
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_lasttoken", "lasttoken"),
    ];
    let mode = modes.iter().position(|(key, mode)| is(key, mode));
    let unknown = || wrong_modules(folder, "only mean, first and last pooling are known");
    mode.map(|mode| Some(mode as u32 + 1)).ok_or_else(unknown)
}

/// What `generation_config.json` recommends.
fn write_sampling(folder: &Path, writer: &mut Writer<'_>) -> Result<(), Failure> {
    let Some(config) = read_json(&folder.join("generation_config.json"))? else {
        return Ok(());
    };
    let number = |name: &str| config.get(name).and_then(Json::as_f64).map(|x| x as f32);
    if let Some(top_k) = config
        .get("top_k")
        .and_then(Json::as_i64)
        .and_then(|k| i32::try_from(k).ok())
    {
        writer.metadata("general.sampling.top_k", top_k);
    }
    let numbers = [
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("temperature", "temp"),
        ("repetition_penalty", "penalty_repeat"),
    ];
    for (from, to) in numbers {
        if let Some(number) = number(from) {
            writer.metadata(format!("general.sampling.{to}"), number);
        }
    }
    Ok(())
}

/// The size as names of models have it: `0.6B`, or `128x30B`-like for mixtures, where the second is
/// all of one expert's weights and those that all share.
fn size_label(total: u64, tensors: &[layout::Tensor<'_>], n_expert: Option<u32>) -> String {
    let Some(n_expert) = n_expert.filter(|n| *n > 0) else {
        return rounded(total);
    };
    let is_expert = |tensor: &&layout::Tensor<'_>| tensor.name.contains("_exps.weight");
    let experts: u64 = tensors
        .iter()
        .filter(is_expert)
        .map(|tensor| tensor.dims.iter().product::<u64>())
        .sum();
    format!(
        "{n_expert}x{}",
        rounded(total - experts + experts / u64::from(n_expert))
    )
}

/// A number with two digits at least.
fn rounded(n: u64) -> String {
    let (scaled, unit) = match n as f64 {
        n if n > 1e12 => (n * 1e-12, 'T'),
        n if n > 1e9 => (n * 1e-9, 'B'),
        n if n > 1e6 => (n * 1e-6, 'M'),
        n => (n * 1e-3, 'K'),
    };
    let whole = scaled.round_ties_even();
    let digits = if whole >= 10.0 {
        0
    } else if whole >= 1.0 {
        1
    } else {
        2
    };
    format!("{scaled:.digits$}{unit}")
}
