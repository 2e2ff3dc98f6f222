//! The program `ruvllm`: one file per subcommand. What they share lies in `args` (spelling of
//! flags), `model` and `sampling` (groups of flags), `input` and `output`.
//!
//! Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 the work failed, 2 the
//! call was wrong, 130 interrupted.
//!
//! A library, so that the fuzzer reaches the server. It has no other users, and promises them
//! nothing.

#![forbid(unsafe_code)]

mod args;
#[cfg(feature = "serve")]
mod batch;
mod batched_bench;
mod bench;
mod calibrate;
#[cfg(feature = "chat")]
mod chat;
#[cfg(feature = "convert")]
mod convert;
mod detokenize;
mod doctor;
mod embed;
mod formats;
mod generate;
#[cfg(feature = "grammar")]
mod grammar;
mod input;
mod inspect;
mod learn;
mod learning;
mod logits;
mod measured;
mod memory;
mod merge;
mod merge_adapters;
mod model;
mod output;
mod perplexity;
#[cfg(feature = "pull")]
mod pull;
mod quantize;
mod replay;
mod rerank;
mod rows;
mod sampling;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "chat")]
mod sessions;
mod sona;
mod speculation;
#[cfg(feature = "chat")]
mod template;
mod tokenize;
mod train;

use clap::{CommandFactory, Parser, Subcommand};
use output::Failure;
#[cfg(feature = "serve")]
#[doc(hidden)]
pub use serve::InMemory;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  ruvllm -p \"Ownership is\"                       continue a text with the built-in demo model
  ruvllm -m model.gguf -p \"Once upon a time\"     … or with a model of your own
  echo \"Ownership is\" | ruvllm                   the text may come from a pipe
  ruvllm chat -m model.gguf                      talk to a model
  ruvllm inspect model.gguf                      what is in the file, and can it be run here?
  ruvllm quantize in.gguf out.gguf Q4_K_M        make a model smaller
  ruvllm generate --help                         all flags of a subcommand

Without a subcommand the flags are those of `generate`. Flags have llama.cpp's names; its \
environment variables (LLAMA_ARG_MODEL, LLAMA_ARG_THREADS, …) work too, and flags win over them. Of a \
flag given twice the last counts, unless its help says that it is repeatable.
RUVLLM_ARCH=scalar|avx2|… forces an instruction-set level. NO_COLOR is honoured.
Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 130 interrupted (Ctrl-C, SIGTERM).";

/// Runs large language models from GGUF files, inside one process.
#[derive(Parser)]
#[command(name = "ruvllm", version, after_help = EXAMPLES, max_term_width = 100, args_override_self = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Continue a text (the default subcommand)
    Generate(Box<generate::Args>),
    #[cfg(feature = "chat")]
    /// Talk to a model
    Chat(Box<chat::Args>),
    #[cfg(feature = "serve")]
    /// Serve a model over HTTP, as the OpenAI API and llama-server do
    Serve(Box<serve::Args>),
    #[cfg(feature = "chat")]
    /// List, rename and delete conversations that were kept
    Sessions(sessions::Args),
    #[cfg(feature = "pull")]
    /// Download a model from Hugging Face's hub
    Pull(pull::PullArgs),
    #[cfg(feature = "pull")]
    /// List models that were downloaded
    List(pull::ListArgs),
    #[cfg(feature = "pull")]
    /// Remove a model that was downloaded
    Rm(pull::RmArgs),
    /// Tell what is in a GGUF file and whether this build can run it
    Inspect(inspect::Args),
    /// Turn text into token ids
    Tokenize(tokenize::Args),
    /// Turn token ids into text
    Detokenize(detokenize::Args),
    /// Write the logits that follow given tokens
    Logits(logits::Args),
    /// Turn texts into vectors
    Embed(embed::Args),
    /// Order documents by how well they answer a query
    Rerank(rerank::Args),
    /// Measure how well a model predicts a text
    Perplexity(perplexity::Args),
    /// Tell a learner what it must not forget
    Calibrate(calibrate::Args),
    /// Measure what learning while running is worth on a text
    Learn(learn::Args),
    /// See, undo and forget what was learnt by itself
    Sona(sona::Args),
    /// Train a LoRA adapter on examples
    Train(Box<train::Args>),
    #[cfg(feature = "convert")]
    /// Convert a folder of Hugging Face to a GGUF file
    Convert(convert::Args),
    /// Convert a model to a smaller type
    Quantize(quantize::Args),
    /// Compare weight formats: size, loss, speed
    Formats(formats::Args),
    /// Fold LoRA adapters into a model
    Merge(merge::Args),
    /// Merge LoRA adapters into one
    MergeAdapters(merge_adapters::Args),
    #[cfg(feature = "chat")]
    /// Render messages with a chat template
    Template(template::Args),
    #[cfg(feature = "serve")]
    /// Answer a file of requests side by side
    Batch(Box<batch::Args>),
    /// Measure speed, and what it means for the machine
    Bench(Box<bench::Args>),
    /// Measure speed with many sequences side by side
    BatchedBench(Box<batched_bench::Args>),
    /// Tell what this build and this machine can do
    Doctor(doctor::Args),
}

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    let command_line: Vec<_> = std::env::args_os().collect();
    if command_line.len() < 2 && input::stdin_is_terminal() {
        eprintln!("{}", Cli::command().render_help());
        return ExitCode::from(2);
    }
    let command_line = match args::prepare(command_line, &Cli::command()) {
        Ok(command_line) => command_line,
        Err(failure) => return failure.report(),
    };
    let cli = match Cli::try_parse_from(&command_line) {
        Ok(cli) => cli,
        Err(error) => {
            // Help that nobody reads to its end is no failure.
            let _ = error.print();
            if let Some(hint) = args::hint(&error, &command_line, Cli::command()) {
                output::note(format_args!("\n{hint}"));
            }
            return ExitCode::from(error.exit_code() as u8);
        }
    };
    match execute(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn execute(command: Command) -> Result<(), Failure> {
    match command {
        Command::Generate(args) => generate::run(&args),
        #[cfg(feature = "chat")]
        Command::Chat(args) => chat::run(&args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(*args),
        #[cfg(feature = "chat")]
        Command::Sessions(args) => sessions::run(&args),
        #[cfg(feature = "pull")]
        Command::Pull(args) => pull::pull(&args),
        #[cfg(feature = "pull")]
        Command::List(args) => pull::list(&args),
        #[cfg(feature = "pull")]
        Command::Rm(args) => pull::rm(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Detokenize(args) => detokenize::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Embed(args) => embed::run(&args),
        Command::Rerank(args) => rerank::run(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Calibrate(args) => calibrate::run(&args),
        Command::Learn(args) => learn::run(&args),
        Command::Sona(args) => sona::run(&args),
        Command::Train(args) => train::run(&args),
        #[cfg(feature = "convert")]
        Command::Convert(args) => convert::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Formats(args) => formats::run(&args),
        Command::Merge(args) => merge::run(&args),
        Command::MergeAdapters(args) => merge_adapters::run(&args),
        #[cfg(feature = "chat")]
        Command::Template(args) => template::run(&args),
        #[cfg(feature = "serve")]
        Command::Batch(args) => batch::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::BatchedBench(args) => batched_bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definition_is_sound() {
        Cli::command().debug_assert();
    }
}
