//! Requests: what a prompt or a conversation, and the options beside it, ask of a session.

use crate::calls::{Model, tokenizer_of};
use crate::failure::Failure;
use crate::fields::Fields;
use crate::reader::Reader;
use ruvllm::Sampler;
use ruvllm::chat::tools::{AfterReasoning, Tool, ToolChoice, ToolFormat, ToolMask, TurnParser};
use ruvllm::chat::{ChatInputs, ChatTemplate, LocalTime, render_guarded};
use ruvllm::grammar::Grammar;
use ruvllm::sample::TokenMask;
use serde_json::Value;

/// Most bytes of the values of a chat template.
const TEMPLATE_BYTES: usize = 64 << 20;

/// A request that was understood.
pub(crate) struct Request {
    pub(crate) sampler: Sampler,
    pub(crate) max_tokens: usize,
    pub(crate) prompt: Prompt,
    /// Texts before which the answer to a prompt ends; those of a conversation are the reader's.
    pub(crate) stop: Vec<String>,
    /// Reads the answer of a conversation.
    pub(crate) reader: Option<Reader>,
}

/// What is to be continued.
pub(crate) enum Prompt {
    /// A text after what the session holds.
    Text(String),
    /// Tokens of a whole conversation, of which the session may hold some.
    Whole(Vec<u32>),
}

/// A rendered conversation.
struct Rendered {
    text: String,
    tokens: Vec<u32>,
    format: ToolFormat,
}

impl Request {
    /// The request in a JSON object, for a session that holds at most `n_ctx` tokens.
    pub(crate) fn parse(json: &str, model: &Model, n_ctx: usize) -> Result<Request, Failure> {
        let mut fields = Fields::parse(json)?;
        let mut sampler = fields.sampler()?;
        let max_tokens = fields.size("max_tokens")?.unwrap_or(usize::MAX);
        let mut stop = fields.texts("stop")?;
        let mask = mask(model, &mut fields)?;
        let (text, messages) = (fields.text("prompt")?, fields.value("messages"));
        let (prompt, reader, mask) = match (text, messages) {
            (Some(text), None) => (Prompt::Text(text), None, mask),
            (None, Some(messages)) => {
                let tools = fields.value("tools");
                let choice = fields.value("tool_choice");
                let rendered = render(model, &mut fields, messages, tools.clone())?;
                let limit = max_tokens.min(n_ctx.saturating_sub(rendered.tokens.len()));
                let called = (tools.as_ref(), choice.as_ref());
                let (mask, parser, either) = reading(model, called, mask, &rendered, limit)?;
                let stop = std::mem::take(&mut stop);
                let reader = Reader::new(tokenizer_of(model)?, parser, either, stop);
                (Prompt::Whole(rendered.tokens), Some(reader), mask)
            }
            _ => {
                let message = "a request has either a prompt or messages";
                return Err(Failure::new("OptionsError", message));
            }
        };
        fields.finish()?;
        sampler.set_mask(mask);
        Ok(Request {
            sampler,
            max_tokens,
            prompt,
            stop,
            reader,
        })
    }
}

/// The conversation as the template writes it.
fn render(
    model: &Model,
    fields: &mut Fields,
    messages: Value,
    tools: Option<Value>,
) -> Result<Rendered, Failure> {
    let failed = Failure::of("ChatError");
    let now = fields.text("now")?;
    let kwargs = fields.object("chat_template_kwargs")?;
    let given = fields.text("chat_template")?;
    let of_file = || model.chat_template().map(str::to_owned);
    let Some(source) = given.or_else(of_file) else {
        let message = "the file has no chat template; pass one as chat_template";
        return Err(Failure::new("ChatError", message));
    };
    let mut template = ChatTemplate::parse(&source).map_err(&failed)?;
    template.set_max_memory(TEMPLATE_BYTES);
    let tokenizer = tokenizer_of(model)?;
    let text_of = |token: Option<u32>| {
        let text = token.and_then(|token| tokenizer.token_text(token));
        String::from_utf8_lossy(text.unwrap_or_default()).into_owned()
    };
    let inputs = ChatInputs {
        messages,
        tools,
        bos_token: text_of(tokenizer.bos()),
        eos_token: text_of(tokenizer.eos()),
        kwargs,
        now: match now {
            Some(now) => Some(now.parse::<LocalTime>().map_err(Failure::of("ChatError"))?),
            None => None,
        },
        ..ChatInputs::new(&[])
    };
    let control = |text: &str| tokenizer.control_texts(text);
    let render = |inputs: &ChatInputs| template.render_fitted(inputs);
    let (rendered, plain) = render_guarded(&inputs, &control, render).map_err(&failed)?;
    Ok(Rendered {
        tokens: tokenizer.encode_prompt_but(&rendered.text, &plain),
        text: rendered.text,
        format: ToolFormat::of(&source),
    })
}

