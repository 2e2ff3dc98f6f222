//! `ruvllm inspect`: what is in a GGUF file, from its header alone; the rest of the file need not
//! be there yet.

use crate::io::memory::Report;
use crate::io::plot::{Mark, Plot, Series};
use crate::io::runnable::obstacle;
use crate::io::{Failure, count, print, print_json, size};
use clap::ArgAction;
use ruvllm::Model;
use ruvllm::Tokenizer;
use ruvllm::engine::{MemoryPlan, PlanOptions};
use ruvllm::gguf::GgufError;
use ruvllm::gguf::{Array, Gguf, Header, Metadata, TensorInfo, Value};
use ruvllm::model::Hparams;
use ruvllm::quant::{DType, FileType};
use ruvllm::{KvType, SessionOptions, SystemMemory};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  ruvllm inspect model.gguf
  ruvllm inspect model.gguf --json
  ruvllm inspect model.gguf --metadata --tensors     everything in the header
  ruvllm inspect model.gguf --svg memory.svg         memory by context, drawn
  ruvllm inspect hf://Qwen/Qwen3-0.6B-GGUF:Q8_0      a file of Hugging Face's hub, of which nothing else is downloaded

Reads the header alone: a download that has just begun is enough.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// GGUF file, or hf://OWNER/NAME[:QUANT]
    #[arg(value_name = "FILE", required_unless_present = "model")]
    file: Option<PathBuf>,
    /// The same, as other subcommands name it
    #[arg(
        short,
        long,
        value_name = "FILE",
        conflicts_with = "file",
        env = "LLAMA_ARG_MODEL"
    )]
    model: Option<PathBuf>,
    /// All metadata
    #[arg(long, action = ArgAction::SetTrue)]
    metadata: bool,
    /// All tensors
    #[arg(long, action = ArgAction::SetTrue)]
    tensors: bool,
    /// Draw the memory of a session by its context into this file, with a KV cache of 16, 8 and 4
    /// bits
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What there is to know.
struct Findings {
    header: Header,
    /// Bytes of the file, or of all files of a split model.
    file_size: u64,
    /// Which part of how many, if the others were not found.
    part: Option<(u64, u64)>,
    /// Bytes the file should have, if it has fewer.
    expected_size: Option<u64>,
    hparams: Option<Hparams>,
    tokenizer: Option<Tokenizer>,
    /// Why this build cannot run it.
    obstacle: Option<String>,
    /// Whether it has a block for multi-token prediction that can draft, or why the one that it
    /// has cannot.
    mtp: Result<bool, String>,
    memory: Option<Report>,
    /// If it reads images for models.
    #[cfg(feature = "vision")]
    projector: Option<ruvllm::vision::ProjectorInfo>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let Some(path) = args.file.as_ref().or(args.model.as_ref()) else {
        return Err(Failure::Usage("no file".into()));
    };
    let findings = match path.to_str().and_then(|path| path.strip_prefix("hf://")) {
        Some(name) => examine(on_hub(name)?, None)?,
        None => examine(in_file(path)?, Some(path))?,
    };
    if let Some(to) = &args.svg {
        plot(path, &findings)?.write(to)?;
    }
    if args.json {
        print_json(&as_json(path, &findings, args))
    } else {
        print(as_text(path, &findings, args))
    }
}

/// A header, and what is known of the bytes behind it.
struct Found {
    header: Header,
    /// As in [`Findings`].
    file_size: u64,
    part: Option<(u64, u64)>,
    expected_size: Option<u64>,
}

/// The header of a model of Hugging Face's hub.
#[cfg(feature = "pull")]
fn on_hub(name: &str) -> Result<Found, Failure> {
    use ruvllm::hub::{HubOptions, header};
    let found = header(&name.parse()?, &HubOptions::default())?;
    Ok(Found {
        header: found.header,
        file_size: found.bytes,
        part: None,
        expected_size: None,
    })
}

#[cfg(not(feature = "pull"))]
fn on_hub(name: &str) -> Result<Found, Failure> {
    Err(Failure::Usage(format!(
        "hf://{name}: this build does not ask the hub (feature `pull`)"
    )))
}

