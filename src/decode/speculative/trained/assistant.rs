//! Gemma 4's assistant: layers that look into keys and values of the target; it goes on from the
//! target's hidden state, then from states that it makes itself.

use crate::compute::linear::Product;
use crate::decode::speculative::Draft;
use crate::decode::speculative::trained::pass::{Asked, Of, Work, with_pass};
use crate::engine::SessionError;
use crate::layers::draft::room;
use crate::layers::draft::weights::DraftInput;

pub(super) fn guess(
    of: Of<'_>,
    work: &mut Work,
    asked: &Asked<'_>,
    guesses: &mut Vec<Draft>,
) -> Result<(), SessionError> {
    let model = of.0;
    let DraftInput::States { pre, post } = &model.weights.input else {
        return Ok(());
    };
    let (position, n_target) = (asked.position(), post.w.n_out);
    let states = asked.seq.states_before(position);
    let Some(state) = states.len().checked_sub(n_target) else {
        return Ok(());
    };
    room(&mut work.state, n_target).copy_from_slice(&states[state..]);
    let mut token = asked.text[asked.text.len() - 1];
    with_pass(of, work, 1, |pass, work| {
        for _ in 0..asked.n {
            pass.begin(1);
            let y = room(&mut work.y, pre.w.n_in);
            let (of_token, of_state) = y.split_at_mut(pre.w.n_in - n_target);
            pass.embed(std::iter::once(token), of_token);
            of_state.copy_from_slice(&work.state);
            let x = room(&mut work.x, model.h.n_embd);
            let product = Product::of(pre, x, 1);
            pass.rows.on.linear(&work.y, 1, &mut [product]);
            // All guesses stand where the text ends.
            pass.rows.turn_from(position);
            for (layer, &source) in model.weights.layers.iter().zip(&model.sources) {
                let y = room(&mut work.e, model.h.n_embd);
                pass.rows.norm(&layer.norm, x, y);
                let window = layer.attn.window;
                let start = window.map_or(0, |window| (position + 1).saturating_sub(window));
                let seen = (&asked.seq.kv, source, start..position);
                pass.rows.layer_of_other(layer, seen, y, x);
            }
            let (e, logits) = (&mut work.e, &mut work.logits);
            pass.best((x, 1), (e, logits), guesses);
            // What the head reads is what the next state is made of.
            let state = room(&mut work.state, n_target);
            let product = Product::of(post, state, 1);
            pass.rows.on.linear(&work.e, 1, &mut [product]);
            token = guesses.last().map_or(token, |guess| guess.token);
        }
    })
}
