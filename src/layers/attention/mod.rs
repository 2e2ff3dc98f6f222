//! Attention of a layer, in four steps: products with queries, keys and values; their norms and
//! rotations, and the cache; attention itself; the product with its output.

mod attend;
pub(crate) mod backward;
pub(crate) mod balance;
mod buffers;
mod gate;
pub(crate) mod latent;
mod place;
pub(crate) mod relative;
mod sparse;
pub(crate) mod spec;
pub(crate) mod weights;

pub(crate) use attend::{MAX_GROUP, attn_params};
pub(crate) use buffers::{attn_tiles, bytes};

use crate::compute::ComputeError;
use crate::compute::linear::Product;
use crate::compute::probe::HookPoint;
use crate::compute::tiles::Tiles;
use crate::layers::attention::attend::AttnLayer;
use crate::layers::attention::buffers::AttnBuffers;
use crate::layers::attention::relative::weights::Biases;
use crate::layers::attention::spec::AttnSpec;
use crate::layers::attention::weights::Attn;
use crate::layers::context::Context;
use crate::layers::layer::spec::LayerSpec;
use crate::layers::layer::weights::Layer;
use crate::layers::residual::Residual;
use crate::layers::rows::Rows;
use crate::layers::switch;
use crate::layers::switch::weights::SwitchLayer;

/// Attention of a layer on `s.normed`, whose output for the rows of the layer goes to `s.branch`;
/// of the other rows it only puts keys and values into the cache. Its steps find what the ones
/// before them left in `inner`.
#[derive(Clone, Copy)]
pub(crate) struct Attention<'a> {
    spec: &'a AttnSpec,
    w: &'a Attn,
    /// Adapters in the file.
    switch: Option<&'a SwitchLayer>,
}