/// The header of a file.
fn in_file(path: &Path) -> Result<Found, Failure> {
    let mut file_size = std::fs::metadata(path).map_err(Failure::file(path))?.len();
    let mut expected_size = None;
    let mut header = match Header::read(path) {
        Ok(header) => header,
        Err(error) => match error.cause() {
            GgufError::Truncated { expected, .. } => {
                expected_size = Some(*expected);
                header_of_beginning(path, *expected)?
            }
            _ => return Err(error.into()),
        },
    };
    let count = header
        .metadata
        .opt_u64("split.count")
        .ok()
        .flatten()
        .unwrap_or(1);
    let mut part = None;
    if count > 1 {
        match Gguf::open(path) {
            Ok(whole) => {
                file_size = whole.file_size();
                header = whole.header().clone();
            }
            Err(_) => {
                part = Some((
                    header
                        .metadata
                        .opt_u64("split.no")
                        .ok()
                        .flatten()
                        .unwrap_or(0)
                        + 1,
                    count,
                ))
            }
        }
    }
    Ok(Found {
        header,
        file_size,
        part,
        expected_size,
    })
}

/// What a header tells, and the model at `path` if all of it is there.
fn examine(found: Found, path: Option<&Path>) -> Result<Findings, Failure> {
    let Found {
        header,
        file_size,
        part,
        expected_size,
    } = found;
    let hparams = Hparams::of(&header.metadata, &header.tensors);
    let tokenizer = Tokenizer::opt_from_metadata(&header.metadata);
    let mut model = None;
    let obstacle = match obstacle(&header, &hparams, &tokenizer) {
        // Parts know nothing of each other's tensors.
        _ if hparams.is_err() && part.is_some_and(|(no, _)| no > 1) => {
            Some("the first part of the model tells; it was not found".into())
        }
        Some(obstacle) => Some(obstacle),
        None if expected_size.is_none() && part.is_none() => match path.map(Model::open) {
            Some(Ok(opened)) => {
                model = Some(opened);
                None
            }
            Some(Err(error)) => Some(error.to_string()),
            None => None,
        },
        _ => None,
    };
    let of_header = |h: &Hparams| {
        MemoryPlan::of_header(&header, h, &PlanOptions::default()).map(Report::of_plan)
    };
    let memory = match (&model, &hparams) {
        (Some(model), _) => Report::of(model).ok(),
        (None, Ok(h)) => of_header(h).ok(),
        (None, Err(_)) => None,
    };
    let mtp = model.as_ref().map_or(Ok(false), |model| {
        model.has_mtp().map_err(ToString::to_string)
    });
    #[cfg(feature = "vision")]
    let projector = ruvllm::vision::ProjectorInfo::of(&header.metadata).ok();
    #[cfg(feature = "vision")]
    let obstacle = match &projector {
        Some(of) => Some(format!(
            "it reads images for a model: --mmproj FILE beside -m MODEL of the architecture {}",
            of.models.join(" or ")
        )),
        None => obstacle,
    };
    Ok(Findings {
        #[cfg(feature = "vision")]
        projector,
        header,
        file_size,
        part,
        expected_size,
        hparams: hparams.ok(),
        tokenizer: tokenizer.ok().flatten(),
        obstacle,
        mtp,
        memory,
    })
}

