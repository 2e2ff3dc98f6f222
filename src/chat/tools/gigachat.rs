//! GigaChat 3: a message of the role `function call` with a JSON object; since 3.1 the object comes
//! after `<|function_call|>`.

use crate::chat::tools::listed::{List, Listed};

pub(super) struct V3;
pub(super) struct V3_1;

impl Listed for V3 {
    const LIST: List = List {
        name: "gigachat3",
        marks: &["<|role_sep|>", "function call"],
        open: "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        is_array: false,
        ..List::COMMON
    };
}

impl Listed for V3_1 {
    const LIST: List = List {
        name: "gigachat3.1",
        marks: &["<|role_sep|>", "<|function_call|>"],
        open: "<|function_call|>",
        ..V3::LIST
    };
}
