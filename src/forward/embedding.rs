//! Embeddings of tokens and positions.

use crate::compute::weight::Weight;
use crate::layers::context::Context;
use crate::layers::norm::norm_row;
use crate::layers::switch::spec::SwitchSpec;
use crate::model::Weights;

/// Looks up and scales the embeddings of all tokens, and adds those of positions.
pub(crate) fn embed(cx: &Context<'_, '_>, w: &Weights, x: &mut [f32], buffer: &mut [f32]) {
    let (arch, h, gguf, slots, table) = (cx.arch, cx.h, cx.gguf, &cx.slots, &w.token_embd);
    let look_up = |table: &Weight, i: usize, x: &mut [f32]| {
        arch.dequantize(table.dtype, table.data_of_rows(gguf, i..i + 1), x);
    };
    cx.threads.when(x.len() > h.n_embd).for_chunk_pairs(
        x,
        h.n_embd,
        buffer,
        h.n_embd,
        |row, x, buffer| {
            let (slot, token) = slots.token(row);
            if let Some(image) = slots.image(row) {
                return x.copy_from_slice(image);
            }
            let substituted = |spec: &SwitchSpec| spec.embedded(token as u32) as usize;
            let token = h.switch.as_ref().map_or(token, substituted);
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
