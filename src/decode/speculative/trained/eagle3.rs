//! EAGLE 3 (arXiv 2503.01840): one layer that reads a token's embedding beside the target's features of
//! the token before, and goes on from its own state.

use crate::compute::linear::Product;
use crate::decode::speculative::Draft;
use crate::decode::speculative::trained::pass::{Asked, Of, Pass, Work, with_pass};
use crate::engine::SessionError;
use crate::layers::draft::room;
use crate::layers::draft::spec::DraftKind;
use crate::layers::draft::weights::{DraftInput, DraftLayer};

pub(super) fn guess(
    of: Of<'_>,
    work: &mut Work,
    asked: &Asked<'_>,
    guesses: &mut Vec<Draft>,
) -> Result<(), SessionError> {
    let model = of.0;
    let DraftInput::Features { fc, norm } = &model.weights.input else {
        return Ok(());
    };
    let Some(layer) = model.weights.layers.first() else {
        return Ok(());
    };
    let (last, width) = (asked.text.len() - 1, fc.w.n_in);
    let features = asked
        .seq
        .inputs_before(&model.spec.inputs, asked.position());
    // The last one is read again: from its state the first token is guessed.
    let Some((first, row)) = work.begin(last, features.len() / width, 1) else {
        return Ok(());
    };
    let (m, n) = (last - first, model.h.n_embd);
    with_pass(of, work, m, |pass, work| {
        pass.begin(m);
        let mut features = &features[row * width..];
        let g = room(&mut work.g, m * n);
        if let Some(norm) = norm {
            let normed = room(&mut work.y, m * width);
            pass.rows.norm(norm, features, normed);
            features = normed;
        }
        pass.rows
            .on
            .linear(features, m, &mut [Product::of(fc, g, m)]);
        let tokens = asked.text[first + 1..].iter().copied();
        step(pass, work, layer, (first, m), tokens);
        work.n_read = last;
        for i in 0..asked.n {
            let (e, logits) = (&mut work.e, &mut work.logits);
            pass.best((&work.state, 1), (e, logits), guesses);
            let Some(guess) = guesses.last().filter(|_| i + 1 < asked.n) else {
                break;
            };
            let token = guess.token;
            room(&mut work.g, n).copy_from_slice(&work.state);
            pass.begin(1);
            step(pass, work, layer, (last + i, 1), std::iter::once(token));
        }
    })
}

/// Takes `m` pairs of a token and features, `work.g`, into the layer's memory, and the last one through
/// the layer; leaves its state.
fn step(
    pass: &mut Pass<'_, '_>,
    work: &mut Work,
    layer: &DraftLayer,
    (position, m): (usize, usize),
    tokens: impl Iterator<Item = u32>,
) {
    let n = pass.model.h.n_embd;
    let normed_first = match pass.model.spec.kind {
        DraftKind::Eagle3 {
            norm_before_residual,
            ..
        } => norm_before_residual,
        _ => false,
    };
    pass.embed(tokens, room(&mut work.e, m * n));
    let (x, y) = (room(&mut work.x, n), room(&mut work.y, 2 * m * n));
    x.copy_from_slice(&work.g[(m - 1) * n..]);
    for (i, y) in y.chunks_exact_mut(2 * n).enumerate() {
        let (of_token, of_features) = y.split_at_mut(n);
        pass.rows.norm(&layer.norm, &work.e[i * n..][..n], of_token);
        if let Some(norm) = &layer.feature_norm {
            pass.rows.norm(norm, &work.g[i * n..][..n], of_features);
        }
        if normed_first && i + 1 == m {
            x.copy_from_slice(of_features);
        }
    }
    pass.rows.turn_from(position);
    let memory = &mut work.memories[0];
    pass.rows.remember(layer, y, memory);
    let last = position + m - 1;
    pass.begin(1);
    pass.rows.turn_from(last);
    let y = &y[2 * (m - 1) * n..];
    pass.rows.layer(layer, (memory, &|_| 0..last + 1), y, x);
    room(&mut work.state, n).copy_from_slice(x);
}
