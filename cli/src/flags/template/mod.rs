//! Chat templates: which one is used, and who renders it; the texts of the tokens that templates
//! name.

mod builtin;
mod images;
mod protocol;
mod renderer;
pub(crate) mod worker;

use crate::io::{Failure, read_regular};
use clap::Args;
pub(crate) use images::{ImageTemplate, Pictures, parts};
pub(crate) use renderer::Renderer;
use ruvllm::Tokenizer;
use std::path::PathBuf;

/// For models that have no template.
const TRANSCRIPT: &str = "\
{%- for m in messages -%}
{%- if m.role == 'system' %}{{ m.content }}\n\n{% else %}{{ m.role | capitalize }}: {{ m.content | trim }}\n{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}Assistant:{% endif -%}";

/// What ends an answer in it: the name of any role, with which the next turn would begin.
const TRANSCRIPT_STOPS: [&str; 10] = [
    "\nUser:",
    "User:",
    "\nAssistant:",
    "Assistant:",
    "\nSystem:",
    "System:",
    "\nDeveloper:",
    "Developer:",
    "\nTool:",
    "Tool:",
];

/// Which template to use instead of the model's.
#[derive(Args)]
#[command(next_help_heading = "Chat template")]
pub(crate) struct TemplateArgs {
    /// Chat template to use instead of the model's: a name (chatml, llama3, gemma, …) or a Jinja
    /// text
    #[arg(
        long,
        value_name = "NAME",
        env = "LLAMA_ARG_CHAT_TEMPLATE",
        conflicts_with = "chat_template_file",
        value_parser = named
    )]
    chat_template: Option<String>,
    /// Jinja file to use instead of the model's chat template
    #[arg(
        long,
        value_name = "FILE",
        alias = "template",
        env = "LLAMA_ARG_CHAT_TEMPLATE_FILE"
    )]
    chat_template_file: Option<PathBuf>,
    /// Take texts of control tokens in messages of users and tools for these tokens: then a user can
    /// end a turn, and begin another
    #[arg(long)]
    pub(crate) parse_user_special: bool,
}

/// A template by its name, or as it is.
fn named(text: &str) -> Result<String, String> {
    if text.contains("{{") || text.contains("{%") {
        return Ok(text.to_owned());
    }
    builtin::template(text).ok_or_else(|| {
        let names: Vec<&str> = builtin::names().collect();
        format!(
            "there is no template of this name, only {}; --chat-template-file takes a file",
            names.join(", ")
        )
    })
}

/// The source of a template, and strings that end any answer made with it.
pub(crate) struct TemplateSource {
    pub(crate) source: String,
    pub(crate) stops: Vec<String>,
    /// Whether it is a transcript, since the model has no template.
    pub(crate) is_transcript: bool,
}

impl TemplateArgs {
    /// The template that was asked for.
    pub(crate) fn given(&self) -> Result<Option<String>, Failure> {
        match (&self.chat_template, &self.chat_template_file) {
            (Some(source), _) => Ok(Some(source.clone())),
            (None, Some(path)) => read_regular(path).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// The template that was asked for, or else the model's, or else a transcript.
    pub(crate) fn source(&self, of_model: Option<&str>) -> Result<TemplateSource, Failure> {
        let source = self.given()?.or_else(|| of_model.map(str::to_owned));
        let is_transcript = source.is_none();
        let stops = TRANSCRIPT_STOPS.iter().filter(|_| is_transcript);
        Ok(TemplateSource {
            stops: stops.map(|&stop| stop.to_owned()).collect(),
            source: source.unwrap_or_else(|| TRANSCRIPT.to_owned()),
            is_transcript,
        })
    }
}

/// What is said of a conversation with a model that has no template.
pub(crate) fn transcript_note(model: &str) -> String {
    format!(
        "{model} has no chat template: it is a base model, not trained to converse. Its text goes on after \
         \"User:\" and \"Assistant:\"; --chat-template NAME or --chat-template-file FILE gives another form."
    )
}

/// Text of the beginning-of-text token, if there is one.
pub(crate) fn bos_text(tokenizer: Option<&Tokenizer>) -> String {
    tokenizer
        .and_then(|t| token_text(t, t.bos()))
        .unwrap_or_default()
}

/// Text of the end-of-text token, if there is one.
pub(crate) fn eos_text(tokenizer: Option<&Tokenizer>) -> String {
    tokenizer
        .and_then(|t| token_text(t, t.eos()))
        .unwrap_or_default()
}

fn token_text(tokenizer: &Tokenizer, id: Option<u32>) -> Option<String> {
    Some(String::from_utf8_lossy(tokenizer.token_text(id?)?).into_owned())
}