/// Memory of one session by the length of its context, and what there is.
fn plot(path: &Path, findings: &Findings) -> Result<Plot, Failure> {
    /// Contexts on a line.
    const N: usize = 32;
    let h = findings.hparams.as_ref().ok_or_else(|| {
        Failure::Work("--svg: the file's header does not say what a session takes".into())
    })?;
    let plan = |n_ctx, kv_type| {
        let options = PlanOptions::from(SessionOptions {
            n_ctx: Some(n_ctx),
            kv_type,
            ..SessionOptions::default()
        });
        Ok::<_, Failure>(MemoryPlan::of_header(&findings.header, h, &options)?.needed())
    };
    let most = plan(h.n_ctx_train, KvType::F16)?;
    let (unit, shift) = if most < 2 << 30 {
        ("MiB", 20)
    } else {
        ("GiB", 30)
    };
    let in_unit = |bytes: u64| bytes as f64 / f64::from(1u32 << shift);
    let mut series = Vec::new();
    for kv_type in [KvType::F16, KvType::Q8, KvType::Q4] {
        let mut points = Vec::new();
        for i in 1..=N {
            let n_ctx = (h.n_ctx_train * i).div_ceil(N);
            points.push((n_ctx as f64, in_unit(plan(n_ctx, kv_type)?)));
        }
        series.push(Series {
            name: format!("KV cache in {kv_type}"),
            mark: Mark::Line,
            points,
            labels: Vec::new(),
        });
    }
    let here = SystemMemory::now().map(|memory| memory.available);
    // Far above, it would hide the lines.
    if let Some(here) = here.filter(|&here| here / 2 < most).map(in_unit) {
        series.push(Series {
            name: "free here".into(),
            mark: Mark::Dashes,
            points: vec![(0.0, here), (h.n_ctx_train as f64, here)],
            labels: Vec::new(),
        });
    }
    let name = path.file_name().unwrap_or(path.as_os_str());
    Ok(Plot {
        title: name.to_string_lossy().into_owned(),
        x_label: "context, tokens".into(),
        y_label: format!("memory, {unit}"),
        is_log: false,
        series,
    })
}

/// The header of a file whose end is missing.
fn header_of_beginning(path: &Path, whole: u64) -> Result<Header, Failure> {
    let file = File::open(path).map_err(Failure::file(path))?;
    let mut beginning = Vec::new();
    let mut want = 1 << 20;
    loop {
        let n = (&file)
            .take(want)
            .read_to_end(&mut beginning)
            .map_err(Failure::file(path))?;
        match Header::parse(&beginning, whole) {
            Err(GgufError::HeaderIncomplete { .. }) if n > 0 => want = 4 * beginning.len() as u64,
            other => {
                return other
                    .map_err(|error| Failure::Work(format!("{}: {error}", path.display())));
            }
        }
    }
}

/// Tensors, elements and bytes of each type.
fn types(tensors: &[TensorInfo]) -> Vec<(DType, usize, u64, u64)> {
    let mut by_type: BTreeMap<DType, (usize, u64, u64)> = BTreeMap::new();
    for t in tensors {
        let entry = by_type.entry(t.dtype).or_default();
        *entry = (entry.0 + 1, entry.1 + t.n_elems(), entry.2 + t.n_bytes);
    }
    let mut types: Vec<_> = by_type
        .into_iter()
        .map(|(dtype, (n, elems, bytes))| (dtype, n, elems, bytes))
        .collect();
    types.sort_by_key(|&(.., bytes)| std::cmp::Reverse(bytes));
    types
}

fn sums(tensors: &[TensorInfo]) -> (u64, u64) {
    tensors.iter().fold((0, 0), |(elems, bytes), t| {
        (elems + t.n_elems(), bytes + t.n_bytes)
    })
}

fn bits_per_weight(elems: u64, bytes: u64) -> f64 {
    if elems == 0 {
        0.0
    } else {
        (bytes as f64 * 8.0 / elems as f64 * 1e3).round() / 1e3
    }
}

fn text<'a>(metadata: &'a Metadata, key: &str) -> Option<&'a str> {
    metadata.opt_str(key).ok().flatten()
}

fn file_type(metadata: &Metadata) -> Option<String> {
    let id = metadata.opt_u32("general.file_type").ok().flatten()?;
    let name = FileType::from_id(id).map(|t| t.to_string());
    Some(name.unwrap_or_else(|| format!("number {id}")))
}

/// A size of all layers: one number if they are alike.
fn by_layer(sizes: impl Iterator<Item = usize>) -> serde_json::Value {
    let sizes: Vec<usize> = sizes.collect();
    if sizes.iter().all(|n| *n == sizes[0]) {
        sizes.first().copied().into()
    } else {
        sizes.into()
    }
}

