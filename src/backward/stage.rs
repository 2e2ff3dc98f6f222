//! Where a backward pass ends.

use crate::lora::TargetModule;

/// The lowest part of a layer with a requested gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Below,
    Qkv,
    Output,
    FeedForward,
}

impl Stage {
    pub(super) fn of(site: &TargetModule) -> Stage {
        match site.part() {
            "attn_q" | "attn_k" | "attn_v" | "attn_qkv" => Stage::Qkv,
            "attn_output" => Stage::Output,
            _ => Stage::FeedForward,
        }
    }
}

/// The lowest layer with a requested gradient, and its lowest such part; the number of layers if
/// only the head has one.
pub(super) fn lowest<'a>(
    sites: impl Iterator<Item = &'a TargetModule>,
    n_layer: usize,
) -> (usize, Stage) {
    let place = |site: &TargetModule| match site.layer() {
        Some(layer) => (layer, Stage::of(site)),
        None if site.is_embedding() => (0, Stage::Below),
        None => (n_layer, Stage::Below),
    };
    sites.map(place).min().unwrap_or((n_layer, Stage::Below))
}
