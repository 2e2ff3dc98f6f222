//! Dense feed-forward layers: `down(act(gate(x), up(x)))`.

pub(crate) mod spec;
pub(crate) mod weights;
