//! The program `ruvllm`: all of it is in the library beside it.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    ruvllm_cli::main()
}
