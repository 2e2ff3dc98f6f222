//! A conversation with a tool: the model calls a function of this program, gets its result, and
//! answers.
//!
//! `cargo run --release --features chat,grammar --example tools -- MODEL.gguf "How many seconds are
//! 3 hours?"`
//!
//! Without a model it takes the small one of this repository, which knows nothing of tools: the
//! grammar makes it call all the same, with arguments that fit.

use ruvllm::chat::tools::{Tool, ToolCall, ToolChoice, ToolFormat, ToolMask, TurnParser, TurnPart};
use ruvllm::chat::{ChatInputs, ChatTemplate};
use ruvllm::tokenizer::TextStream;
use ruvllm::{Model, Sampler, SamplerOptions};
use serde_json::{Value, json};
use std::error::Error;
use std::io::Write;

/// For models without a template.
const TRANSCRIPT: &str = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}\
    {% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}assistant:";
/// Answers that may call before one that may not.
const MAX_ROUNDS: usize = 3;

/// The function: converts an amount of time to seconds.
fn seconds(arguments: &Value) -> Result<f64, String> {
    let amount = arguments["amount"].as_f64().ok_or("amount is no number")?;
    let unit = match arguments["unit"].as_str() {
        Some("minutes") => 60.0,
        Some("hours") => 3600.0,
        Some("days") => 86400.0,
        _ => return Err("unit is none of minutes, hours, days".into()),
    };
    Ok(amount * unit)
}

/// Does a call; its result, or what is wrong with it, goes back to the model.
fn call(call: &ToolCall) -> String {
    match &call.name[..] {
        "seconds" => {
            seconds(&Value::Object(call.arguments.clone())).map_or_else(|e| e, |s| s.to_string())
        }
        name => format!("there is no function {name}"),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args
        .next()
        .unwrap_or("models/ruvllm-rust-6m-q8_0.gguf".into());
    let question = args
        .next()
        .unwrap_or("How many seconds are 3 hours?".into());

    let model = Model::open(path)?;
    let tokenizer = model.tokenizer().ok_or("this model has no tokenizer")?;
    let source = model.chat_template().unwrap_or(TRANSCRIPT);
    let template = ChatTemplate::parse(source)?;
    // How this family writes calls, and the texts of its tokens: once per model.
    let format = ToolFormat::of(source);
    let trie = model.token_trie()?;
    eprintln!("calls as {}", format.name());

    let described = json!([{"type": "function", "function": {
        "name": "seconds",
        "description": "Converts an amount of time to seconds.",
        "parameters": {
            "type": "object",
            "properties": {
                "amount": {"type": "number", "minimum": 0, "maximum": 10000},
                "unit": {"type": "string", "enum": ["minutes", "hours", "days"]},
            },
            "required": ["amount", "unit"],
            "additionalProperties": false,
        },
    }}]);
    let tools = Tool::from_json(&described)?;
    let mut messages = vec![json!({"role": "user", "content": question})];
    let (mut session, mut sampler) = (
        model.session()?,
        Sampler::new(SamplerOptions {
            seed: Some(1),
            ..Default::default()
        })?,
    );

    for round in 0..=MAX_ROUNDS {
        let choice = match round {
            // A model that knows tools would get `Auto` here.
            0 => ToolChoice::Required,
            MAX_ROUNDS => ToolChoice::None,
            _ => ToolChoice::Auto,
        };
        let inputs = ChatInputs {
            messages: messages.clone().into(),
            tools: Some(described.clone()),
            bos_token: token_text(tokenizer.bos(), tokenizer),
            eos_token: token_text(tokenizer.eos(), tokenizer),
            ..ChatInputs::new(&[])
        };
        let prompt = template.render(&inputs)?;
        sampler.set_mask(Some(Box::new(ToolMask::new(
            &trie, format, &tools, &choice, &prompt,
        )?)));
        let mut parser = TurnParser::new(format, &tools, &prompt);

        let ids = tokenizer.encode_prompt(&prompt);
        let kept = session.cache().keep(&ids);
        let mut generation = session
            .generate(&ids[kept..], &mut sampler)?
            .max_tokens(200);
        // Calls are written with special tokens, which plain text leaves out.
        let (mut stream, mut seen) = (TextStream::new(tokenizer, true), 0);
        while let Some(piece) = generation.next() {
            piece?;
            for &token in &generation.tokens()[seen..] {
                for part in parser.push(stream.push(token)?) {
                    if let TurnPart::Text(text) = part {
                        print!("{text}");
                        std::io::stdout().flush()?;
                    }
                }
            }
            seen = generation.tokens().len();
        }
        let turn = parser.finish();
        if let Some(call) = &turn.unfinished {
            eprintln!("a call was cut off: {call}");
        }
        if turn.calls.is_empty() {
            println!();
            break;
        }
        let calls = turn.calls.iter().enumerate().map(|(i, call)| {
            json!({"id": format!("call_{round}_{i}"), "type": "function",
                   "function": {"name": call.name, "arguments": call.arguments}})
        });
        let calls: Value = calls.collect();
        messages.push(json!({"role": "assistant", "content": turn.text, "tool_calls": calls}));
        for (i, made) in turn.calls.iter().enumerate() {
            let result = call(made);
            eprintln!(
                "{}({}) = {result}",
                made.name,
                Value::Object(made.arguments.clone())
            );
            messages.push(
                json!({"role": "tool", "tool_call_id": format!("call_{round}_{i}"),
                                 "name": made.name, "content": result}),
            );
        }
    }
    Ok(())
}

fn token_text(token: Option<u32>, tokenizer: &ruvllm::Tokenizer) -> String {
    let text = token
        .and_then(|token| tokenizer.token_text(token))
        .unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}