fn range(sizes: impl Iterator<Item = usize>) -> String {
    let (min, max) = sizes.fold((usize::MAX, 0), |(min, max), n| (min.min(n), max.max(n)));
    if min == max {
        min.to_string()
    } else {
        format!("{min} to {max}")
    }
}

fn as_json(path: &Path, f: &Findings, args: &Args) -> serde_json::Value {
    let Header {
        metadata: m,
        tensors,
        ..
    } = &f.header;
    let (n_params, tensor_bytes) = sums(tensors);
    let key = |name: &str| {
        m.opt_u64(&format!(
            "{}.{name}",
            text(m, "general.architecture").unwrap_or("")
        ))
        .ok()
        .flatten()
    };
    let mut value = json!({
        "file": path.display().to_string(),
        "file_size": f.file_size,
        "complete": f.expected_size.is_none() && f.part.is_none(),
        "expected_size": f.expected_size,
        "gguf_version": f.header.version,
        "architecture": text(m, "general.architecture"),
        "name": text(m, "general.name"),
        "runnable": f.obstacle.is_none(),
        "obstacle": f.obstacle,
        "n_params": n_params,
        "n_tensors": tensors.len(),
        "tensor_bytes": tensor_bytes,
        "bits_per_weight": bits_per_weight(n_params, tensor_bytes),
        "file_type": file_type(m),
        "types": types(tensors).into_iter().map(|(dtype, n, elems, bytes)| {
            (dtype.to_string(), json!({"tensors": n, "params": elems, "bytes": bytes}))
        }).collect::<serde_json::Map<_, _>>(),
        "n_ctx_train": key("context_length"),
        "n_embd": key("embedding_length"),
        "n_layer": key("block_count"),
        "n_head": f.hparams.as_ref().map(|h| by_layer(h.attention().map(|attn| attn.n_head))),
        "n_head_kv": f.hparams.as_ref().map(|h| by_layer(h.attention().map(|attn| attn.n_head_kv))),
        "head_dim": f.hparams.as_ref().map(|h| by_layer(h.attention().map(|attn| attn.head_dim))),
        "n_ff": f.hparams.as_ref().map(|h| by_layer(h.layers.iter().map(|layer| layer.ffn.n_ff()))),
        "n_expert": key("expert_count"),
        "n_expert_used": key("expert_used_count"),
        "tokenizer": text(m, "tokenizer.ggml.model").map(|model| json!({
            "model": model,
            "pre": text(m, "tokenizer.ggml.pre"),
            "n_vocab": m.opt_strings("tokenizer.ggml.tokens").ok().flatten().map(|tokens| tokens.len()),
            "bos": f.tokenizer.as_ref().and_then(Tokenizer::bos),
            "eos": f.tokenizer.as_ref().and_then(Tokenizer::eos),
            "add_bos": f.tokenizer.as_ref().map(Tokenizer::add_bos),
        })),
        "chat_template": m.get("tokenizer.chat_template").is_some(),
        "projector": projector_json(f),
        "mtp": f.mtp.as_ref().is_ok_and(|has_mtp| *has_mtp),
        "mtp_obstacle": f.mtp.as_ref().err(),
        "memory": f.memory.as_ref().map(Report::json),
    });
    if args.metadata {
        value["metadata"] = m
            .iter()
            .map(|(key, value)| (key.to_owned(), value_json(value)))
            .collect::<serde_json::Map<_, _>>()
            .into();
    }
    if args.tensors {
        value["tensors"] = tensors
            .iter()
            .map(|t| json!({"name": t.name, "type": t.dtype.to_string(), "dims": t.dims, "offset": t.offset, "bytes": t.n_bytes}))
            .collect();
    }
    value
}

