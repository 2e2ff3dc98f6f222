//! DFlash: layers whose keys and values are made of the target's features; the places of a block see
//! them and each other, and are guessed at once.

use crate::compute::linear::Product;
use crate::decode::speculative::Draft;
use crate::decode::speculative::trained::pass::{Asked, Of, Pass, Work, with_pass};
use crate::engine::SessionError;
use crate::layers::draft::room;
use crate::layers::draft::weights::DraftInput;

pub(super) fn guess(
    of: Of<'_>,
    work: &mut Work,
    (n_block, mask): (usize, u32),
    asked: &Asked<'_>,
    guesses: &mut Vec<Draft>,
) -> Result<(), SessionError> {
    let model = of.0;
    let DraftInput::Features { fc, norm } = &model.weights.input else {
        return Ok(());
    };
    let (last, width) = (asked.text.len() - 1, fc.w.n_in);
    let features = asked
        .seq
        .inputs_before(&model.spec.inputs, asked.position());
    let Some((first, row)) = work.begin(last, features.len() / width, 0) else {
        return Ok(());
    };
    let (m, n) = (last - first, model.h.n_embd);
    with_pass(of, work, m.max(n_block), |pass, work| {
        if m > 0 {
            pass.begin(m);
            let (g, normed) = (room(&mut work.g, m * n), room(&mut work.e, m * n));
            let features = &features[row * width..];
            pass.rows
                .on
                .linear(features, m, &mut [Product::of(fc, g, m)]);
            if let Some(norm) = norm {
                pass.rows.norm(norm, g, normed);
            }
            pass.rows.turn_from(first);
            for (layer, memory) in model.weights.layers.iter().zip(&mut work.memories) {
                pass.rows.remember(layer, normed, memory);
            }
            work.n_read = last;
        }
        let token = asked.text[last];
        block(pass, work, (last, token), (n_block, mask));
        let n_guess = asked.n.min(n_block - 1);
        let x = std::mem::take(&mut work.x);
        let (e, logits) = (&mut work.e, &mut work.logits);
        pass.best((&x[n..(n_guess + 1) * n], n_guess), (e, logits), guesses);
        work.x = x;
    })
}

/// Takes a block that begins with `token` through all layers, and forgets its keys and values.
fn block(
    pass: &mut Pass<'_, '_>,
    work: &mut Work,
    (position, token): (usize, u32),
    (n_block, mask): (usize, u32),
) {
    let (n, model) = (pass.model.h.n_embd, pass.model);
    pass.begin(n_block);
    let tokens = std::iter::once(token).chain(std::iter::repeat_n(mask, n_block - 1));
    pass.embed(tokens, room(&mut work.x, n_block * n));
    pass.rows.turn_from(position);
    for (layer, memory) in model.weights.layers.iter().zip(&mut work.memories) {
        let y = room(&mut work.y, n_block * n);
        pass.rows.norm(&layer.norm, &work.x, y);
        pass.rows.remember(layer, y, memory);
        let window = layer.attn.window;
        let seen = |row: usize| {
            let start = window.map_or(0, |window| (position + row + 1).saturating_sub(window));
            start..position + n_block
        };
        pass.rows.layer(layer, (memory, &seen), y, &mut work.x);
        memory.truncate(position);
    }
}
