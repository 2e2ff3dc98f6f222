//! Hunyuan 3: a name, then keys and values in tags, all of which carry the release's suffix.

use crate::chat::tools::tagged::{Tagged, Tags};

pub(super) struct Hy3;

impl Tagged for Hy3 {
    const TAGS: Tags = Tags {
        name: "hy3",
        marks: &["<tool_sep{}>", "<arg_key{}>"],
        reasoning: ("<think:opensource>", "</think:opensource>"),
        open: "<tool_calls:opensource>",
        close: "</tool_calls:opensource>",
        call: [
            "\n<tool_call:opensource>",
            "<tool_sep:opensource>\n",
            "</tool_call:opensource>\n",
        ],
        argument: ["<arg_key:opensource>", "</arg_value:opensource>\n"],
        values: &[("</arg_key:opensource>\n<arg_value:opensource>", "")],
        special: &[
            "<tool_call:opensource>",
            "</tool_call:opensource>",
            "<tool_calls:opensource>",
            "</tool_calls:opensource>",
            "<tool_sep:opensource>",
            "<arg_key:opensource>",
            "</arg_key:opensource>",
            "<arg_value:opensource>",
            "</arg_value:opensource>",
        ],
        ..Tags::COMMON
    };
}
