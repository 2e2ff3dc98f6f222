//! What enters the first layer: embeddings.

use crate::compute::linear::{Product, RowAdapters, linear};
use crate::forward::buffers::Buffers;
use crate::layers::norm::{norm_row, rms_factor};
use crate::layers::rows::{Adapters, Base, Rows, SlotView, row_adapters};
use crate::model::{Hparams, MtpInput, PerLayerInputs, Weight, Weights};

/// Looks up and scales the embeddings of all tokens, and adds those of positions.
pub(super) fn embed(
    base: Base<'_>,
    h: &Hparams,
    w: &Weights,
    slots: &[SlotView<'_>],
    x: &mut [f32],
    buffer: &mut [f32],
) {
    let (arch, table) = (base.arch, &w.token_embd);
    let look_up = |table: &Weight, i: usize, x: &mut [f32]| {
        let bytes = table.row_bytes();
        arch.dequantize(table.dtype, &table.data(base.gguf)[i * bytes..][..bytes], x);
    };
    base.crew.when(x.len() > h.n_embd).for_chunk_pairs(
        x,
        h.n_embd,
        buffer,
        h.n_embd,
        |row, x, buffer| {
            let slot = &slots[slots.partition_point(|slot| slot.row <= row) - 1];
            let token = slot.tokens[row - slot.row] as usize;
            look_up(table, token, x);
            // A product with a one-hot vector: it selects one column of `A`.
            for (term, factor) in slot.adapters.iter().filter_map(|a| a.term(table.site)) {
                for (a, b) in term
                    .a()
                    .chunks_exact(h.n_vocab)
                    .zip(term.b().chunks_exact(h.n_embd))
                {
                    arch.add_scaled(x, b, factor * a[token]);
                }
            }
            if h.embd_scale != 1.0 {
                x.iter_mut().for_each(|x| *x *= h.embd_scale);
            }
            if let Some(table) = &w.position_embd {
                look_up(table, slot.pos() + row - slot.row, buffer);
                arch.add(x, buffer);
            }
            if let Some(first) = &w.token_types {
                arch.add(x, first);
            }
            if let Some(norm) = &w.embd_norm {
                buffer.copy_from_slice(x);
                norm_row(arch, h, norm, buffer, x);
            }
        },
    );
}

/// Replaces the embeddings of tokens in `b.x` by the inputs of a block for multi-token prediction.
pub(super) fn mtp_inputs(
    base: Base<'_>,
    h: &Hparams,
    w: &MtpInput,
    slots: &[SlotView<'_>],
    b: &mut Buffers<'_>,
) {
    let (n, m) = (h.n_embd, b.x.len() / h.n_embd);
    let x = &*b.x;
    base.crew.when(m > 1).for_chunks(b.mtp, 2 * n, |row, both| {
        let slot = &slots[slots.partition_point(|slot| slot.row <= row) - 1];
        let (embd, state) = both.split_at_mut(n);
        norm_row(base.arch, h, &w.embd_norm, &x[row * n..][..n], embd);
        norm_row(
            base.arch,
            h,
            &w.state_norm,
            &slot.states[(row - slot.row) * n..][..n],
            state,
        );
    });
    let ctx = base.with(RowAdapters::All(&[]), Rows::All.n_generated(slots));
    linear(
        ctx,
        &mut b.scratch,
        b.mtp,
        m,
        &mut [Product::of(&w.proj, b.x, m)],
    );
}

/// Computes in `b.per_layer` the layers' vectors for tokens, whose embeddings are in `b.x`.
pub(super) fn per_layer_inputs(
    base: Base<'_>,
    h: &Hparams,
    w: &PerLayerInputs,
    slots: &[SlotView<'_>],
    b: &mut Buffers<'_>,
) {
    let (arch, n, m) = (base.arch, w.proj.n_out, b.x.len() / h.n_embd);
    let adapters = Adapters(slots);
    let ctx = base.with(
        row_adapters(&adapters, b.ends),
        Rows::All.n_generated(slots),
    );
    linear(
        ctx,
        &mut b.scratch,
        b.x,
        m,
        &mut [Product::of_weight(&w.proj, b.per_layer, m)],
    );
    let (table, bytes) = (w.table.data(base.gguf), w.table.row_bytes());
    let (scale, table_scale) = (1.0 / (h.n_embd as f32).sqrt(), (w.norm.len() as f32).sqrt());
    base.crew.when(m > 1).for_chunk_pairs(
        b.per_layer,
        n,
        b.per_layer_table,
        n,
        |row, x, of_token| {
            let slot = &slots[slots.partition_point(|slot| slot.row <= row) - 1];
            let token = slot.tokens[row - slot.row] as usize;
            arch.dequantize(w.table.dtype, &table[token * bytes..][..bytes], of_token);
            let layers = x
                .chunks_exact_mut(w.norm.len())
                .zip(of_token.chunks_exact(w.norm.len()));
            for (x, of_token) in layers {
                x.iter_mut().for_each(|x| *x *= scale);
                let factor = rms_factor(arch, x, h.norm_eps);
                for ((x, w), of_token) in x.iter_mut().zip(&w.norm).zip(of_token) {
                    *x = (*x * factor * w + of_token * table_scale)
                        * std::f32::consts::FRAC_1_SQRT_2;
                }
            }
        },
    );
}
