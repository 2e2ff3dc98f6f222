//! Apertus: a JSON array between `<|tools_prefix|>` and `<|tools_suffix|>`, in which the name of a
//! call is the key of its arguments.

use crate::chat::tools::listed::{List, Listed};

pub(super) struct Apertus;

impl Listed for Apertus {
    const LIST: List = List {
        name: "apertus",
        marks: &["<|tools_prefix|>", "<|tools_suffix|>"],
        reasoning: ("<|inner_prefix|>", "<|inner_suffix|>"),
        open: "<|tools_prefix|>",
        close: "<|tools_suffix|>",
        keys: ("", ""),
        ..List::COMMON
    };
}