impl<'a> Attention<'a> {
    /// That of a layer, if it has one.
    pub(crate) fn of(spec: &'a LayerSpec, w: &'a Layer) -> Option<Attention<'a>> {
        let switch = w.switch.as_deref();
        let (spec, w) = spec.attention().zip(w.attn.as_ref())?;
        Some(Attention { spec, w, switch })
    }

    /// All steps at once.
    pub(crate) fn compute(
        self,
        cx: &mut Context<'_, '_>,
        s: &mut Residual<'_>,
        inner: &mut [u8],
    ) -> Result<(), ComputeError> {
        self.project(cx, s, inner, &mut Tiles::at_once());
        self.place(cx, inner)?;
        if cx.n_rows() > 0 {
            self.attend(cx, inner, &mut Tiles::at_once());
            self.output(cx, s, inner);
        }
        Ok(())
    }

    /// Computes queries of the layer's rows, and keys and values of all.
    pub(crate) fn project(
        self,
        cx: &mut Context<'_, '_>,
        s: &mut Residual<'_>,
        inner: &mut [u8],
        tiles: &mut Tiles<'_>,
    ) {
        let Attention { spec, w, switch } = self;
        let (m, m_kv) = (cx.n_rows(), Rows::All.n_of(&cx.slots));
        let n_generated = (cx.n_generated(), Rows::All.n_generated(&cx.slots));
        let AttnBuffers {
            q,
            k,
            v,
            q_gate,
            mut latent,
            mut index,
            ..
        } = AttnBuffers::of(cx, spec, inner);
        let q = if spec.gate_in_q { q_gate } else { q };
        let of_latent = spec.latent.as_ref().zip(w.latent.as_deref());
        let at_once = (m, n_generated.0) == (m_kv, n_generated.1);
        if at_once
            && of_latent.is_none()
            && !spec.shares_kv
            && switch.is_none()
            && w.index.is_none()
        {
            let products = &mut [
                Product::of(&w.wq, q, m),
                Product::of(&w.wk, k, m),
                Product::of(&w.wv, v, m),
            ];
            return cx.of_all().linear_tiles(s.normed, m, products, tiles);
        }
        let eps = cx.h.norm_eps;
        if let Some((of, weights)) = of_latent {
            let x = (&*s.normed, m_kv);
            latent.keys_values(&mut cx.of_all(), (spec, of, w, weights), eps, x, k, v);
        } else if !spec.shares_kv {
            let products = &mut [Product::of(&w.wk, k, m_kv), Product::of(&w.wv, v, m_kv)];
            cx.of_all().linear(s.normed, m_kv, products);
        }
        if let Some(of_layer) = switch {
            switch::add(cx, &of_layer.k, Rows::All, s.normed, k);
            switch::add(cx, &of_layer.v, Rows::All, s.normed, v);
        }
        if let Some(w) = w.index.as_deref() {
            index.keys(&mut cx.of_all(), w, (&*s.normed, m_kv));
        }
        if cx.rows == Rows::Outputs {
            cx.gather(s.normed, cx.h.n_embd);
        }
        if m > 0 {
            let x = &s.normed[..m * cx.h.n_embd];
            let mut on = cx.of_rows();
            match of_latent {
                Some((of, weights)) => {
                    latent.queries(&mut on, (spec, of, w, weights), eps, (x, m), q);
                }
                None => on.linear(x, m, &mut [Product::of(&w.wq, q, m)]),
            }
            if let Some(w) = w.index.as_deref() {
                let low = match of_latent {
                    Some(_) => latent.queries_low(w.q.w.n_in, m),
                    None => x,
                };
                index.queries(&mut on, w, (x, low, m));
            }
            if let Some(of_layer) = switch {
                let rows = cx.rows;
                switch::add(cx, &of_layer.q, rows, x, q);
            }
        }
    }

    /// Attention of the layer's rows.
    pub(crate) fn attend(self, cx: &Context<'_, '_>, inner: &mut [u8], tiles: &mut Tiles<'_>) {
        let AttnBuffers {
            q_by_head,
            out_by_head,
            partials,
            ..
        } = AttnBuffers::of(cx, self.spec, inner);
        self.layer(cx)
            .attend(&cx.slots, q_by_head, out_by_head, partials, tiles);
    }

    /// Multiplies the output of attention.
    pub(crate) fn output(self, cx: &mut Context<'_, '_>, s: &mut Residual<'_>, inner: &mut [u8]) {
        let (Attention { spec, w, switch }, m) = (self, cx.n_rows());
        let AttnBuffers {
            out_by_head,
            attn,
            gate,
            gated,
            mut latent,
            ..
        } = AttnBuffers::of(cx, spec, inner);
        let attn = self.layer(cx).by_row(&cx.slots, out_by_head, attn);
        cx.tap(HookPoint::KqvOut, attn);
        let eps = cx.h.norm_eps;
        let mut on = cx.of_rows();
        if let Some(w) = &w.gate {
            let x = &s.normed[..m * w.w.n_in];
            on.linear(x, m, &mut [Product::of(w, gate, m)]);
        }
        let attn = match &spec.latent {
            Some(of) if of.absorbed => latent.values(&mut on, (spec, of, w), m, attn),
            _ => attn,
        };
        let attn = match &w.sub_norm {
            Some(norm) => {
                let n = norm.len();
                on.threads.when(m > 1).for_chunks(gated, n, |row, to| {
                    on.arch.rms_norm(to, &attn[row * n..][..n], norm, eps)
                });
                &*gated
            }
            None => gate::apply(on.ctx, spec, attn, (gate, gated), m),
        };
        let branch = &mut s.branch[..m * w.wo.w.n_out];
        on.linear(attn, m, &mut [Product::of(&w.wo, branch, m)]);
        if let Some(of_layer) = switch {
            let rows = cx.rows;
            switch::add(cx, &of_layer.output, rows, attn, branch);
        }
        cx.tap(HookPoint::AttnOut, branch);
    }

    fn layer<'l>(&'l self, cx: &'l Context<'_, '_>) -> AttnLayer<'l> {
        AttnLayer {
            arch: cx.arch,
            threads: cx.threads,
            spec: self.spec,
            sinks: self.w.sinks.as_deref(),
            i: cx.h.kv_layers[cx.layer],
            rows: cx.rows,
            selection: self.spec.index.map(|_| &cx.buffers.selection),
            biases: self.biases(),
        }
    }

    fn biases(&self) -> Option<Biases<'_>> {
        let (spec, values) = self.spec.relative.zip(self.w.relative.as_deref())?;
        Some(Biases { spec, values })
    }
}
