//! Rows that a forward pass keeps for a backward pass.

use crate::backward::stage::lowest;
use crate::compute::probe::{EvalCallback, HookPoint};
use crate::layers::layer::weights::FeedForward;
use crate::lora::TargetModule;
use crate::model::Model;

/// Limit on the bytes of the outputs of `gate`, `up` and `wq` that are kept instead of recomputed,
/// which is the most expensive part of recomputation: as much as four layers of a 1B model have for
/// 512 tokens, and about as much as one layer's buffers.
pub(super) const KEPT_BYTES: usize = 144 << 20;

/// Rows that a forward pass keeps for the backward pass, for each layer from `lowest` on. A session
/// reuses the memory.
#[derive(Debug, Default)]
pub(crate) struct Saved {
    pub(super) lowest: usize,
    /// Inputs of the layers, and the output of the last one.
    pub(crate) x: Vec<Vec<f32>>,
    pub(super) layers: Vec<SavedLayer>,
    /// Of the backward pass itself: the gradient of the output of the layer that comes next.
    pub(super) dx: Vec<f32>,
}

#[derive(Debug, Default)]
pub(super) struct SavedLayer {
    /// Output of attention, before `wo`.
    pub(super) attn: Vec<f32>,
    /// Between attention and feed-forward.
    pub(super) mid: Vec<f32>,
    /// Output of either branch, if a norm follows it.
    pub(super) attn_out: Vec<f32>,
    pub(super) ffn_out: Vec<f32>,
    pub(super) has_post_norms: (bool, bool),
    /// Outputs of `gate`, `up` and `wq`, if they are kept.
    pub(super) gate: Vec<f32>,
    pub(super) up: Vec<f32>,
    pub(super) q: Vec<f32>,
    pub(super) keeps_products: bool,
    /// Values of these per token.
    pub(super) n_products: usize,
}

impl Saved {
    /// Clears the memory for the gradients at `sites` of `m` tokens.
    pub(crate) fn prepare<'a>(
        &mut self,
        model: &Model,
        sites: impl Iterator<Item = &'a TargetModule>,
        m: usize,
    ) {
        let layers = &model.weights().layers;
        let (lowest, _) = lowest(sites, layers.len());
        self.lowest = lowest;
        self.x.resize_with(layers.len() + 1 - lowest, Vec::new);
        self.x.iter_mut().for_each(Vec::clear);
        self.layers
            .resize_with(layers.len() - lowest, SavedLayer::default);
        let mut room = KEPT_BYTES / size_of::<f32>();
        for (saved, layer) in self.layers.iter_mut().zip(&layers[lowest..]) {
            saved.has_post_norms = (
                layer.post_attn_norm.is_some(),
                layer.post_ffn_norm.is_some(),
            );
            saved.n_products = match &layer.ffn {
                FeedForward::Dense(ffn) => {
                    let n_q = layer.attn.as_ref().map_or(0, |attn| attn.wq.w.n_out);
                    (1 + usize::from(ffn.gate.is_some())) * ffn.up.w.n_out + n_q
                }
                FeedForward::Moe(_)
                | FeedForward::Both(_)
                | FeedForward::Beside(_)
                | FeedForward::None => usize::MAX,
            };
            let products = saved.n_products.saturating_mul(m);
            saved.keeps_products = products <= room;
            if saved.keeps_products {
                room -= products;
            }
            let SavedLayer {
                attn,
                mid,
                attn_out,
                ffn_out,
                gate,
                up,
                q,
                ..
            } = saved;
            [attn, mid, attn_out, ffn_out, gate, up, q]
                .into_iter()
                .for_each(Vec::clear);
        }
    }
}

impl Saved {
    /// Bytes that it holds.
    pub(crate) fn bytes(&self) -> u64 {
        let of_layers = self.layers.iter().flat_map(|saved| {
            let SavedLayer {
                attn,
                mid,
                attn_out,
                ffn_out,
                gate,
                up,
                q,
                ..
            } = saved;
            [attn, mid, attn_out, ffn_out, gate, up, q]
        });
        self.x
            .iter()
            .chain(of_layers)
            .chain([&self.dx])
            .map(|rows| (rows.capacity() * size_of::<f32>()) as u64)
            .sum()
    }
}

impl EvalCallback for Saved {
    fn tensor(&mut self, tap: HookPoint, layer: usize, values: &[f32]) {
        let saved = layer
            .checked_sub(self.lowest)
            .and_then(|i| self.layers.get_mut(i));
        match (tap, saved) {
            (HookPoint::InpEmbd, _) if self.lowest == 0 => self.x[0].extend_from_slice(values),
            (HookPoint::LOut, _) if layer + 1 >= self.lowest => {
                self.x[layer + 1 - self.lowest].extend_from_slice(values)
            }
            (HookPoint::KqvOut, Some(saved)) => saved.attn.extend_from_slice(values),
            (HookPoint::FfnInp, Some(saved)) => saved.mid.extend_from_slice(values),
            (HookPoint::AttnOut, Some(saved)) if saved.has_post_norms.0 => {
                saved.attn_out.extend_from_slice(values)
            }
            (HookPoint::FfnGate, Some(saved)) if saved.keeps_products => {
                saved.gate.extend_from_slice(values)
            }
            (HookPoint::FfnUp, Some(saved)) if saved.keeps_products => {
                saved.up.extend_from_slice(values)
            }
            (HookPoint::Qcur, Some(saved)) if saved.keeps_products => {
                saved.q.extend_from_slice(values)
            }
            (HookPoint::FfnOut, Some(saved)) if saved.has_post_norms.1 => {
                saved.ffn_out.extend_from_slice(values)
            }
            _ => {}
        }
    }
}
