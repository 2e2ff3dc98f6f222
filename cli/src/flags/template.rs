//! Chat templates: that of models that have none, and the texts of the tokens that templates name.

use ruvllm::tokenizer::Tokenizer;

/// For models that have no template.
pub(crate) const TRANSCRIPT: &str = "\
{%- for m in messages -%}
{%- if m.role == 'system' %}{{ m.content }}\n\n{% else %}{{ m.role | capitalize }}: {{ m.content | trim }}\n{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}Assistant:{% endif -%}";

/// What ends an answer in it.
pub(crate) const TRANSCRIPT_STOP: &str = "\nUser:";

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
