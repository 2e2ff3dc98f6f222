//! `ruvllm completions`: what a shell completes.

use crate::io::{Failure, print};
use clap_complete::{Shell, generate};

const EXAMPLES: &str = "\
Examples:
  ruvllm completions bash > ~/.local/share/bash-completion/completions/ruvllm
  ruvllm completions zsh > ~/.zfunc/_ruvllm
  ruvllm completions fish > ~/.config/fish/completions/ruvllm.fish";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

pub(crate) fn run(args: &Args, mut program: clap::Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    let name = program.get_name().to_owned();
    generate(args.shell, &mut program, name, &mut script);
    print(script)
}
