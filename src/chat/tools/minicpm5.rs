//! MiniCPM5: `<function name="…">` with `<param name="…">` in it, without a tag around all calls.

use crate::chat::tools::tagged::{CDATA, Tagged, Tags};

pub(super) struct MiniCpm5;

impl Tagged for MiniCpm5 {
    const TAGS: Tags = Tags {
        name: "minicpm5",
        marks: &["<function name=", "<param name="],
        call: ["<function name=\"", "\">", "</function>"],
        argument: ["<param name=\"", "</param>"],
        values: &[("\"><![CDATA[", CDATA), ("\">", "")],
        ..Tags::COMMON
    };
}
