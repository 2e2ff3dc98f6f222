//! Kimi K3: elements opened and closed by special tokens, each argument with its type.

use crate::chat::tools::tagged::{Tagged, Tags};

pub(super) struct KimiK3;

impl Tagged for KimiK3 {
    const TAGS: Tags = Tags {
        name: "kimi-k3",
        marks: &["<|open|>", "<|close|>", "<|sep|>"],
        reasoning: ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        hidden: &[
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ],
        open: "<|open|>tools<|sep|>",
        close: "<|close|>tools<|sep|>",
        call: ["<|open|>call tool=\"", "<|sep|>", "<|close|>call<|sep|>"],
        attributes: r#""\" index=\"" /[0-9]{1,3}/ "\"""#,
        argument: ["<|open|>argument key=\"", "<|close|>argument<|sep|>"],
        values: &[
            ("\" type=\"string\"<|sep|>", "string"),
            ("\" type=\"number\"<|sep|>", "number"),
            ("\" type=\"boolean\"<|sep|>", "boolean"),
            ("\" type=\"object\"<|sep|>", "object"),
            ("\" type=\"array\"<|sep|>", "array"),
            ("\" type=\"null\"<|sep|>", "null"),
        ],
        special: &["<|open|>", "<|close|>", "<|sep|>"],
    };
}
