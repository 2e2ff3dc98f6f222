//! Calls of tools in an answer under way.

use crate::failure::Failure;
use ruvllm::Tokenizer;
use ruvllm::chat::tools::{Tool, ToolChoice, ToolFormat, ToolMask, TurnParser, TurnPart};
use ruvllm::grammar::TokenTrie;
use ruvllm::tokenizer::TextStream;
use serde_json::{Value, json};
use std::sync::Arc;

/// The reader of an answer that may call tools.
pub(crate) struct Reader {
    parser: TurnParser,
    stream: TextStream,
    /// Tokens it has read.
    n_read: usize,
}

impl Reader {
    /// A reader of the answer to `prompt`, the rendered template `template`, and the mask that the answer obeys.
    pub(crate) fn new(
        tokenizer: &Arc<Tokenizer>,
        trie: &TokenTrie,
        template: &str,
        tools: &Value,
        choice: Option<&Value>,
        prompt: &str,
    ) -> Result<(Reader, ToolMask), Failure> {
        let failed = Failure::of("ChatError");
        let format = ToolFormat::of(template);
        let choice = choice.map_or(Ok(ToolChoice::Auto), ToolChoice::from_json).map_err(&failed)?;
        let tools = Tool::from_json(tools).map_err(&failed)?;
        let mask = ToolMask::new(trie, format, &tools, &choice, prompt).map_err(&failed)?;
        let reader = Reader {
            parser: TurnParser::new(format, &tools, prompt),
            // Calls are written with special tokens, which plain text leaves out.
            stream: TextStream::new(tokenizer, true),
            n_read: 0,
        };
        Ok((reader, mask))
    }

    /// The text for the user in the tokens that are new among `tokens`.
    pub(crate) fn read(&mut self, tokens: &[u32]) -> Result<String, Failure> {
        let mut text = String::new();
        for &token in &tokens[self.n_read..] {
            let piece = self.stream.push(token).map_err(Failure::of("SessionError"))?;
            for part in self.parser.push(piece) {
                if let TurnPart::Text(more) = part {
                    text += &more;
                }
            }
        }
        self.n_read = tokens.len();
        Ok(text)
    }

    /// The text that was held back until the end.
    pub(crate) fn finish(&mut self) -> String {
        let mut text = String::new();
        for part in self.parser.finish_parts() {
            if let TurnPart::Text(more) = part {
                text += &more;
            }
        }
        text
    }

    /// The calls so far, in the form of the OpenAI API, and the reasoning before them.
    pub(crate) fn calls(&self) -> (Value, &str) {
        let turn = self.parser.turn();
        let calls = turn.calls.iter().enumerate().map(|(i, call)| {
            let id = call.id.clone().unwrap_or_else(|| format!("call_{i}"));
            let arguments = Value::Object(call.arguments.clone()).to_string();
            json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
        });
        (calls.collect(), &turn.reasoning)
    }
}
