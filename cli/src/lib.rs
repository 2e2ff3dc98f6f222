//! The program `ruvllm`: one file per subcommand. What they share lies in `args` (spelling of
//! flags), `model` and `sampling` (groups of flags), `input` and `output`.
//!
//! Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 the work failed, 2 the
//! call was wrong, 130 interrupted.
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
use flags::llama_cpp;
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
    match execute(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
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
