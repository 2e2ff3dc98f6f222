//! llama.cpp's spelling of flags, made palatable to clap: short flags of several letters (`-ub`),
//! underscores (`--top_k`), no subcommand. Flags that llama.cpp has and this program has not are
//! refused with what to do instead, never ignored.

use super::renamed;
use crate::io::Failure;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};
use std::ffi::OsString;

/// What measures, and its default subcommand: llama-bench has none.
const BENCH: &str = "bench";
const SPEED: &str = "speed";

/// Short flags of several letters, and their long form.
const MULTI_LETTER: &[(&str, &str)] = &[
    ("-ub", "--ubatch-size"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    #[cfg(feature = "pull")]
    ("-hf", "--hf-repo"),
    #[cfg(feature = "pull")]
    ("-hfr", "--hf-repo"),
    ("-jf", "--json-schema-file"),
    ("-md", "--model-draft"),
    ("-np", "--parallel"),
    ("-to", "--timeout"),
    ("-npp", "--n-prompt"),
    ("-ntg", "--n-gen"),
    ("-npl", "--n-sequences"),
    ("-pps", "--prompt-shared"),
    ("-sys", "--system-prompt"),
    ("-sysf", "--system-prompt-file"),
    #[cfg(any(feature = "metal", feature = "webgpu", target_os = "macos"))]
    ("-ngl", "--n-gpu-layers"),
    #[cfg(feature = "webgpu")]
    ("-dev", "--device"),
];

const CPU_ONLY: &str = "this subcommand computes on the CPU; leave it out";
const ONE_GPU: &str = "a model is on one GPU; -ngl N says how many of its layers, in builds with the feature `webgpu` or `metal`";
const LEAVE_OUT: &str = "there is nothing to switch here; leave it out";
const FROM_FILE: &str = "this comes from the model file; leave it out";
const NOT_YET: &str = "this is not supported";
const CHAT: &str = "use the subcommand: ruvllm chat";
const CHAT_ALONE: &str = "only `ruvllm chat` has it";
const MAPPED: &str = "model files are always memory-mapped; leave it out";
const AFFINITY: &str = "the threads follow the process; start it under `taskset` or `numactl`";
const DOWNLOAD: &str = "`ruvllm pull OWNER/NAME:QUANT` downloads, in builds with the feature `pull`; -m FILE names the file";
const ONE_TEXT: &str =
    "one text is computed at a time here; `ruvllm batch -f FILE` computes many side by side";
const GRAMMAR: &str = "only `generate` and `chat` have it, in builds with the feature `grammar`";
const LOGS: &str = "there is no log; -v adds details, and `2>FILE` keeps what is on stderr";
const MEDIA: &str = "text and images are supported; leave it out";
const IMAGES: &str = "only `generate`, `chat`, `serve`, `batch`, `logits` and `vision` have it, in builds with the feature `vision`; requests of `serve` bring images along";
const KV_PRESSURE: &str = "the pool never chooses the precision: a request does, by its field `kv_type` over HTTP; -ctk and -ctv choose for all";
const CONTEXT: &str = "a full context ends the text, but for --context-shift of `generate`, `chat` and `serve`; use a larger -c";

/// Flags of llama.cpp, and of older releases, that do not exist here: names, what to do.
const UNSUPPORTED: &[(&[&str], &str)] = &[
    (&["--kv-pressure"], KV_PRESSURE),
    (&["-ngl", "--gpu-layers", "--n-gpu-layers"], CPU_ONLY),
    (&["-dev", "--device", "--list-devices"], ONE_GPU),
    (
        &[
            "-sm",
            "--split-mode",
            "-ts",
            "--tensor-split",
            "-mg",
            "--main-gpu",
        ],
        ONE_GPU,
    ),
    (
        &[
            "-nkvo",
            "--no-kv-offload",
            "-kvo",
            "--kv-offload",
            "-nopo",
            "--no-op-offload",
            "--op-offload",
        ],
        ONE_GPU,
    ),
    (
        &[
            "-ot",
            "--override-tensor",
            "-cmoe",
            "--cpu-moe",
            "-ncmoe",
            "--n-cpu-moe",
            "-fit",
            "--fit",
        ],
        ONE_GPU,
    ),
    (
        &["-fa", "--flash-attn"],
        "attention needs no switch; leave it out",
    ),
    (
        &["--mlock", "--mmap", "--no-mmap", "-dio", "--direct-io"],
        MAPPED,
    ),
    (
        &[
            "--numa",
            "-C",
            "--cpu-mask",
            "-Cr",
            "--cpu-range",
            "--cpu-strict",
            "--prio",
            "--poll",
        ],
        AFFINITY,
    ),
    (
        &["-tb", "--threads-batch"],
        "the same threads do all work; use -t N",
    ),
    (
        &[
            "--grammar",
            "--grammar-file",
            "-j",
            "--json-schema",
            "--json-schema-file",
            "--regex",
        ],
        GRAMMAR,
    ),
    (
        &[
            "-i",
            "--interactive",
            "-if",
            "--interactive-first",
            "-ins",
            "--instruct",
        ],
        CHAT,
    ),
    (
        &[
            "-cnv",
            "--conversation",
            "-cml",
            "--chatml",
            "-st",
            "--single-turn",
        ],
        CHAT,
    ),
    (
        &["-no-cnv", "--no-conversation"],
        "`generate` never begins a conversation; leave it out",
    ),
    (&["--system-prompt", "--system-prompt-file"], CHAT_ALONE),
    (
        &["--in-prefix", "--in-suffix", "--in-prefix-bos"],
        "use `ruvllm chat` and a chat template",
    ),
    (
        &[
            "-hf",
            "-hfr",
            "--hf-repo",
            "-hff",
            "--hf-file",
            "-hft",
            "--hf-token",
        ],
        DOWNLOAD,
    ),
    (
        &["-mu", "--model-url", "-dr", "--docker-repo", "--offline"],
        DOWNLOAD,
    ),
    (&["--override-kv", "--check-tensors"], FROM_FILE),
    (&["--lora-base"], "llama.cpp has removed it; leave it out"),
    (
        &[
            "--lora-init-without-apply",
            "--control-vector",
            "--control-vector-scaled",
        ],
        NOT_YET,
    ),
    (
        &["-md", "--model-draft"],
        "`generate`, `chat`, `serve` and `batch` have it",
    ),
    (
        &[
            "--draft",
            "--draft-max",
            "--draft-min",
            "--draft-n",
            "-ngld",
        ],
        NOT_YET,
    ),
    (
        &[
            "--prompt-cache",
            "--prompt-cache-all",
            "--prompt-cache-ro",
            "--rpc",
        ],
        NOT_YET,
    ),
    (
        &[
            "-np",
            "--parallel",
            "-ns",
            "--sequences",
            "-cb",
            "--cont-batching",
            "-nocb",
            "-kvu",
            "--kv-unified",
        ],
        ONE_TEXT,
    ),
    (
        &[
            "--keep",
            "--context-shift",
            "--no-context-shift",
            "-gan",
            "--grp-attn-n",
            "-gaw",
            "--grp-attn-w",
        ],
        CONTEXT,
    ),
    (
        &["--jinja", "--no-jinja"],
        "chat templates are always Jinja; leave it out",
    ),
    (&["--audio"], MEDIA),
    (&["-mm", "--mmproj", "--image"], IMAGES),
    (
        &["--sampler-seq", "--sampling-seq"],
        "name them: --samplers \"top_k;top_p;temperature\"",
    ),
    (
        &["-co", "--color"],
        "colours follow the terminal and NO_COLOR; leave it out",
    ),
    (
        &[
            "--simple-io",
            "-mli",
            "--multiline-input",
            "-sp",
            "--special",
            "--display-prompt",
        ],
        LEAVE_OUT,
    ),
    (
        &[
            "-dt",
            "--defrag-thold",
            "-nr",
            "--no-repack",
            "--repack",
            "--swa-full",
            "--spm-infill",
        ],
        LEAVE_OUT,
    ),
    (
        &[
            "--warmup",
            "--no-warmup",
            "--perf",
            "--no-perf",
            "--show-timings",
            "--no-show-timings",
        ],
        LEAVE_OUT,
    ),
    (
        &[
            "-lv",
            "--log-verbosity",
            "--verbosity",
            "--log-disable",
            "--log-enable",
            "--log-file",
        ],
        LOGS,
    ),
    (
        &[
            "--log-colors",
            "--log-prefix",
            "--log-timestamps",
            "--log-new",
            "--log-test",
        ],
        LOGS,
    ),
    (&["-bf", "--binary-file"], "use -f FILE"),
    (&["--memory-f32"], "use -ctk f32"),
    (
        &[
            "--tfs",
            "--tfs-z",
            "--penalize-nl",
            "--no-penalize-nl",
            "-lcs",
            "-lcd",
        ],
        "llama.cpp has removed it; leave it out",
    ),
];

const ALWAYS: &str = "it is always there; leave it out";
const REUSED: &str = "prompts that begin alike are always computed once; leave it out";
#[cfg(not(all(feature = "tls", not(any(windows, target_vendor = "apple")))))]
const TLS: &str = "put a proxy that speaks TLS in front; builds with the feature `tls` have it, but for Windows and macOS";

/// Those of llama-server, and what to do for `ruvllm serve`; `UNSUPPORTED` has the others.
const UNSUPPORTED_BY_SERVER: &[(&[&str], &str)] = &[
    (
        &[
            "--metrics",
            "--slots",
            "--ui",
            "--webui",
            "--no-skip-chat-parsing",
        ],
        ALWAYS,
    ),
    (
        &["--embedding", "--embeddings", "--rerank", "--reranking"],
        "a model that can does it; leave it out",
    ),
    (
        &["-cb", "--cont-batching", "-kvu", "--kv-unified"],
        "requests are always computed side by side; leave it out",
    ),
    (
        &["-nocb", "--no-cont-batching"],
        "-np 1 computes one request at a time",
    ),
    (
        &[
            "--cache-prompt",
            "--cache-reuse",
            "-cram",
            "--cache-ram",
            "-sps",
            "--slot-prompt-similarity",
        ],
        REUSED,
    ),
    #[cfg(not(all(feature = "tls", not(any(windows, target_vendor = "apple")))))]
    (&["--ssl-key-file", "--ssl-cert-file"], TLS),
    (&["--threads-http", "--sse-ping-interval"], LEAVE_OUT),
    (
        &[
            "-v",
            "--verbose",
            "-lv",
            "--log-verbosity",
            "--verbosity",
            "--log-disable",
        ],
        "use --log-level",
    ),
    (
        &[
            "--log-jsonl",
            "--log-prefix",
            "--log-timestamps",
            "--log-colors",
        ],
        "use --log-format",
    ),
    (&["--log-file"], "the log is on stderr: 2>FILE keeps it"),
    (
        &[
            "--no-webui",
            "--no-ui",
            "--no-slots",
            "--props",
            "--path",
            "--api-prefix",
        ],
        NOT_YET,
    ),
    (&["--tools", "--agent", "--media-path"], NOT_YET),
    (
        &["-rea", "--reasoning"],
        "templates decide: --chat-template-kwargs '{\"enable_thinking\": false}'",
    ),
    (
        &["--reasoning-format"],
        "reasoning is always told apart, in reasoning_content; leave it out",
    ),
    (
        &["--reasoning-budget"],
        "templates decide: --chat-template-kwargs '{\"enable_thinking\": false}'",
    ),
    (
        &["--no-mmproj", "--no-mmproj-auto", "--no-context-shift"],
        LEAVE_OUT,
    ),
    (
        &["--keep", "--context-shift"],
        "a full context ends the answer; use a larger -c",
    ),
];

/// The command line as clap is to see it.
pub(crate) fn prepare(args: Vec<OsString>, cli: &Command) -> Result<Vec<OsString>, Failure> {
    let mut args = args.into_iter();
    let mut out = vec![args.next().unwrap_or_else(|| "ruvllm".into())];
    let mut rest = args.peekable();
    let first = rest.peek().map_or("", |first| first.to_str().unwrap_or(""));
    if matches!(first, "-h" | "--help" | "-V" | "--version" | "help") {
        out.extend(rest);
        return Ok(out);
    }
    let default = first.is_empty() || first.starts_with('-');
    let name = if default {
        "generate".into()
    } else {
        rest.next().unwrap_or_default()
    };
    let Some(mut subcommand) = name.to_str().and_then(|name| cli.find_subcommand(name)) else {
        out.push(name);
        out.extend(rest);
        return Ok(out);
    };
    out.push(name);
    if subcommand.has_subcommands() {
        let next = rest.peek().map_or("", |next| next.to_str().unwrap_or(""));
        if let Some(inner) = subcommand.find_subcommand(next) {
            subcommand = inner;
            out.extend(rest.next());
        } else if subcommand.get_name() == BENCH
            && !matches!(next, "-h" | "--help" | "help")
            && let Some(inner) = subcommand.find_subcommand(SPEED)
        {
            subcommand = inner;
            out.push(SPEED.into());
        }
    }

    while let Some(arg) = rest.next() {
        let Some(text) = arg.to_str() else {
            out.push(arg);
            continue;
        };
        if text == "--" {
            out.push(arg);
            out.extend(rest);
            break;
        }
        if !text.starts_with('-') {
            if default && cli.find_subcommand(text).is_some() {
                return Err(Failure::Usage(format!(
                    "the subcommand comes first: ruvllm {text} …"
                )));
            }
            out.push(arg);
            continue;
        }
        let (flag, value) = text
            .split_once('=')
            .map_or((text, None), |(flag, value)| (flag, Some(value)));
        let flag = match MULTI_LETTER.iter().find(|(short, _)| *short == flag) {
            Some((_, long)) => (*long).to_owned(),
            None if flag.starts_with("--") => flag.replace('_', "-"),
            None => flag.to_owned(),
        };
        let find = |flag: &str| subcommand.get_arguments().find(|arg| is_called(arg, flag));
        let mut known = find(&flag);
        let mut flag = flag;
        if let Some(new) = renamed::flag(&flag).filter(|new| find(new).is_some()) {
            renamed::tell(&flag, new);
            (flag, known) = (new.to_owned(), find(new));
        }
        let of_server = if subcommand.get_name() == "serve" {
            UNSUPPORTED_BY_SERVER
        } else {
            &[]
        };
        if known.is_none()
            && let Some((_, advice)) = of_server
                .iter()
                .chain(renamed::REMOVED)
                .chain(UNSUPPORTED)
                .find(|(names, _)| names.contains(&&*flag))
        {
            return Err(Failure::Usage(format!("`{flag}` does not exist: {advice}")));
        }
        out.push(
            value
                .map_or(flag.clone(), |value| format!("{flag}={value}"))
                .into(),
        );
        if value.is_none() && known.is_some_and(|arg| arg.get_action().takes_values()) {
            // A value may look like a flag.
            out.extend(rest.next());
        }
    }
    Ok(out)
}

/// What clap's message does not say: that a value comes from the environment; that a text needs
/// `-p`.
pub(crate) fn hint(error: &clap::Error, line: &[OsString], mut cli: Command) -> Option<String> {
    cli.build();
    if let Some(ContextValue::String(text)) = error.get(ContextKind::InvalidSubcommand) {
        return Some(format!(
            "a text to continue is given with -p: ruvllm -p {text:?}"
        ));
    }
    let named = |kind| {
        error.get(kind).and_then(|value| {
            if let ContextValue::String(x) = value {
                Some(x)
            } else {
                None
            }
        })
    };
    let (name, value) = (
        named(ContextKind::InvalidArg)?,
        named(ContextKind::InvalidValue)?,
    );
    let subcommand = cli.find_subcommand(line.get(1)?)?;
    let inner = line
        .get(2)
        .and_then(|name| subcommand.find_subcommand(name));
    let subcommand = inner.unwrap_or(subcommand);
    let arg = subcommand
        .get_arguments()
        .find(|arg| arg.to_string() == *name)?;
    let variable = arg
        .get_env()
        .filter(|variable| std::env::var(variable).is_ok_and(|found| found == *value))?;
    let mut given = line
        .iter()
        .filter_map(|text| text.to_str())
        .filter(|text| text.starts_with('-'));
    let given =
        given.any(|text| is_called(arg, text.split_once('=').map_or(text, |(flag, _)| flag)));
    (!given).then(|| {
        format!(
            "The value comes from the environment variable {}.",
            variable.display()
        )
    })
}

fn is_called(arg: &Arg, flag: &str) -> bool {
    match flag.strip_prefix("--") {
        Some(long) => {
            arg.get_long() == Some(long)
                || arg
                    .get_all_aliases()
                    .is_some_and(|aliases| aliases.contains(&long))
        }
        None => {
            let short = flag[1..]
                .chars()
                .next()
                .filter(|c| flag.len() == 1 + c.len_utf8());
            short.is_some() && arg.get_short() == short
        }
    }
}
