//! The subcommands: a file each.

#[cfg(feature = "serve")]
pub(crate) mod batch;
pub(crate) mod bench;
#[cfg(feature = "chat")]
pub(crate) mod chat;
#[cfg(feature = "completions")]
pub(crate) mod completions;
#[cfg(feature = "convert")]
pub(crate) mod convert;
pub(crate) mod detokenize;
pub(crate) mod doctor;
pub(crate) mod embed;
pub(crate) mod generate;
#[cfg(feature = "serve")]
pub(crate) mod health;
pub(crate) mod imatrix;
pub(crate) mod inspect;
pub(crate) mod learn;
#[cfg(feature = "pull")]
pub(crate) mod list;
pub(crate) mod logits;
#[cfg(feature = "completions")]
pub(crate) mod man;
pub(crate) mod memory;
pub(crate) mod merge;
pub(crate) mod merge_adapters;
pub(crate) mod perplexity;
#[cfg(feature = "pull")]
pub(crate) mod pull;
pub(crate) mod quantize;
pub(crate) mod rerank;
#[cfg(feature = "pull")]
pub(crate) mod rm;
#[cfg(feature = "serve")]
pub(crate) mod serve;
#[cfg(feature = "chat")]
pub(crate) mod sessions;
#[cfg(feature = "chat")]
pub(crate) mod template;
pub(crate) mod tokenize;
pub(crate) mod train;
#[cfg(feature = "vision")]
pub(crate) mod vision;

use crate::io::Failure;
use clap::Subcommand;
use std::ffi::OsString;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Continue a text (the default subcommand)
    Generate(Box<generate::Args>),
    #[cfg(feature = "chat")]
    /// Talk to a model
    Chat(Box<chat::Args>),
    #[cfg(feature = "serve")]
    /// Serve a model over HTTP: the APIs of OpenAI, Anthropic and Ollama, and a chat page
    Serve(Box<serve::Args>),
    #[cfg(feature = "serve")]
    /// Ask a server whether it can answer
    Health(health::Args),
    #[cfg(feature = "chat")]
    /// List, rename and delete conversations that were kept
    Sessions(sessions::Args),
    #[cfg(feature = "pull")]
    /// Download a model from Hugging Face's hub
    Pull(pull::Args),
    #[cfg(feature = "pull")]
    /// List models that were downloaded
    List(list::Args),
    #[cfg(feature = "pull")]
    /// Remove a model that was downloaded
    Rm(rm::Args),
    /// Show what a GGUF file contains and whether this build can run it
    Inspect(inspect::Args),
    /// Turn text into token ids
    Tokenize(tokenize::Args),
    /// Turn token ids into text
    Detokenize(detokenize::Args),
    /// Write the logits that follow given tokens
    Logits(logits::Args),
    /// Turn texts into vectors (embeddings)
    Embed(embed::Args),
    /// Order documents by how well they answer a query
    Rerank(rerank::Args),
    #[cfg(feature = "vision")]
    /// Write what a model sees of an image
    Vision(Box<vision::Args>),
    /// Measure how well a model predicts a text
    Perplexity(perplexity::Args),
    /// Inspect, roll back or erase what the model learned in the background
    Learn(learn::Args),
    /// List, search, change and forget what was taught
    Memory(memory::Args),
    /// Fine-tune: train a LoRA adapter on examples
    Train(Box<train::Args>),
    #[cfg(feature = "convert")]
    /// Convert a Hugging Face model folder to GGUF
    Convert(convert::Args),
    /// Measure how much each weight of a model matters, for `quantize`
    Imatrix(Box<imatrix::Args>),
    /// Quantize a model: convert it to a smaller type
    Quantize(quantize::Args),
    /// Fold LoRA adapters into a model
    Merge(merge::Args),
    /// Merge LoRA adapters into one
    MergeAdapters(merge_adapters::Args),
    #[cfg(feature = "chat")]
    /// Render messages with a chat template
    Template(template::Args),
    #[cfg(feature = "chat")]
    /// Render templates for the program that has started this process
    #[command(hide = true)]
    RenderTemplates,
    #[cfg(feature = "serve")]
    /// Answer a file of requests side by side
    Batch(Box<batch::Args>),
    /// Measure speed, kernels, formats, speculative decoding, batches, learning
    Bench(bench::Args),
    /// Show what this build and this machine can do
    Doctor(doctor::Args),
    #[cfg(feature = "completions")]
    /// Write shell completions
    Completions(completions::Args),
    #[cfg(feature = "completions")]
    /// Write manual pages
    Man(man::Args),
}

/// Does what the command line, `line`, asks for; `program` describes the whole of it.
#[cfg_attr(
    not(all(feature = "serve", feature = "completions")),
    expect(unused_variables)
)]
pub(crate) fn execute(
    command: Command,
    line: &[OsString],
    program: impl Fn() -> clap::Command,
) -> Result<(), Failure> {
    match command {
        Command::Generate(args) => generate::run(&args),
        #[cfg(feature = "chat")]
        Command::Chat(args) => chat::run(&args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(args.of_line(line)),
        #[cfg(feature = "serve")]
        Command::Health(args) => health::run(&args),
        #[cfg(feature = "chat")]
        Command::Sessions(args) => sessions::run(&args),
        #[cfg(feature = "pull")]
        Command::Pull(args) => pull::run(&args),
        #[cfg(feature = "pull")]
        Command::List(args) => list::run(&args),
        #[cfg(feature = "pull")]
        Command::Rm(args) => rm::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Detokenize(args) => detokenize::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Embed(args) => embed::run(&args),
        Command::Rerank(args) => rerank::run(&args),
        #[cfg(feature = "vision")]
        Command::Vision(args) => vision::run(&args),
        Command::Perplexity(args) => perplexity::run(&args),
        Command::Learn(args) => learn::run(&args),
        Command::Memory(args) => memory::run(&args),
        Command::Train(args) => train::run(&args),
        #[cfg(feature = "convert")]
        Command::Convert(args) => convert::run(&args),
        Command::Imatrix(args) => imatrix::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Merge(args) => merge::run(&args),
        Command::MergeAdapters(args) => merge_adapters::run(&args),
        #[cfg(feature = "chat")]
        Command::Template(args) => template::run(&args),
        #[cfg(feature = "chat")]
        Command::RenderTemplates => crate::flags::template::worker::run(),
        #[cfg(feature = "serve")]
        Command::Batch(args) => batch::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        #[cfg(feature = "completions")]
        Command::Completions(args) => completions::run(&args, program()),
        #[cfg(feature = "completions")]
        Command::Man(args) => man::run(&args, program()),
    }
}
