//! A GGUF file from a folder of Hugging Face.
//!
//! `config.rs` reads the configuration, `family/` the table of families, `tensors.rs` lays the
//! tensors out, `tokenizer.rs` reads the vocabulary; `quantised.rs` says how a checkpoint is quantised,
//! `packed.rs` and `float8.rs` give the rows of such. What is written is what llama.cpp's
//! `convert_hf_to_gguf.py` writes, but for what `docs/guide/convert.md` lists.

mod checkpoint;
mod config;
mod family;
mod float8;
mod layout;
mod packed;
pub(crate) mod projector;
mod quantised;
mod raw;
mod sentencepiece;
mod tensors;
mod tokenizer;
mod world;

use crate::io::{Failure, Progress, check_overwrite, count, note, printable, size};
use crate::quantize::{Rows, recipe_failure};
use checkpoint::{Checkpoint, Source};
use config::{Config, read_any_json, read_json};
use family::{Extra, Family};
use layout::OutTypes;
use quantised::Method;
use ruvllm::Model;
use ruvllm::gguf::{Array, Gguf, MappedFile, Value, Writer, content_hash};
use ruvllm::model::quantize::{Described, Recipe, file_name, model_shape};
use ruvllm::quant::{Conversion, DType, FileType, Loss};
use serde_json::Value as Json;
use std::cell::Cell;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tokenizer::Tokenizer;

/// What to convert, and how.
pub(crate) struct Conversions<'c> {
    /// Folder with config.json, model*.safetensors and the tokenizer's files.
    pub(crate) folder: &'c Path,
    pub(crate) outtype: OutType<'c>,
    /// Whether blocks for multi-token prediction are left out.
    pub(crate) no_mtp: bool,
    pub(crate) n_threads: Option<NonZeroUsize>,
    /// Whether the type of each tensor is told.
    pub(crate) verbose: bool,
}

/// The file to write.
pub(crate) struct OutFile<'c> {
    /// Without one, the folder's name and the type.
    pub(crate) path: Option<&'c Path>,
    pub(crate) overwrite: bool,
}

/// `general.file_type` of files whose experts are MXFP4 (llama.cpp's `MOSTLY_MXFP4_MOE`).
const MXFP4_EXPERTS: u32 = 38;

/// Types of matrices.
#[derive(Clone, Copy)]
pub(crate) enum OutType<'c> {
    /// 16 bits: those of the checkpoint, if it has such, and else F16. Quantised matrices keep
    /// their values.
    Auto,
    /// One type.
    One(FileType),
    /// The types of a recipe.
    Mix(&'c Recipe),
}

impl OutType<'_> {
    fn file_type(self, sources: &[Source<'_>]) -> FileType {
        let matrices = sources.iter().filter(|source| source.shape.len() > 1);
        let mut of_floats = matrices.filter_map(|source| source.plain().map(|_| source.dtype));
        match self {
            OutType::One(file_type) => file_type,
            OutType::Mix(recipe) => recipe.file_type,
            OutType::Auto => match of_floats.find(|dtype| *dtype != DType::F32) {
                Some(DType::BF16) => FileType::BF16,
                _ => FileType::F16,
            },
        }
    }
}

