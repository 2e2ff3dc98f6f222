//! MiniMax M1: a JSON object for each call between `<tool_calls>` and `</tool_calls>`.

use crate::chat::tools::listed::{List, Listed};

pub(super) struct MiniMaxM1;

impl Listed for MiniMaxM1 {
    const LIST: List = List {
        name: "minimax-m1",
        marks: &["<tool_calls>", "<beginning_of_sentence>"],
        open: "<tool_calls>",
        close: "</tool_calls>",
        around: ("\n", "\n"),
        is_array: false,
        ..List::COMMON
    };
}
