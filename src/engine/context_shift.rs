//! Where the context of a sequence can be shifted.

use crate::arch::{Arch, KV_BLOCK};
use crate::engine::SessionError;
use crate::engine::options::SessionOptions;
use crate::layers::rope::RopeTables;
use crate::model::{AttnSpec, Model, QkNorm};

/// Refuses a shift that [`SessionOptions::context_shift`] asks for where it cannot be.
pub(crate) fn check(
    model: &Model,
    n_ctx: usize,
    options: &SessionOptions,
) -> Result<(), SessionError> {
    let Some(keep) = options.context_shift else {
        return Ok(());
    };
    if let Some(what) = obstacle(model, options) {
        return Err(SessionError::NoShift { what });
    }
    // Behind them a page that goes and one that stays.
    let most = (n_ctx / KV_BLOCK)
        .checked_sub(2)
        .map(|pages| pages * KV_BLOCK);
    match most {
        Some(most) if keep <= most => Ok(()),
        most => {
            let expected = most.map_or_else(
                || format!("a context of at least {} tokens", 2 * KV_BLOCK),
                |most| format!("at most {most} tokens, as two pages of {KV_BLOCK} lie behind them"),
            );
            Err(SessionError::Option {
                option: "context_shift",
                value: keep,
                expected,
            })
        }
    }
}

/// What of a model or of its cache makes keys that cannot be turned.
fn obstacle(model: &Model, options: &SessionOptions) -> Option<&'static str> {
    let (h, policy) = (model.hparams(), options.kv_policy());
    let any = |test: fn(&AttnSpec) -> bool| h.attention().any(test);
    if let Some(recurrent) = h.recurrent().next() {
        return Some(recurrent.name());
    }
    let obstacles = [
        (h.learned_positions, "learned positions"),
        (
            model.weights().rope_factors_short_long.is_some(),
            "learned rope factors",
        ),
        (any(|attn| attn.window.is_some()), "sliding windows"),
        (any(|attn| attn.latent.is_some()), "latent attention"),
        (
            any(|attn| attn.qk_norm == Some(QkNorm::PerHeadRotated)),
            "norms of keys after their rotation",
        ),
        (policy.tiers.is_some(), "precision by age"),
        (policy.k.bits() < 8, "keys of fewer than 8 bits"),
    ];
    obstacles
        .into_iter()
        .find(|(is_there, _)| *is_there)
        .map(|(_, what)| what)
}

impl RopeTables {
    /// Cosines and sines that turn keys back by `n` positions, in place of those of a token.
    pub(crate) fn back(&self, arch: Arch, n: usize) -> [Vec<f32>; 2] {
        let [mut cos, mut sin] = [0, 1].map(|_| vec![0.0; self.n_pairs()]);
        self.unscaled_angles(arch, n, &mut cos, &mut sin);
        sin.iter_mut().for_each(|sin| *sin = -*sin);
        [cos, sin]
    }
}
