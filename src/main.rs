//! The `ruvllm` program; the work is done in `cli` and the library.

#![forbid(unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    cli::run()
}
