//! The program `ruvllm`. What is listed above may use what is listed below it, and rooms on one
//! line do not use each other; `cli/tests/imports.rs` checks it, and that no files of a room go in
//! a circle.
//!
//! | room | what it holds |
//! |---|---|
//! | `lib.rs` | the command line: parsing it, and how the program ends |
//! | `commands/` | the subcommands, a file each; none uses another one |
//! | `serve/` | the HTTP server |
//! | `bench/` | what `ruvllm bench` measures, and the perplexity of a text |
//! | `flags/` | groups of flags that several commands have, and what comes of them: a model, a session, a sampler, drafters, a learner; llama.cpp's spelling of flags |
//! | `convert/` | GGUF files from folders of Hugging Face; below `flags/`, since `-m` names such a folder, too |
//! | `pull/` | models of Hugging Face's hub, and those that are here; below `flags/`, since `-hf` names one |
//! | `quantize/` | types of a file's tensors, and rows on their way from one type to another |
//! | `io/` | terminal, files, JSON, sizes, times, tables, progress; what is told of a machine and of a model |
//!
//! `serve/` and `bench/` stand side by side, and so do `convert/` and `pull/`. Results go to stdout, everything else to
//! stderr. Exit codes: 0 done, 1 the work failed, 2 the call was wrong, 130 interrupted.
//!
//! A library, so that the fuzzer reaches the server. It has no other users, and promises them
//! nothing.

#![forbid(unsafe_code)]

mod bench;
mod commands;
#[cfg(feature = "convert")]
mod convert;
mod flags;
mod io;
#[cfg(feature = "pull")]
mod pull;
mod quantize;
#[cfg(feature = "serve")]
mod serve;

use clap::{CommandFactory, Parser};
use commands::{Command, execute};
use flags::{llama_cpp, renamed};
#[cfg(feature = "vision")]
#[doc(hidden)]
pub use io::picture::decode as decode_picture;
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

