//! Penalties for tokens that were used recently.

use crate::sample::candidates::{Candidates, TokenTable};

/// Repetition, frequency and presence penalties over the last tokens of the history.
#[derive(Debug, Clone)]
pub(super) struct Penalties {
    /// Number of last tokens considered: 0 turns the filter off, −1 means the whole history.
    pub(super) last_n: i32,
    /// Divisor; 1 is off.
    pub(super) repeat: f32,
    /// Subtracted per occurrence; 0 is off.
    pub(super) frequency: f32,
    /// Subtracted once; 0 is off.
    pub(super) presence: f32,
    pub(super) counts: TokenTable,
}

impl Default for Penalties {
    fn default() -> Self {
        Self {
            last_n: 64,
            repeat: 1.0,
            frequency: 0.0,
            presence: 0.0,
            counts: TokenTable::default(),
        }
    }
}

/// The last `last_n` tokens; all of them for −1.
pub(super) fn window(history: &[u32], last_n: i32) -> &[u32] {
    let n = usize::try_from(last_n).unwrap_or(usize::MAX);
    &history[history.len() - n.min(history.len())..]
}

impl Penalties {
    /// Whether all penalties are off.
    pub(super) fn is_off(&self) -> bool {
        self.repeat == 1.0 && self.frequency == 0.0 && self.presence == 0.0
    }

    /// For a token seen `n > 0` times in the window, with logit `l`:
    ///
    /// `l ← (l > 0 ? l / repeat : l · repeat) − n · frequency − presence`
    ///
    /// The repetition penalty is CTRL's (Keskar et al., arXiv:1909.05858, section 4.1), which
    /// divides; a negative logit is multiplied instead, or the penalty would favour it.
    /// Frequency and presence are the OpenAI API's terms.
    pub(super) fn apply(&mut self, candidates: &mut Candidates, history: &[u32], n_vocab: usize) {
        if self.is_off() {
            return;
        }
        self.counts.clear(n_vocab);
        for &id in window(history, self.last_n) {
            self.counts.update(id, |n| n.saturating_add(1));
        }
        if self.counts.is_empty() {
            return;
        }
        let counts = &self.counts;
        candidates.update(|c| {
            let n = counts.at(c.id);
            if n > 0 {
                let l = if c.logit > 0.0 {
                    c.logit / self.repeat
                } else {
                    c.logit * self.repeat
                };
                let penalty = n as f32 * self.frequency + self.presence;
                // Bounded, because ∞ − ∞ would be NaN.
                c.logit = l - penalty.clamp(f32::MIN, f32::MAX);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use crate::sample::candidates::tests::candidates;
    use crate::sample::penalties::*;

    fn penalise(p: Penalties, history: &[u32]) -> Vec<f32> {
        let mut p = p;
        let logits = [2.0, -2.0, 0.0, 4.0];
        let mut c = candidates(&logits);
        p.apply(&mut c, history, logits.len());
        c.as_slice().iter().map(|c| c.logit).collect()
    }

    #[test]
    fn repetition_divides_positive_and_multiplies_negative() {
        let p = Penalties {
            repeat: 2.0,
            ..Penalties::default()
        };
        assert_eq!(penalise(p, &[0, 1, 2, 0]), [1.0, -4.0, 0.0, 4.0]);
    }

    #[test]
    fn frequency_counts_and_presence_does_not() {
        let p = Penalties {
            frequency: 0.5,
            presence: 0.25,
            ..Penalties::default()
        };
        assert_eq!(penalise(p, &[0, 1, 0, 0]), [0.25, -2.75, 0.0, 4.0]);
    }

    #[test]
    fn only_the_window_counts() {
        let p = Penalties {
            last_n: 1,
            presence: 1.0,
            ..Penalties::default()
        };
        assert_eq!(penalise(p.clone(), &[0, 1]), [2.0, -3.0, 0.0, 4.0]);
        assert_eq!(
            penalise(
                Penalties {
                    last_n: 0,
                    ..p.clone()
                },
                &[0, 1]
            ),
            [2.0, -2.0, 0.0, 4.0]
        );
        assert_eq!(
            penalise(Penalties { last_n: -1, ..p }, &[0, 1]),
            [1.0, -3.0, 0.0, 4.0]
        );
    }

    #[test]
    fn foreign_tokens_in_the_history_are_ignored() {
        let p = Penalties {
            presence: 1.0,
            ..Penalties::default()
        };
        assert_eq!(penalise(p, &[4, u32::MAX]), [2.0, -2.0, 0.0, 4.0]);
    }
}
