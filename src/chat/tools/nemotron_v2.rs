//! Nemotron Nano v2: a JSON array of calls between `<TOOLCALL>` and `</TOOLCALL>`.

use crate::chat::tools::listed::{List, Listed};

pub(super) struct NemotronV2;

impl Listed for NemotronV2 {
    const LIST: List = List {
        name: "nemotron-v2",
        marks: &["<TOOLCALL>"],
        open: "<TOOLCALL>",
        close: "</TOOLCALL>",
        ..List::COMMON
    };
}
