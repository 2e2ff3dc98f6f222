//! Layers in a plan: mixers, then a feed-forward layer.

use crate::gpu::GpuError;
use crate::gpu::kernels::*;
use crate::gpu::plan::Name::Intermediate as Left;
use crate::gpu::plan::heads::HeadPart;
use crate::gpu::plan::recurrent::MIXED;
use crate::gpu::plan::{Intermediate, Name, Planner, RowSet, Set, refused, size};
use crate::layers::attention::spec::AttnSpec;
use crate::layers::attention::weights::Attn;
use crate::layers::layer::spec::{LayerSpec, Mixer};
use crate::layers::layer::weights::{FeedForward, Layer};
use crate::layers::norm::spec::Norms;
use crate::layers::recurrent::spec::RecurrentSpec;
use crate::layers::recurrent::weights::Recurrent;

/// Attention, a recurrence, or both.
type Mixers<'s, 'm> = (
    Option<(&'s AttnSpec, &'m Attn)>,
    Option<(&'s RecurrentSpec, &'m Recurrent)>,
);

impl<'m> Planner<'m, '_> {
    /// The layer whose keys and values layer `i` reads: its own, unless it has none.
    pub(super) fn source(&self, i: usize, spec: &LayerSpec) -> usize {
        if !spec.attention().is_some_and(|spec| spec.shares_kv) {
            return i;
        }
        let is_source = |(j, layer): (usize, &LayerSpec)| {
            let keeps = layer.attention().is_some_and(|spec| !spec.shares_kv);
            keeps && self.h.kv_layers[j] == self.h.kv_layers[i]
        };
        let mut layers = self.h.layers.iter().enumerate();
        layers.position(is_source).unwrap_or(i)
    }

    /// Copies rows as long as those of the residual stream.
    pub(super) fn copy_stream(&mut self, from: Name<'m>, to: Name<'m>) -> Result<(), GpuError> {
        let n = self.h.n_embd;
        let [from, to] = [from, to].map(|name| HeadPart::of(name, (1, n), 0));
        self.copy_heads((1, n), from, to)
    }

    /// Leaves only the rows of the last layer that have outputs, of its residual stream and its
    /// input; returns the latter.
    fn only_outputs(&mut self, normed: Name<'m>, outputs: &RowSet) -> Result<Name<'m>, GpuError> {
        let (n, n_embd, x) = (outputs.n, self.n_embd()?, self.x());
        self.gather(x, Intermediate::X(Set::Outputs), n, n_embd);
        let mut left = Intermediate::X(Set::Outputs);
        if normed != x {
            left = Intermediate::Normed(Set::Outputs);
            self.gather(normed, left, n, n_embd);
        }
        let sets = [Set::All, Set::Outputs];
        if let Some(width) = self.h.per_layer_embd {
            let width = size(self.h.n_layer * width)?;
            let [from, to] = sets.map(Intermediate::PerLayer);
            self.gather(Left(from), to, n, width);
        }
        if self.h.layers.iter().any(|spec| spec.embd_skip) {
            let [from, to] = sets.map(Intermediate::Kept);
            self.gather(Left(from), to, n, n_embd);
        }
        self.rows = outputs.clone();
        self.plan.outputs = Set::Outputs;
        Ok(Left(left))
    }

    /// Mixers on `normed`, with their output matrices, of the rows that are left; returns their input,
    /// or `None` if there are none. All rows have keys and values, and change the state.
    fn mix(
        &mut self,
        i: usize,
        (attention, recurrent): Mixers<'_, 'm>,
        mut normed: Name<'m>,
        outputs: Option<&RowSet>,
    ) -> Result<Option<Name<'m>>, GpuError> {
        if let Some((spec, w)) = recurrent {
            self.recurrence(i, (spec, w), normed)?;
        }
        if let Some((spec, w)) = attention {
            // Beside keys and values, whose products have the same input.
            if outputs.is_none() {
                self.queries(spec, w, normed)?;
            }
            if !spec.shares_kv {
                self.keys_values(i, spec, w, normed)?;
            }
        }
        let mut mixed = MIXED;
        if let Some(outputs) = outputs {
            if outputs.n == 0 {
                return Ok(None);
            }
            if let Some(w) = recurrent.and_then(|(_, w)| w.output()) {
                mixed = Intermediate::Mixed(Set::Outputs);
                self.gather(Left(MIXED), mixed, outputs.n, size(w.w.n_in)?);
            }
            normed = self.only_outputs(normed, outputs)?;
            if let Some((spec, w)) = attention {
                self.queries(spec, w, normed)?;
            }
        }
        let out = Left(Intermediate::AttnOut);
        if let Some((spec, w)) = attention {
            self.attention(i, spec, w)?;
        }
        if let Some((_, w)) = recurrent {
            let w = w.output();
            let w = w.ok_or_else(|| refused(format!("the output of layer {i}")))?;
            if attention.is_none() {
                self.linear(w, Left(mixed), out)?;
            } else {
                let beside = Left(Intermediate::RecurrentOut);
                self.linear(w, Left(mixed), beside)?;
                let n = size(self.rows.n as usize * self.h.n_embd)?;
                let args = AddScaledArgs { n, scale: 1.0 };
                self.plain(&ADD_SCALED, &args, &[out, beside]);
            }
        }
        Ok(Some(normed))
    }

    /// Plans a layer. `outputs` are given for the last one, which computes only keys and values of
    /// other rows.
    pub(super) fn layer(
        &mut self,
        i: usize,
        spec: &'m LayerSpec,
        w: &'m Layer,
        outputs: Option<&RowSet>,
    ) -> Result<(), GpuError> {
        let Layer {
            attn_norm,
            attn,
            compressed: _, // this and what is not named is in `supports`
            recurrent,
            post_attn_norm,
            ffn_norm: _,
            ffn,
            post_ffn_norm: _,
            per_layer: _,
            alt_up: _,
            output_scale: _,
            embd_skip: _,
            hyper: _,
            ngrams: _,
            residual_scores: _,
            switch: _,
            cross: _,
            input_norm: _,
        } = w;
        let outputs = outputs.filter(|outputs| outputs.n < self.rows.n);
        let mixers = match (&spec.mixer, attn, recurrent) {
            (Mixer::Attention(spec), Some(w), _) => (Some((spec, w)), None),
            (Mixer::Recurrent(spec), _, Some(w)) => (None, Some((spec, w))),
            (Mixer::Both(attn, recurrent), Some(w), Some(of)) => {
                (Some((attn, w)), Some((recurrent, of)))
            }
            (Mixer::None, ..) => (None, None),
            _ => return Err(refused(format!("the mixer of layer {i}"))),
        };
        let normed = match spec.mixer {
            // What is pending is added by the norm of the feed-forward layer.
            Mixer::None if outputs.is_none() => self.x(),
            Mixer::None => self.enter(None)?,
            _ => self.enter(attn_norm.as_ref())?,
        };
        let Some(normed) = self.mix(i, mixers, normed, outputs)? else {
            return Ok(());
        };
        if let FeedForward::Beside(beside) = ffn
            && let Some(norm) = &beside.moe_norm
        {
            // The stream as the mixer read it.
            let (x, input) = (self.enter(None)?, Intermediate::BesideIn(self.rows.set));
            self.norm(norm, self.h.norm_eps, x, Left(input))?;
        }
        if let FeedForward::Moe(moe) = ffn
            && moe.spec.routes_early
        {
            let x = self.enter(None)?;
            self.linear(&moe.router, x, Left(Intermediate::Router))?;
        }
        if spec.mixer != Mixer::None {
            self.leave(Intermediate::AttnOut, post_attn_norm.as_ref(), spec)?;
        }
        self.feed_forward_branch(spec, w, normed)?;
        if let Some(scale) = w.embd_skip {
            let x = self.enter(None)?;
            let n = size(self.rows.n as usize * self.h.n_embd)?;
            let kept = Left(Intermediate::Kept(self.rows.set));
            self.plain(&ADD_SCALED, &AddScaledArgs { n, scale }, &[x, kept]);
        }
        if let Some(w) = &w.per_layer {
            self.per_layer_branch(i, spec, w)?;
        }
        if let Some(scale) = w.output_scale {
            let x = self.enter(None)?;
            let n = self.rows.n as usize * self.h.n_embd;
            self.unary(UnaryFunction::Scale, [scale, 0.0, 0.0, 0.0], x, n)?;
        }
        Ok(())
    }

    /// The second half of a layer, whose mixer read `normed`.
    fn feed_forward_branch(
        &mut self,
        spec: &LayerSpec,
        w: &'m Layer,
        normed: Name<'m>,
    ) -> Result<(), GpuError> {
        if let FeedForward::None = w.ffn {
            return Ok(());
        }
        let input = match (spec.norms, &w.ffn_norm) {
            (Norms::Shared, _) => {
                self.enter(None)?;
                normed
            }
            (Norms::Parallel, Some(norm)) => {
                // The stream as the mixer read it.
                let input = Left(Intermediate::Normed(self.rows.set));
                self.norm(norm, self.h.norm_eps, self.x(), input)?;
                self.enter(None)?;
                input
            }
            (_, norm) => self.enter(norm.as_ref())?,
        };
        let mut out = Intermediate::FfnOut;
        match &w.ffn {
            FeedForward::Dense(ffn) => self.feed_forward(ffn, input, out)?,
            FeedForward::Moe(moe) => self.experts(moe, input)?,
            FeedForward::Beside(beside) => {
                let moe_input = match beside.moe_norm {
                    Some(_) => Left(Intermediate::BesideIn(self.rows.set)),
                    None => input,
                };
                self.beside(beside, input, moe_input)?;
            }
            FeedForward::Both(both) => out = self.both(both, input)?,
            FeedForward::None => {}
        }
        if spec.norms != Norms::BeforeAndLast {
            return self.leave(out, w.post_ffn_norm.as_ref(), spec);
        }
        // The norm is that of the stream, between two loops.
        self.leave(out, None, spec)?;
        let (x, norm) = (self.enter(None)?, w.post_ffn_norm.as_ref());
        let normed = Left(Intermediate::Normed(self.rows.set));
        let norm = norm.ok_or_else(|| refused("loops without a norm".to_string()))?;
        self.norm(norm, self.h.norm_eps, x, normed)?;
        self.copy_stream(normed, x)
    }
}
