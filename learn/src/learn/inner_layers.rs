//! What was learnt in inner layers.

use crate::learn::topics::{Counts, Topics};
use ruvllm::engine::AdapterId;
use ruvllm::lora::Adapter;
use std::sync::Arc;

/// Tokens that one step learns, and of a window of control text, unless the context is shorter.
pub(super) const WINDOW: usize = 128;

/// Most tokens of control text that are kept.
pub(super) const CONTROL_TOKENS: usize = 1 << 14;

/// What was learnt in inner layers, and on what text it may not change the model much.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layers {
    pub(crate) topics: Topics,
    /// The topic whose adapter is in effect.
    pub(crate) chosen: Option<u32>,
    pub(super) control: Vec<u32>,
    /// How often each token is in the control text.
    pub(super) ordinary: Counts,
    /// The chosen topic's adapter, while the learner belongs to a session.
    pub(super) attached: Option<AdapterId>,
}

impl Layers {
    /// With nothing learnt.
    pub(crate) fn new(control: Vec<u32>) -> Layers {
        Layers {
            ordinary: Counts::of(&control),
            control,
            ..Default::default()
        }
    }

    pub(crate) fn control(&self) -> &[u32] {
        &self.control
    }

    pub(super) fn ordinary(&self) -> &Counts {
        &self.ordinary
    }

    /// The adapter in effect.
    pub(super) fn adapter(&self) -> Option<&Arc<Adapter>> {
        self.topics.get(self.chosen?)?.trained.adapter.as_ref()
    }

    /// Divergence of the adapter in effect.
    pub(super) fn divergence(&self) -> f64 {
        self.chosen
            .and_then(|topic| self.topics.get(topic))
            .map_or(0.0, |topic| topic.trained.divergence)
    }

    /// Divergence of each topic's adapter, and that of none.
    pub(super) fn divergences(&self) -> impl Iterator<Item = f64> {
        self.topics
            .all
            .iter()
            .map(|topic| topic.trained.divergence)
            .chain([0.0])
    }

    /// Adds control text; windows of it at equal distances stay if it is too long.
    pub(super) fn add_control(&mut self, tokens: &[u32]) {
        self.control.extend(tokens);
        let (n, most) = (self.control.len() / WINDOW, CONTROL_TOKENS / WINDOW);
        if n > most {
            let windows = (0..most).flat_map(|i| &self.control[i * n / most * WINDOW..][..WINDOW]);
            self.control = windows.copied().collect();
        }
        self.ordinary = Counts::of(&self.control);
    }
}
