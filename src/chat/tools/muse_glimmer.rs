//! muse-glimmer: a message to the function, which holds an invocation in `atem:` tags.

use crate::chat::tools::tagged::{self, Tagged, Tags};
use crate::chat::tools::{Format, Opening};

const OPEN: &str = "<atem:function_calls>";
const MESSAGE: &str = "<|message|>";

struct MuseGlimmer;

impl Tagged for MuseGlimmer {
    const TAGS: Tags = Tags {
        name: "muse-glimmer",
        marks: &["atem:function_calls>"],
        hidden: &["<|start|>assistant", MESSAGE, "<|eot|>"],
        open: OPEN,
        close: "</atem:function_calls>",
        call: ["\n<atem:invoke name=\"", "\">\n", "</atem:invoke>\n"],
        argument: ["<atem:parameter name=\"", "</atem:parameter>\n"],
        values: &[("\">", "")],
        ..Tags::COMMON
    };
}

const INVOCATION: Format = tagged::format::<MuseGlimmer>();

pub(super) const FORMAT: Format = Format {
    openings: &[
        Opening::marker(OPEN),
        // The head of a message to a function.
        Opening {
            text: "to=",
            at_start: true,
            keep: false,
        },
    ],
    read: |block, tools| {
        let invocation = block.split_once(OPEN).map_or(block, |(_, behind)| behind);
        (INVOCATION.read)(invocation, tools)
    },
    grammar: |tools, marks| {
        let head = format!("/[A-Za-z0-9_.-]{{1,128}}/ {}", marks.lark(MESSAGE));
        let open = super::lark_text(OPEN);
        let lark = (INVOCATION.grammar)(tools, marks)?;
        Ok(lark.replacen("start: ", &format!("start: ({head} {open})? "), 1))
    },
    ..INVOCATION
};
