//! `ruvllm template`: messages to the prompt that a model sees.

use crate::flags::ModelArgs;
use crate::flags::template::{Renderer, TemplateArgs, bos_text, eos_text};
use crate::io::{Failure, json_object, note, print, read_json};
use ruvllm::Tokenizer;
use ruvllm::chat::{ChatInputs, LocalTime};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  ruvllm template -m model.gguf --messages chat.json --add-generation-prompt
  ruvllm template --chat-template-file t.jinja --messages chat.json --bos-token '<s>' --eos-token '</s>'
  ruvllm template -m model.gguf --messages chat.json --tools tools.json --kwargs '{\"enable_thinking\":false}'

chat.json: [{\"role\": \"user\", \"content\": \"Hello\"}]
Prints the rendered text and nothing else.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// JSON file with an array of messages; - is stdin
    #[arg(long, value_name = "FILE")]
    messages: PathBuf,
    /// JSON file with an array of tools
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// Further variables of the template, as a JSON object
    #[arg(long, value_name = "JSON", alias = "chat-template-kwargs", value_parser = json_object)]
    kwargs: Option<serde_json::Map<String, serde_json::Value>>,
    /// End with the beginning of the assistant's answer
    #[arg(long)]
    add_generation_prompt: bool,
    /// Text of the beginning-of-text token [default: the model's]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    bos_token: Option<String>,
    /// Text of the end-of-text token [default: the model's]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    eos_token: Option<String>,
    /// The time that the template sees, as in 2025-01-15T09:05:07 [default: the clock, in UTC]
    #[arg(long, value_name = "TIME")]
    now: Option<LocalTime>,
    #[command(flatten)]
    template: TemplateArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let given = args.template.given()?;
    let metadata = match (&given, args.model.is_demo()) {
        (Some(_), true) => None,
        (None, true) => {
            return Err(Failure::Usage(
                "no template: give -m FILE, --chat-template NAME or --chat-template-file FILE"
                    .into(),
            ));
        }
        (_, false) => Some(args.model.header()?.metadata),
    };
    let source = match (given, &metadata) {
        (Some(source), _) => source,
        (None, Some(metadata)) => metadata
            .opt_str("tokenizer.chat_template")?
            .map(str::to_owned)
            .ok_or_else(|| {
                Failure::Work(format!(
                    "{}: the model has no chat template; give one with --chat-template NAME or --chat-template-file FILE",
                    args.model.label()
                ))
            })?,
        (None, None) => String::new(),
    };
    let tokenizer = match &metadata {
        Some(metadata) if args.bos_token.is_none() || args.eos_token.is_none() => {
            Some(Tokenizer::from_metadata(metadata)?)
        }
        _ => None,
    };
    let inputs = ChatInputs {
        messages: read_json(&args.messages)?,
        tools: args.tools.as_deref().map(read_json).transpose()?,
        add_generation_prompt: args.add_generation_prompt,
        kwargs: args.kwargs.clone().unwrap_or_default(),
        now: args.now,
        bos_token: args
            .bos_token
            .clone()
            .unwrap_or_else(|| bos_text(tokenizer.as_ref())),
        eos_token: args
            .eos_token
            .clone()
            .unwrap_or_else(|| eos_text(tokenizer.as_ref())),
    };
    let rendered = Renderer::new(&source)?.render(&inputs)?;
    for adjustment in rendered.adjusted {
        note(format!("note: {adjustment}"));
    }
    print(rendered.text)
}