/// A projector in words.
#[cfg(feature = "vision")]
fn projector_text(of: &ruvllm::vision::ProjectorInfo) -> String {
    let mut text = format!("{}, for models of {}", of.kind, of.models.join(", "));
    if let Some(n) = of.n_embd {
        let _ = write!(text, ", embeddings of {n}");
    }
    if let (Some(image), Some(patch)) = (of.image_size, of.patch_size) {
        let _ = write!(text, ", images of {image} pixels in patches of {patch}");
    }
    text
}

#[cfg(feature = "vision")]
fn projector_json(f: &Findings) -> serde_json::Value {
    f.projector.as_ref().map_or(serde_json::Value::Null, |of| {
        json!({
            "kind": of.kind, "models": of.models, "n_embd": of.n_embd,
            "image_size": of.image_size, "patch_size": of.patch_size,
        })
    })
}

#[cfg(not(feature = "vision"))]
fn projector_json(_: &Findings) -> serde_json::Value {
    serde_json::Value::Null
}

fn value_json(value: &Value) -> serde_json::Value {
    match value {
        Value::U8(v) => json!(v),
        Value::I8(v) => json!(v),
        Value::U16(v) => json!(v),
        Value::I16(v) => json!(v),
        Value::U32(v) => json!(v),
        Value::I32(v) => json!(v),
        Value::U64(v) => json!(v),
        Value::I64(v) => json!(v),
        Value::F32(v) => json!(v),
        Value::F64(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::String(v) => json!(v),
        Value::Bytes(v) => json!(String::from_utf8_lossy(v)),
        Value::Array(v) => array_json(v),
    }
}

fn array_json(array: &Array) -> serde_json::Value {
    match array {
        Array::U8(v) => json!(v),
        Array::I8(v) => json!(v),
        Array::U16(v) => json!(v),
        Array::I16(v) => json!(v),
        Array::U32(v) => json!(v),
        Array::I32(v) => json!(v),
        Array::U64(v) => json!(v),
        Array::I64(v) => json!(v),
        Array::F32(v) => json!(v),
        Array::F64(v) => json!(v),
        Array::Bool(v) => json!(v),
        Array::Strings(v) => v
            .iter()
            .map(|bytes| json!(String::from_utf8_lossy(bytes)))
            .collect(),
        Array::Arrays(v) => v.iter().map(array_json).collect(),
    }
}

fn as_text(path: &Path, f: &Findings, args: &Args) -> String {
    let Header {
        metadata: m,
        tensors,
        ..
    } = &f.header;
    let mut out = String::new();
    let mut line = |label: &str, value: String| {
        let _ = writeln!(out, "{label:<14} {}", printable(&value));
    };
    line(
        "file",
        format!(
            "{} ({}, GGUF version {})",
            path.display(),
            size(f.file_size),
            f.header.version
        ),
    );
    if let Some(expected) = f.expected_size {
        line(
            "incomplete",
            format!("{} of {} are here", size(f.file_size), size(expected)),
        );
    }
    if let Some((no, count)) = f.part {
        line(
            "part",
            format!("{no} of {count}; the numbers below are this part's"),
        );
    }
    line(
        "architecture",
        text(m, "general.architecture")
            .unwrap_or("not stated")
            .into(),
    );
    if let Some(name) = text(m, "general.name") {
        line("name", name.into());
    }
    weights(m, tensors, &mut line);
    if let Some(h) = &f.hparams {
        shape(m, h, &mut line);
    }
    #[cfg(feature = "vision")]
    if let Some(projector) = &f.projector {
        line("projector", projector_text(projector));
    }
    match &f.mtp {
        Ok(true) => line("multi-token", "a block that drafts with --spec mtp".into()),
        Ok(false) => {}
        Err(obstacle) => line("multi-token", format!("ignored: {obstacle}")),
    }
    match text(m, "tokenizer.ggml.model") {
        Some(model) => {
            let pre = text(m, "tokenizer.ggml.pre")
                .map_or(String::new(), |pre| format!(", pre-tokenizer {pre}"));
            let n = m
                .opt_strings("tokenizer.ggml.tokens")
                .ok()
                .flatten()
                .map_or(0, |tokens| tokens.len());
            line("tokenizer", format!("{model}{pre}, {n} tokens"));
        }
        None => line("tokenizer", "none".into()),
    }
    line(
        "chat template",
        if m.get("tokenizer.chat_template").is_some() {
            "yes".into()
        } else {
            "no".into()
        },
    );
    f.memory
        .iter()
        .flat_map(Report::lines)
        .for_each(|(label, text)| line(label, text));
    let verdict = match (&f.obstacle, f.expected_size, f.part) {
        (Some(obstacle), ..) => format!("no: {obstacle}"),
        (None, None, None) => "yes".into(),
        (None, ..) => "yes, once it is complete".into(),
    };
    line("runs here", verdict);
    lists(m, tensors, args, &mut out);
    out
}

/// Lines about numbers and types of weights.
fn weights(m: &Metadata, tensors: &[TensorInfo], line: &mut impl FnMut(&str, String)) {
    if tensors.is_empty() {
        return;
    }
    let (n_params, tensor_bytes) = sums(tensors);
    line(
        "parameters",
        format!("{} in {} tensors", count(n_params), tensors.len()),
    );
    let stated = file_type(m).map_or(String::new(), |t| format!("{t}, "));
    line(
        "type",
        format!(
            "{stated}{} bits per weight, {}",
            bits_per_weight(n_params, tensor_bytes),
            size(tensor_bytes)
        ),
    );
    for (dtype, n, elems, bytes) in types(tensors) {
        line(
            "",
            format!(
                "{dtype:<8} {n:>5} tensors {:>10} parameters {:>12}",
                count(elems),
                size(bytes)
            ),
        );
    }
}

/// Lines about context and layers.
fn shape(m: &Metadata, h: &Hparams, line: &mut impl FnMut(&str, String)) {
    let window = h.attention().find_map(|attn| attn.window);
    let window = window.map_or(String::new(), |size| format!(", sliding window {size}"));
    line("context", format!("{} tokens{window}", h.n_ctx_train));
    let experts = m
        .opt_u64(&format!("{}.expert_count", h.arch))
        .ok()
        .flatten()
        .filter(|&n| n > 0);
    let experts = experts.map_or(String::new(), |n| format!(", {n} experts"));
    line(
        "shape",
        format!(
            "{} layers, width {}, {} heads of {} ({} for keys and values), feed-forward {}{experts}",
            h.n_layer,
            h.n_embd,
            range(h.attention().map(|attn| attn.n_head)),
            range(h.attention().map(|attn| attn.head_dim)),
            range(h.attention().map(|attn| attn.n_head_kv)),
            range(h.layers.iter().map(|layer| layer.ffn.n_ff()))
        ),
    );
}

/// All metadata and all tensors, if they are asked for.
fn lists(m: &Metadata, tensors: &[TensorInfo], args: &Args, out: &mut String) {
    if args.metadata {
        let _ = writeln!(out, "\nmetadata");
        for (key, value) in m.iter() {
            let _ = writeln!(
                out,
                "  {}: {} = {}",
                printable(key),
                value.type_name(),
                printable(&shortened(value))
            );
        }
    }
    if args.tensors {
        let _ = writeln!(out, "\ntensors");
        for t in tensors {
            let _ = writeln!(
                out,
                "  {:<40} {:<8} {:?}",
                printable(&t.name),
                t.dtype.to_string(),
                t.dims
            );
        }
    }
}

/// `text` on one line.
fn printable(text: &str) -> String {
    crate::io::printable(text).replace('\n', "\u{fffd}")
}

/// A value on one line.
fn shortened(value: &Value) -> String {
    const MAX: usize = 100;
    let text = match value {
        Value::Array(array) => {
            let start = match array {
                Array::Strings(v) => v
                    .iter()
                    .take(8)
                    .map(|s| format!("{:?}", String::from_utf8_lossy(s)))
                    .collect::<Vec<_>>()
                    .join(", "),
                other => format!("{other:?}"),
            };
            format!("{} values: {start}", array.len())
        }
        other => value_json(other).to_string(),
    };
    match text.char_indices().nth(MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