/// Converts a folder into a file.
pub(crate) fn convert(what: &Conversions<'_>, to: &OutFile<'_>) -> Result<(), Failure> {
    let start = Instant::now();
    with_plan(what, |plan| {
        let (family, file_type) = (plan.family, plan.file_type);
        let output = to.path.map(Path::to_owned).unwrap_or_else(|| {
            // Beside the folder, whatever its path looks like.
            let name = format!("{}-{file_type}.gguf", plan.name);
            what.folder.join("..").join(name)
        });
        check_overwrite(&output, to.overwrite)?;
        let total = plan.n_values();
        let rows = Rows::new("converting", total, what.n_threads)?;
        let mut writer = plan.writer(&rows, what.verbose)?;
        if to.overwrite {
            writer.overwrite();
        }
        let written = writer.write(&output);
        rows.finish(written)?;
        // A tensor may be missing, or have a shape that the configuration does not tell.
        if let Err(error) = Model::open(&output) {
            let _ = std::fs::remove_file(&output);
            return Err(no_model(what.folder, error));
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
        plan.tell_loss();
        Ok(())
    })
}

/// Converts a folder in memory, or into a file of the folder `cache` that is named by a hash of all
/// that is in it, and is made once.
pub(crate) fn open_converted(
    what: &Conversions<'_>,
    cache: Option<&Path>,
) -> Result<Gguf, Failure> {
    with_plan(what, |plan| {
        let kept = match cache {
            None => None,
            Some(cache) => Some(cache.join(plan.cached_name()?)),
        };
        if let Some(Ok(gguf)) = kept.as_ref().map(Gguf::open) {
            return Ok(gguf);
        }
        let progress = Progress::new("converting", plan.n_values());
        let rows = Rows::in_memory(progress, what.n_threads)?;
        let writer = plan.writer(&rows, what.verbose)?;
        let gguf = match (&kept, cache) {
            (Some(path), Some(cache)) => {
                std::fs::create_dir_all(cache).map_err(Failure::file(cache))?;
                let mut writer = writer;
                writer.overwrite();
                writer.write(path).and_then(|()| Gguf::open(path))
            }
            _ => Gguf::from_writer(writer),
        };
        let gguf = rows.finish(gguf)?;
        plan.tell_loss();
        Ok(gguf)
    })
}

fn no_model(folder: &Path, error: impl std::fmt::Display) -> Failure {
    let folder = folder.display();
    Failure::Work(format!("{folder}: what is in it makes no model: {error}"))
}

/// Lays out what a folder becomes.
fn with_plan<T>(
    what: &Conversions<'_>,
    then: impl FnOnce(&Plan<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let folder = what.folder;
    let (family, mut config) = open(folder)?;
    let method = Method::of(&config)?;
    if method.is_packed() && matches!(what.outtype, OutType::Mix(_)) {
        return Err(config.refuse(
            "the checkpoint is quantised already, and would lose twice: open it as it is, or quantise the model that it was made of",
        ));
    }
    let n_layer = config.u32("num_hidden_layers")?;
    let mut checkpoint = Checkpoint::open(folder)?;
    if family.arch == "gemma-embedding" {
        add_dense(folder, &mut checkpoint)?;
    }
    let (sources, n_left_out) =
        checkpoint.tensors(method, |name| tensors::is_left_out(family, name))?;
    let n_block = if what.no_mtp {
        0
    } else {
        tensors::n_blocks(family, &config, &sources, n_layer)?
    };
    config.add_layers(n_block)?;
    let blocks = (n_layer, n_block);
    let tokenizer = Tokenizer::open(folder, &config)?;
    let file_type = what.outtype.file_type(&sources);
    let types = OutTypes {
        base: match what.outtype {
            OutType::Mix(_) => DType::F16,
            _ => file_type.base(),
        },
        keeps_quantised: matches!(what.outtype, OutType::Auto),
    };
    let tensors = tensors::plan(
        family,
        &config,
        &sources,
        n_left_out,
        blocks,
        tokenizer.len(),
        types,
    )?;
    let mut plan = Plan {
        folder,
        name: folder_name(folder)?,
        checkpoint: &checkpoint,
        family,
        config: &config,
        sources: &sources,
        blocks,
        tokenizer: &tokenizer,
        importance: vec![None; tensors.len()],
        tensors,
        extra: (family.extra)(&config)?,
        file_type,
        loss: Cell::default(),
    };
    if let OutType::Mix(recipe) = what.outtype {
        plan.mix(recipe)?;
    }
    then(&plan)
}

/// The family of a folder, and its configuration with what the family takes for granted.
fn open(folder: &Path) -> Result<(&'static Family, Config), Failure> {
    let mut config = Config::open(folder)?;
    let family = family::by_name(&config)?;
    config.add_defaults(family.defaults);
    if family.head_dim {
        config.set("head_dim", config.head_dim()?);
    }
    Ok((family, config))
}

/// What the file will hold.
struct Plan<'p> {
    folder: &'p Path,
    /// The folder's.
    name: String,
    checkpoint: &'p Checkpoint,
    family: &'static Family,
    config: &'p Config,
    sources: &'p [Source<'p>],
    /// Layers, and blocks for multi-token prediction behind them.
    blocks: (u32, u32),
    tokenizer: &'p Tokenizer,
    tensors: Vec<layout::Tensor<'p>>,
    /// Importance of the weights of each.
    importance: Vec<Option<Vec<f32>>>,
    /// Tensors made from the configuration.
    extra: Vec<Extra>,
    file_type: FileType,
    /// Matrices whose packed values no blocks hold, and what their new types lose.
    loss: Cell<(usize, Loss)>,
}

impl<'p> Plan<'p> {
    /// Values of all tensors but those made from the configuration.
    fn n_values(&self) -> u64 {
        self.tensors
            .iter()
            .map(|tensor| tensor.dims.iter().product::<u64>())
            .sum()
    }

