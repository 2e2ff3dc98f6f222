//! Command R+: a JSON array of calls in a code block after `Action:`.

use crate::chat::tools::listed::{List, Listed};

pub(super) struct CommandRPlus;

impl Listed for CommandRPlus {
    const LIST: List = List {
        name: "command-r-plus",
        marks: &["Action:", "```json", "tool_name"],
        open: "Action:\n```json\n",
        close: "```",
        keys: ("tool_name", "parameters"),
        ..List::COMMON
    };
}
