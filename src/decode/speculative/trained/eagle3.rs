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
            let state = work.state.clone();
            pass.best((&state, 1), (&mut work.e, &mut work.logits), guesses);
            let Some(guess) = guesses.last().filter(|_| i + 1 < asked.n) else {
                break;
            };
            let token = guess.token;
            work.g.clear();
            work.g.extend_from_slice(&state);
            pass.begin(1);
            step(pass, work, layer, (last + i, 1), std::iter::once(token));
        }
    })
}

/// Takes `m` pairs of a token and features, `work.g`, through the layer; leaves the last one's state.
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
    pass.embed(tokens, &mut work.e);
    let (x, y) = (room(&mut work.x, m * n), room(&mut work.y, 2 * m * n));
    x.copy_from_slice(&work.g);
    for (i, y) in y.chunks_exact_mut(2 * n).enumerate() {
        let (of_token, of_features) = y.split_at_mut(n);
        pass.rows.norm(&layer.norm, &work.e[i * n..][..n], of_token);
        if let Some(norm) = &layer.feature_norm {
            pass.rows.norm(norm, &work.g[i * n..][..n], of_features);
        }
        if normed_first {
            x[i * n..][..n].copy_from_slice(of_features);
        }
    }
    pass.rows.turn_from(position);
    let memory = &mut work.memories[0];
    pass.rows.remember(layer, y, memory);
    pass.rows
        .layer(layer, (memory, &|row| 0..position + row + 1), y, x);
    work.state.clear();
    work.state.extend_from_slice(&x[(m - 1) * n..]);
}