/// What the answer obeys, what reads it, and what tells calls from text if it may be either.
type Reading = (Option<Box<dyn TokenMask>>, TurnParser, Option<ToolMask>);

/// How the answer of a conversation, of at most `limit` tokens, is read: with the given tools, the
/// choice among them, and the `mask` of its text.
fn reading(
    model: &Model,
    (tools, choice): (Option<&Value>, Option<&Value>),
    mask: Option<Box<dyn TokenMask>>,
    rendered: &Rendered,
    limit: usize,
) -> Result<Reading, Failure> {
    let failed = Failure::of("ChatError");
    let choice = choice.map_or(Ok(ToolChoice::Auto), ToolChoice::from_json);
    let choice = choice.map_err(&failed)?;
    let tools = tools
        .map_or(Ok(Vec::new()), Tool::from_json)
        .map_err(&failed)?;
    let callable = choice.allowed(&tools).map_err(&failed)?;
    let (format, prompt) = (rendered.format, rendered.text.as_str());
    let parser = TurnParser::new(format, &callable, prompt);
    // Where calls are required there is no text.
    let mask = mask.filter(|_| !choice.is_required());
    Ok(match mask {
        Some(text) if !callable.is_empty() => {
            let mask = ToolMask::with_text(model.trie()?, format, &tools, &choice, prompt, text);
            let mask = mask.map_err(&failed)?;
            (Some(mask.boxed_clone()), parser.undecided(), Some(mask))
        }
        Some(text) => {
            // Half of the tokens are left for what the grammar describes.
            let mask = AfterReasoning::wrap(text, model.trie()?, format, prompt, limit / 2);
            (Some(mask), parser.verbatim(), None)
        }
        None if tools.is_empty() => (None, parser, None),
        None => {
            let mask = ToolMask::new(model.trie()?, format, &tools, &choice, prompt);
            let parser = match choice.is_required() {
                true => parser.calls(),
                false => parser,
            };
            (Some(Box::new(mask.map_err(&failed)?)), parser, None)
        }
    })
}

/// What the answer has to obey: `response_format` as in the OpenAI API, llama.cpp's `json_schema`
/// and `grammar`, or `regex`.
fn mask(model: &Model, fields: &mut Fields) -> Result<Option<Box<dyn TokenMask>>, Failure> {
    let mut schema = fields.value("json_schema");
    let mut any_json = false;
    if let Some(format) = fields.value("response_format") {
        match format["type"].as_str() {
            Some("json_schema") => schema = Some(format["json_schema"]["schema"].clone()),
            Some("json_object") => any_json = true,
            Some("text") => (),
            _ => {
                let types = "text, json_object, json_schema";
                let message = format!("response_format: {format} has none of the types {types}");
                return Err(Failure::new("OptionsError", message));
            }
        }
    }
    let (gbnf, regex) = (fields.text("grammar")?, fields.text("regex")?);
    let given = [schema.is_some(), any_json, gbnf.is_some(), regex.is_some()];
    let grammar = match (schema, gbnf, regex) {
        _ if given.iter().filter(|&&given| given).count() > 1 => {
            let message =
                "an answer obeys one format: json_schema, response_format, grammar or regex";
            return Err(Failure::new("OptionsError", message));
        }
        (Some(schema), ..) => Grammar::json_schema(model.trie()?, &schema.to_string()),
        (_, Some(gbnf), _) => Grammar::gbnf(model.trie()?, &gbnf),
        (.., Some(regex)) => Grammar::regex(model.trie()?, &regex),
        _ if any_json => Grammar::json(model.trie()?),
        _ => return Ok(None),
    };
    let grammar = grammar.map_err(Failure::of("GrammarError"))?;
    Ok(Some(Box::new(grammar.matcher())))
}
