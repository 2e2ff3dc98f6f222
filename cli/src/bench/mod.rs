//! What measures: speed, formats, drafts, sequences side by side, learning.

pub(crate) mod batch;
pub(crate) mod formats;
pub(crate) mod learning;
pub(crate) mod perplexity;
pub(crate) mod replay;
pub(crate) mod speed;