/// Runs the program with the arguments of this process.
pub fn main() -> ExitCode {
    let command_line: Vec<_> = std::env::args_os().collect();
    if command_line.len() < 2 && io::stdin_is_terminal() {
        eprintln!("{}", Cli::command().render_help());
        return ExitCode::from(2);
    }
    let command_line = renamed::current(command_line, &Cli::command());
    let command_line = match llama_cpp::prepare(command_line, &Cli::command()) {
        Ok(command_line) => command_line,
        Err(failure) => return failure.report(),
    };
    let cli = match Cli::try_parse_from(&command_line) {
        Ok(cli) => cli,
        Err(error) => {
            // Help that nobody reads to its end is no failure.
            let _ = error.print();
            if let Some(hint) = llama_cpp::hint(&error, &command_line, Cli::command()) {
                io::note(format_args!("\n{hint}"));
            }
            return ExitCode::from(error.exit_code() as u8);
        }
    };
    match execute(cli.command, &command_line, Cli::command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use io::Failure;
    use std::ffi::OsString;

    #[test]
    fn definition_is_sound() {
        Cli::command().debug_assert();
    }

    /// A flag stands under the same heading wherever it is: none has slipped under that of the group
    /// before it.
    #[test]
    fn headings() {
        fn collect(command: &clap::Command, found: &mut Vec<(String, Option<String>, String)>) {
            for arg in command.get_arguments() {
                let heading = arg.get_help_heading().map(str::to_owned);
                found.push((
                    arg.get_id().to_string(),
                    heading,
                    command.get_name().to_owned(),
                ));
            }
            command
                .get_subcommands()
                .for_each(|command| collect(command, found));
        }
        let mut found = Vec::new();
        collect(&Cli::command(), &mut found);
        for (id, heading, command) in &found {
            let of = |names: &[&str]| names.contains(&&command[..]);
            let expected = match &id[..] {
                "model" | "threads" | "json" | "file" | "output" | "overwrite" | "prompt"
                | "n_predict" => None,
                "ctx_size" | "batch_size" | "context_shift" | "keep"
                    if of(&["generate", "chat", "serve"]) =>
                {
                    Some("Context")
                }
                "cache_type_k" | "prompt_cache" | "slot_save_path" => Some("KV cache"),
                "lora" | "lora_scaled" | "lora_dir" => Some("Adapters (LoRA)"),
                "spec" | "model_draft" => Some("Speculative decoding"),
                "learn_rate" | "learn_mixture" | "learn_per_user" => Some("Learning"),
                "seed" if of(&["generate", "chat", "serve"]) => Some("Sampling"),
                "host" | "port" | "api_key" | "max_requests" if of(&["serve"]) => Some("Server"),
                _ => continue,
            };
            assert_eq!(heading.as_deref(), expected, "{id} of {command}");
        }
    }

    fn prepared(line: &[&str]) -> Result<Vec<String>, String> {
        let args = std::iter::once("ruvllm")
            .chain(line.iter().copied())
            .map(OsString::from)
            .collect();
        match llama_cpp::prepare(args, &Cli::command()) {
            Ok(out) => Ok(out
                .into_iter()
                .skip(1)
                .map(|arg| arg.into_string().unwrap())
                .collect()),
            Err(Failure::Usage(message)) => Err(message),
            Err(_) => panic!("not a usage error"),
        }
    }

    #[test]
    fn spelling() {
        for (line, expected) in [
            (&["-p", "x"][..], &["generate", "-p", "x"][..]),
            (
                &["-ub", "8", "-ctk=f32"],
                &["generate", "--ubatch-size", "8", "--cache-type-k=f32"],
            ),
            (&["--top_k", "1"], &["generate", "--top-k", "1"]),
            (
                &["-p", "-ngl", "-p", "--a_b", "-p", "chat"],
                &["generate", "-p", "-ngl", "-p", "--a_b", "-p", "chat"],
            ),
            (
                &["chat", "-sys", "-ub"],
                &["chat", "--system-prompt", "-ub"],
            ),
            (&["--help"], &["--help"]),
            (&["help", "chat"], &["help", "chat"]),
            (
                &["bench", "-ub", "8"],
                &["bench", "speed", "--ubatch-size", "8"],
            ),
            (
                &["bench", "batch", "-npl", "8"],
                &["bench", "batch", "--n-sequences", "8"],
            ),
            (&["bench", "--help"], &["bench", "--help"]),
            (&["nonsense", "-ngl"], &["nonsense", "-ngl"]),
            (&["-v", "--", "-ngl"], &["generate", "-v", "--", "-ngl"]),
            (
                &["chat", "--sona", "--sona-lr", "--sona_lr=2", "-p", "--sona"],
                &[
                    "chat",
                    "--learn",
                    "--sona-lr",
                    "--learn-rate=2",
                    "-p",
                    "--sona",
                ],
            ),
            (&["train", "--sona=mine"], &["train", "--learn=mine"]),
            (
                &["bench", "--sona", "x"],
                &["bench", "speed", "--sona", "x"],
            ),
        ] {
            assert_eq!(prepared(line).unwrap(), expected, "{line:?}");
        }
    }

    /// Old names of commands and flags are the new ones.
    #[test]
    fn renamed_commands() {
        for (line, expected) in [
            (
                &["formats", "--help"][..],
                &["bench", "formats", "--help"][..],
            ),
            (&["sona", "log", "mine"], &["learn", "log", "mine"]),
            (
                &["calibrate", "-f", "x", "-o", "mine"],
                &["learn", "calibrate", "-f", "x", "mine"],
            ),
            (
                &["calibrate", "--output=mine"],
                &["learn", "calibrate", "mine"],
            ),
            (
                &["calibrate", "-f", "x"],
                &["learn", "calibrate", "-f", "x", "learned"],
            ),
            (&["calibrate", "--help"], &["learn", "calibrate", "--help"]),
            (&["help", "batched-bench"], &["help", "bench", "batch"]),
            (
                &["bench", "--kernels", "-o", "json"],
                &["bench", "kernels", "-o", "json"],
            ),
            (
                &["bench", "-m", "x", "--replay=a_b", "-n", "1"],
                &["bench", "replay", "-m", "x", "--replay=a_b", "-n", "1"],
            ),
            (
                &["bench", "--spec_synthetic", "0.5"],
                &["bench", "replay", "--spec_synthetic", "0.5"],
            ),
        ] {
            let line = std::iter::once(&"ruvllm").chain(line).map(OsString::from);
            let (found, renamed) = renamed::translated(line.collect(), &Cli::command());
            assert_eq!(found[1..], *expected);
            assert!(renamed.is_some(), "{expected:?}");
        }
        for line in [
            &["bench", "-m", "--kernels"][..],
            &["bench", "speed", "--kernels"],
            &["bench", "kernels"],
            &["bench"],
            &["generate", "-p", "sona"],
            &["learn", "log", "mine"],
            &["help", "bench"],
            &[],
        ] {
            let line: Vec<_> = std::iter::once(&"ruvllm")
                .chain(line)
                .map(OsString::from)
                .collect();
            let (found, renamed) = renamed::translated(line.clone(), &Cli::command());
            assert_eq!((found, renamed), (line, None));
        }
    }

    #[test]
    fn refused() {
        assert!(prepared(&["serve", "-cb"]).unwrap_err().contains("always"));
        assert!(
            prepared(&["generate", "-cb"])
                .unwrap_err()
                .contains("batch")
        );
        assert!(
            prepared(&["quantize", "-ngl", "99"])
                .unwrap_err()
                .contains("CPU")
        );
        assert!(
            prepared(&["quantize", "x", "--n_gpu_layers=99"])
                .unwrap_err()
                .contains("--n-gpu-layers")
        );
        assert!(
            prepared(&["-m", "x", "chat"])
                .unwrap_err()
                .contains("ruvllm chat")
        );
        assert!(
            prepared(&["chat", "--learn-export", "x"])
                .unwrap_err()
                .contains("learn export DIR --as-lora")
        );
        assert!(
            prepared(&["--learn-every=2"])
                .unwrap_err()
                .contains("leave it out")
        );
        assert!(prepared(&["-cnv"]).unwrap_err().contains("ruvllm chat"));
        assert!(
            prepared(&["-p", "x", "-sys", "y"])
                .unwrap_err()
                .contains("only `ruvllm chat`")
        );
    }
}
