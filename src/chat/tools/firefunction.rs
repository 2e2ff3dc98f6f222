//! Firefunction v2: a JSON array of calls after ` functools`.

use crate::chat::tools::listed::{List, Listed};

pub(super) struct Firefunction;

impl Listed for Firefunction {
    const LIST: List = List {
        name: "firefunction-v2",
        marks: &["functools["],
        open: "functools",
        ..List::COMMON
    };
}
