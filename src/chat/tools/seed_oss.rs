//! Seed-OSS: Qwen3-Coder's tags between `<seed:tool_call>` and `</seed:tool_call>`.

use crate::chat::tools::tagged::{Tagged, Tags};

pub(super) struct SeedOss;

impl Tagged for SeedOss {
    const TAGS: Tags = Tags {
        name: "seed-oss",
        marks: &["seed:tool_call>"],
        reasoning: ("<seed:think>", "</seed:think>"),
        open: "<seed:tool_call>",
        close: "</seed:tool_call>",
        call: ["\n<function=", ">\n", "</function>\n"],
        argument: ["<parameter=", "</parameter>\n"],
        values: &[(">", "")],
        special: &["<seed:tool_call>", "</seed:tool_call>"],
        ..Tags::COMMON
    };
}
