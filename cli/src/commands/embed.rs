//! `ruvllm embed`: vectors of texts.

use crate::flags::{ModelArgs, PlacementArgs, ThreadsArg, engine};
use crate::io::{Failure, file_or_pipe, print, read_text};
use clap::ValueEnum;
use ruvllm::Embedder;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::compute::NoCallback;
use ruvllm::engine::EngineOptions;
use ruvllm::model::Pooling;
use serde_json::json;
use std::fmt::Write;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm embed -m model.gguf -p \"one text\"
  ruvllm embed -m model.gguf -f lines.txt --embd-output-format json
  ruvllm embed -m model.gguf -p \"a<#sep#>b\" --embd-separator \"<#sep#>\" --embd-output-format json+

Each line is a text of its own, unless --embd-separator says otherwise, a blank one too: vector i is that of line i. \
Vectors have length 1, so that their products are cosines; json+ has those of all pairs.";

#[derive(Clone, Copy, ValueEnum)]
enum PoolingArg {
    None,
    Mean,
    Cls,
    Last,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Format {
    /// A line for each text
    #[value(name = "")]
    Lines,
    /// A JSON array of vectors
    Array,
    /// What OpenAI's interface answers
    Json,
    /// With the cosines of all pairs
    #[value(name = "json+")]
    JsonPlus,
}

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts
    #[arg(
        short,
        long,
        value_name = "TEXT",
        conflicts_with = "file",
        allow_hyphen_values = true
    )]
    prompt: Option<String>,
    /// File of texts; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// What comes between texts
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "\n",
        hide_default_value = true
    )]
    embd_separator: String,
    /// From the states of a text's tokens to its vector; none: a vector for each token [default:
    /// what the file says, else mean]
    #[arg(long, value_enum)]
    pooling: Option<PoolingArg>,
    /// Norm that vectors are divided by: 2 is their length, 1 the sum of absolute values, 0 makes
    /// the largest 32760, -1 leaves them
    #[arg(long, value_name = "N", default_value_t = 2, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i32).range(-1..=16))]
    embd_normalize: i32,
    /// How vectors are written
    #[arg(long, value_enum, default_value = "", hide_default_value = true)]
    embd_output_format: Format,
    /// Leave out the end of a text that has more tokens than the model takes, instead of refusing it
    #[arg(long, alias = "truncate")]
    embd_truncate: bool,
    /// Maximum number of tokens of a pass; a longer text has a pass of its own
    #[arg(short, long, value_name = "N", default_value_t = 512, env = "LLAMA_ARG_BATCH", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    #[command(flatten)]
    threads: ThreadsArg,
    #[command(flatten)]
    placement: PlacementArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let text = match &args.prompt {
        Some(text) => text.clone(),
        None => read_text(&file_or_pipe(args.file.as_ref(), "-p TEXT or -f FILE")?)?,
    };
    if args.embd_separator.is_empty() {
        return Err(Failure::Usage("--embd-separator is empty".into()));
    }
    let texts = split(&text, &args.embd_separator);
    let model = args.model.open(&args.placement)?;
    let engine = engine(
        &model,
        args.threads.number(),
        false,
        &SessionOptions::default(),
        EngineOptions::default(),
    )?;
    let mut embedder = Embedder::new(&engine)?
        .normalise(false)
        .n_batch(args.batch_size as usize);
    let pooling = match args.pooling {
        Some(PoolingArg::Mean) => Some(Pooling::Mean),
        Some(PoolingArg::Cls) => Some(Pooling::Cls),
        Some(PoolingArg::Last) => Some(Pooling::Last),
        Some(PoolingArg::None) | None => None,
    };
    if let Some(pooling) = pooling {
        embedder = embedder.pooling(pooling);
    }
    let mut vectors = Vec::new();
    let tokens = texts
        .iter()
        .enumerate()
        .map(|(i, text)| within(&model, args.embd_truncate, i, tokens(&embedder, i, text)?))
        .collect::<Result<Vec<_>, _>>()?;
    match args.pooling {
        // The hidden states of all tokens, text after text.
        Some(PoolingArg::None) => {
            for text in &tokens {
                let states = embedder.states_of(text, &mut NoCallback)?;
                vectors.extend(
                    states
                        .chunks_exact(model.hparams().n_embd)
                        .map(<[f32]>::to_vec),
                );
            }
        }
        _ => vectors = embedder.embed_tokens(&tokens)?,
    }
    vectors
        .iter_mut()
        .for_each(|vector| normalise(vector, args.embd_normalize));
    let mut out = String::new();
    match args.embd_output_format {
        Format::Lines => {
            for vector in &vectors {
                let numbers: Vec<String> = vector.iter().map(|x| format!("{x:.6}")).collect();
                let _ = writeln!(out, "{}", numbers.join(" "));
            }
        }
        Format::Array => out = format!("{}\n", json!(vectors)),
        format @ (Format::Json | Format::JsonPlus) => {
            let data = vectors
                .iter()
                .enumerate()
                .map(|(i, x)| json!({"object": "embedding", "index": i, "embedding": x}));
            let mut answer = json!({"object": "list", "data": data.collect::<Vec<_>>()});
            if format == Format::JsonPlus {
                let row = |a: &Vec<f32>| vectors.iter().map(|b| cosine(a, b)).collect::<Vec<_>>();
                answer["cosineSimilarity"] = json!(vectors.iter().map(row).collect::<Vec<_>>());
            }
            out = format!("{answer:#}\n");
        }
    }
    print(out)
}

