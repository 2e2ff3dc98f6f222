//! `ruvllm serve`: the model behind the APIs of OpenAI, Anthropic and llama-server.

use crate::io::Failure;
use crate::serve::{ServerArgs, listen};
use std::ffi::OsString;

const EXAMPLES: &str = "\
Examples:
  ruvllm serve -m model.gguf
  ruvllm serve -m model.gguf --port 8081 --api-key secret -np 8 -c 8192
  ruvllm serve --models-dir models --models-max 2 --sleep-idle-seconds 600
  ruvllm serve -m model.gguf --api-key-file keys --learn users --learn-per-user --learn-control manual.txt
  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'

Clients of the OpenAI API take http://127.0.0.1:8080/v1 as their base URL. Ctrl-C or SIGTERM stops taking requests and
answers what is there; a second one ends at once.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    server: ServerArgs,
}

impl Args {
    /// The same, which know the command line that they come from.
    pub(crate) fn of_line(mut self, line: &[OsString]) -> Args {
        // Behind the program's name and the command's.
        self.server.given = line.iter().skip(2).cloned().collect();
        self
    }
}

pub(crate) fn run(args: Args) -> Result<(), Failure> {
    listen(args.server)
}
