//! The list of steps that a pass consists of.
//!
//! A *step* is the embedding, a [`Part`] of a layer, or the head. Some steps in a row are a *piece*
//! ([`Step::piece`]), and the large products and attention are cut into *tiles*. A pass may pause
//! before a piece, and between tiles, but not within the last layer or before the head. What a step
//! leaves for others is in the buffers, so that a later call can go on with the next one.

use crate::layers::hparams::Hparams;
use crate::layers::layer::spec::{FfnSpec, LayerSpec, Mixer};
use std::iter::once;

/// A step of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Step {
    /// Embeddings of tokens, and what else the first layer reads.
    #[default]
    Embed,
    /// A part of a layer.
    Layer(usize, Part),
    /// Last norm and logits.
    Head,
}

/// A part of a layer. A part with *tiles* computes these alone, as it may run in several calls:
/// what comes before or behind them belongs to another part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The norm of what the mixer reads.
    MixerInput,
    /// Attention: products with queries, keys and values (tiles).
    Project,
    /// Attention: norms and rotations, keys and values to the cache.
    Place,
    /// Attention itself (tiles).
    Attend,
    /// Attention: the product with its output.
    AttnOutput,
    /// Any other mixer, completely.
    Mixer,
    /// What the mixer computed joins the residual stream; the norm of what the feed-forward layer
    /// reads.
    FfnInput,
    /// Dense feed-forward layer: products with gate and up (tiles).
    FfnUp,
    /// Dense feed-forward layer: the activation.
    FfnActivate,
    /// Dense feed-forward layer: the product with down (tiles).
    FfnDown,
    /// A mixture of experts, completely.
    Experts,
    /// What the feed-forward layer computed joins the residual stream.
    LayerOutput,
}

/// Number of [`Part`]s.
pub(crate) const N_PARTS: usize = Part::LayerOutput as usize + 1;

/// Where a pass goes on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cursor {
    /// The step that comes next.
    pub(crate) step: Step,
    /// Tiles of it that are computed.
    pub(super) n_tiles: usize,
    /// Index of the next recurrence among those of all layers.
    pub(super) cell: usize,
}

impl Cursor {
    /// Whether something was computed.
    pub(crate) fn is_begun(self) -> bool {
        (self.step, self.n_tiles) != (Step::Embed, 0)
    }
}

impl Step {
    /// Index of the layer; the head comes behind all of them.
    pub(crate) fn layer(self) -> usize {
        match self {
            Step::Embed => 0,
            Step::Layer(layer, _) => layer,
            Step::Head => usize::MAX,
        }
    }

    /// The first step of the piece to which it belongs. A pass may pause before a piece, and in it
    /// between tiles.
    ///
    /// The last layer is one piece: of a prompt little of it is computed, for few rows, and their
    /// buffers are not kept for a later call.
    pub(crate) fn piece(self, n_layer: usize) -> Step {
        let Step::Layer(layer, part) = self else {
            return self;
        };
        let first = match part {
            _ if layer + 1 == n_layer => Part::MixerInput,
            Part::MixerInput | Part::Project | Part::Mixer => Part::MixerInput,
            Part::Place | Part::Attend => Part::Place,
            Part::AttnOutput => Part::AttnOutput,
            Part::FfnInput | Part::FfnUp | Part::Experts => Part::FfnInput,
            Part::FfnActivate | Part::FfnDown | Part::LayerOutput => Part::FfnActivate,
        };
        match (layer, first) {
            (0, Part::MixerInput) => Step::Embed,
            _ => Step::Layer(layer, first),
        }
    }
}

/// The steps of a pass through the layers before `end`. Unless the last layer's rows are read
/// (`reads_last`), only its keys and values, or its state, are computed.
pub(super) fn steps(h: &Hparams, end: usize, reads_last: bool) -> impl Iterator<Item = Step> {
    let is_read = move |layer: usize| reads_last || layer + 1 < h.n_layer;
    let layers = h.layers.iter().enumerate().take(end);
    let layers = layers.flat_map(move |(layer, spec)| {
        let parts = parts(spec).filter(move |part| is_read(layer) || part.is_for_later());
        parts.map(move |part| Step::Layer(layer, part))
    });
    let head = (end == h.n_layer).then_some(Step::Head);
    once(Step::Embed).chain(layers).chain(head)
}

/// The parts of a layer, in their order.
fn parts(spec: &LayerSpec) -> impl Iterator<Item = Part> {
    let mixer: &[Part] = match spec.mixer {
        Mixer::Attention(_) => &[Part::Project, Part::Place, Part::Attend, Part::AttnOutput],
        Mixer::Recurrent(_) | Mixer::Both(..) | Mixer::Compressed(_) => &[Part::Mixer],
        Mixer::None => &[],
    };
    let ffn: &[Part] = match spec.ffn {
        FfnSpec::Dense(_) => &[Part::FfnUp, Part::FfnActivate, Part::FfnDown],
        FfnSpec::Moe(_) | FfnSpec::Both(..) | FfnSpec::Beside(..) => &[Part::Experts],
        FfnSpec::None => &[],
    };
    once(Part::MixerInput)
        .chain(mixer.iter().copied())
        .chain(once(Part::FfnInput))
        .chain(ffn.iter().copied())
        .chain(once(Part::LayerOutput))
}

impl Part {
    /// Whether later tokens need it.
    fn is_for_later(self) -> bool {
        use Part::{MixerInput, Place, Project};
        matches!(self, MixerInput | Project | Place | Part::Mixer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_begin_with_one_of_their_steps() {
        let step = |layer: usize, part: Part| Step::Layer(layer, part);
        assert_eq!(Step::Embed.piece(3), Step::Embed);
        assert_eq!(Step::Head.piece(3), Step::Head);
        // The first piece begins with the embeddings, and the last layer is one piece.
        assert_eq!(step(0, Part::Project).piece(3), Step::Embed);
        assert_eq!(step(0, Part::Attend).piece(3), step(0, Part::Place));
        assert_eq!(step(1, Part::Mixer).piece(3), step(1, Part::MixerInput));
        assert_eq!(step(1, Part::Experts).piece(3), step(1, Part::FfnInput));
        assert_eq!(step(2, Part::FfnDown).piece(3), step(2, Part::MixerInput));
        assert_eq!(step(0, Part::FfnDown).piece(1), Step::Embed);
        for part in [Part::Project, Part::Attend, Part::FfnUp, Part::LayerOutput] {
            let piece = step(1, part).piece(3);
            assert_eq!(piece.piece(3), piece);
            assert!(piece != step(1, part), "{part:?}: in the middle of a piece");
        }
    }

    #[test]
    fn what_is_nowhere_begun_is_at_the_start() {
        assert!(!Cursor::default().is_begun());
        let paused = |step: Step, n_tiles: usize| Cursor {
            step,
            n_tiles,
            cell: 0,
        };
        // Within the first product, and before the second piece.
        assert!(paused(Step::Layer(0, Part::Project), 3).is_begun());
        assert!(paused(Step::Layer(0, Part::Place), 0).is_begun());
    }
}
