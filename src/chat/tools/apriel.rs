//! Apriel 1.5 and 1.6: a JSON array of calls between `<tool_calls>` and `</tool_calls>`.

use crate::chat::tools::listed::{List, Listed};

pub(super) struct Apriel;

impl Listed for Apriel {
    const LIST: List = List {
        name: "apriel",
        marks: &["<tool_calls>["],
        reasoning: ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
        hidden: &["[END FINAL RESPONSE]"],
        open: "<tool_calls>",
        close: "</tool_calls>",
        ..List::COMMON
    };
}
