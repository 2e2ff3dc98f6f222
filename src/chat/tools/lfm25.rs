//! LFM2.5: LFM2's calls; its templates do not mark the list of tools.

use crate::chat::tools::{Format, lfm2};

pub(super) const FORMAT: Format = Format {
    name: "lfm2.5",
    marks: &["<|tool_call_start|>"],
    ..lfm2::FORMAT
};
