//! DeepSeek V3.2 and V4: invocations in tags that begin with `｜DSML｜`, each parameter with an
//! attribute that distinguishes strings from JSON.

use crate::chat::tools::tagged::{Tagged, Tags};

pub(super) struct V3_2;
pub(super) struct V4;

impl Tagged for V3_2 {
    const TAGS: Tags = Tags {
        name: "deepseek-v3.2",
        marks: &["｜DSML｜", "function_calls"],
        open: "<｜DSML｜function_calls>",
        close: "</｜DSML｜function_calls>",
        call: ["\n<｜DSML｜invoke name=\"", "\">\n", "</｜DSML｜invoke>\n"],
        argument: ["<｜DSML｜parameter name=\"", "</｜DSML｜parameter>\n"],
        values: &[
            ("\" string=\"true\">", "string"),
            ("\" string=\"false\">", "json"),
        ],
        special: &["｜DSML｜"],
        ..Tags::COMMON
    };
}

impl Tagged for V4 {
    const TAGS: Tags = Tags {
        name: "deepseek-v4",
        marks: &["｜DSML｜"],
        open: "<｜DSML｜tool_calls>",
        close: "</｜DSML｜tool_calls>",
        ..V3_2::TAGS
    };
}