/// The texts of an input, blank ones too, so that rows of the output are those of the input. A
/// separator at the end ends the last text, as the line end of a file does.
fn split<'a>(input: &'a str, separator: &str) -> Vec<&'a str> {
    match input {
        "" => Vec::new(),
        _ => input
            .strip_suffix(separator)
            .unwrap_or(input)
            .split(separator)
            .collect(),
    }
}

/// The tokens of text `i`; an error if it has none, as a blank one of a model that puts no token
/// around texts.
fn tokens(embedder: &Embedder, i: usize, text: &str) -> Result<Vec<u32>, Failure> {
    match embedder.tokens(text)? {
        tokens if tokens.is_empty() => {
            let what = "has no tokens, and this model puts none around a text: leave it out, or write something there";
            Err(Failure::Work(format!("text {}, {text:?}, {what}", i + 1)))
        }
        tokens => Ok(tokens),
    }
}

/// The tokens of text `i`, no more than the model takes: refused, or cut before the token that ends
/// texts.
fn within(
    model: &Model,
    truncate: bool,
    i: usize,
    mut tokens: Vec<u32>,
) -> Result<Vec<u32>, Failure> {
    let (n, limit) = (tokens.len(), model.hparams().n_ctx_train);
    if n <= limit {
        return Ok(tokens);
    }
    if !truncate {
        return Err(Failure::Work(format!(
            "text {} has {n} tokens, the model takes {limit}: --embd-truncate leaves out its end",
            i + 1
        )));
    }
    let end = model.tokenizer().and_then(|tokenizer| tokenizer.eos());
    let end = tokens.last().copied().filter(|&last| end == Some(last));
    tokens.truncate(limit);
    if let (Some(end), Some(last)) = (end, tokens.last_mut()) {
        *last = end;
    }
    Ok(tokens)
}

/// Divides by the `p`-norm; 0 is the largest value, of which 32760 are left, −1 nothing.
fn normalise(vector: &mut [f32], p: i32) {
    let norm = match p {
        -1 => return,
        0 => vector.iter().map(|x| x.abs()).fold(0.0, f32::max) / 32760.0,
        // Rounded once, as the library's and so the server's is.
        2 => vector.iter().map(|x| x * x).sum::<f32>().sqrt(),
        p => vector
            .iter()
            .map(|x| x.abs().powi(p))
            .sum::<f32>()
            .powf(1.0 / p as f32),
    };
    if norm > 0.0 {
        vector.iter_mut().for_each(|x| *x /= norm);
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(f32::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_input() {
        for (input, separator, texts) in [
            ("a\n\nb\n", "\n", &["a", "", "b"][..]),
            ("a\n\n", "\n", &["a", ""]),
            ("\n", "\n", &[""]),
            ("", "\n", &[]),
            ("a##b#", "#", &["a", "", "b"]),
        ] {
            assert_eq!(split(input, separator), texts, "{input:?}");
        }
    }

    #[test]
    fn norms() {
        for (p, expected) in [
            (-1, [3.0, -4.0]),
            (0, [24570.0, -32760.0]),
            (1, [3.0 / 7.0, -4.0 / 7.0]),
            (2, [0.6, -0.8]),
        ] {
            let mut x = [3.0, -4.0];
            normalise(&mut x, p);
            assert!(
                x.iter()
                    .zip(expected)
                    .all(|(x, y): (&f32, f32)| (x - y).abs() <= 1e-6 * y.abs()),
                "{p}: {x:?}"
            );
        }
        let mut zero = [0.0; 2];
        normalise(&mut zero, 2);
        assert_eq!(zero, [0.0; 2]);
        assert!((cosine(&[1.0, 0.0], &[1.0, 1.0]) - 0.5f32.sqrt()).abs() < 1e-6);
    }
}