    /// Gives the tensors the types of the recipe.
    fn mix(&mut self, recipe: &Recipe) -> Result<(), Failure> {
        let mut writer = Writer::new();
        self.write_metadata(&mut writer)?;
        let mut shape = model_shape(&Gguf::from_bytes(writer.to_bytes()?)?);
        let is_output = |tensor: &layout::Tensor<'_>| tensor.name == "output.weight";
        shape.tied_embeddings = !self.tensors.iter().any(is_output);
        // Blocks that hold the values of the checkpoint stay.
        let is_free = |tensor: &layout::Tensor<'_>| tensor.to != DType::MXFP4;
        let free = self.tensors.iter().filter(|tensor| is_free(tensor));
        let described = free.map(|tensor| Described {
            name: &tensor.name,
            dims: &tensor.dims,
            dtype: tensor.to,
        });
        let described: Vec<_> = described.collect();
        let assigned = recipe.assign(&described, shape).map_err(recipe_failure)?;
        let tensors = self.tensors.iter_mut().zip(&mut self.importance);
        let free = tensors.filter(|(tensor, _)| is_free(tensor));
        for ((tensor, known), (to, importance)) in free.zip(assigned) {
            tensor.to = to;
            *known = importance;
        }
        Ok(())
    }

    /// The name of the file in a cache: by a hash of what the folder holds and of the types.
    fn cached_name(&self) -> Result<String, Failure> {
        let assigned = self.tensors.iter().zip(&self.importance);
        let assigned = assigned
            .map(|(tensor, importance)| (&tensor.name[..], tensor.to, importance.as_deref()));
        Ok(file_name(self.file_type, self.content_hash()?, assigned))
    }

    /// A hash of all files of the folder, and of those that a model has elsewhere.
    fn content_hash(&self) -> Result<u64, Failure> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(self.folder).map_err(Failure::file(self.folder))? {
            let path = entry.map_err(Failure::file(self.folder))?.path();
            let found = std::fs::metadata(&path).map_err(Failure::file(&path))?;
            // The checkpoint has the others.
            let is_weights = path.extension().is_some_and(|end| end == "safetensors");
            if found.is_file() && found.len() > 0 && !is_weights {
                files.push((path.clone(), MappedFile::open(&path)?));
            }
        }
        files.sort_by(|(a, _), (b, _)| a.cmp(b));
        let names = files.iter().filter_map(|(path, _)| path.file_name());
        let names = names.map(|name| name.as_encoded_bytes());
        let files = files.iter().map(|(_, bytes)| &bytes[..]);
        Ok(content_hash(
            names.chain(files).chain(self.checkpoint.bytes()),
        ))
    }

    /// The file, converted while it is written.
    fn writer(&'p self, rows: &'p Rows, verbose: bool) -> Result<Writer<'p>, Failure> {
        let mut writer = Writer::new();
        self.write_metadata(&mut writer)?;
        self.write_tensors(rows, verbose, &mut writer);
        Ok(writer)
    }

    /// Tells what a second rounding has lost.
    fn tell_loss(&self) {
        let (n, loss) = self.loss.get();
        if n > 0 {
            let percent = 100.0 * loss.relative();
            note(format!(
                "{n} matrices have groups that no block format holds (sorted by activations, or scales that are not F16): their values were rounded again, with an error of {percent:.2} % (root mean square)"
            ));
        }
    }

    fn write_metadata(&self, writer: &mut Writer<'_>) -> Result<(), Failure> {
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
        writer.metadata("general.name", title(&self.name));
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
    fn write_tensors(&'p self, rows: &'p Rows, verbose: bool, writer: &mut Writer<'p>) {
        for (name, values) in &self.extra {
            let data: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            writer.tensor(*name, &[values.len() as u64], DType::F32, data);
        }
        for (tensor, importance) in self.tensors.iter().zip(&self.importance) {
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
                let change = tensor
                    .is_changed()
                    .then_some(&change as &(dyn Fn(usize, &mut [f32]) + Sync));
                let rows_per_matrix = tensor.dims.get(1).map_or(1, |&n| n.max(1) as usize);
                let conversion = Conversion {
                    n,
                    from: tensor.from,
                    to: tensor.to,
                    change,
                    rows_per_matrix,
                    importance: importance.as_deref(),
                    feedback: &[],
                };
                let (converter, row) = (&rows.converter, |i| tensor.row(i));
                if !tensor.is_repacked() {
                    return converter.write(&tensor.name, n_rows, row, conversion, out);
                }
                let loss = converter.write_measured(&tensor.name, n_rows, row, conversion, out)?;
                let (n, all) = self.loss.get();
                self.loss.set((n + 1, all + loss));
                Ok(())
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
