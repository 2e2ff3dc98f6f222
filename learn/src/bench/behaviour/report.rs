//! From answers to the report.

use crate::bench::behaviour::BehaviourArm;
use crate::bench::behaviour::questions::Answer;

/// A fraction with its interval of Wilson (1927) at 95 %.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rate {
    /// How many of them.
    pub right: usize,
    /// Of how many.
    pub n: usize,
}

impl Rate {
    pub(super) fn of(all: impl IntoIterator<Item = bool>) -> Rate {
        let mut rate = Rate::default();
        for is_right in all {
            rate.n += 1;
            rate.right += usize::from(is_right);
        }
        rate
    }

    /// The fraction; 0 of nothing.
    pub fn value(&self) -> f64 {
        self.right as f64 / self.n.max(1) as f64
    }

    /// Lower and upper end of the interval: `(p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n)`.
    pub fn interval(&self) -> (f64, f64) {
        const Z: f64 = 1.959_964;
        if self.n == 0 {
            return (0.0, 1.0);
        }
        let (n, p) = (self.n as f64, self.value());
        let z2 = Z * Z / n;
        let spread = Z * (p * (1.0 - p) / n + z2 / (4.0 * n)).sqrt();
        let ends = [-spread, spread].map(|spread| (p + z2 / 2.0 + spread) / (1.0 + z2));
        (ends[0].max(0.0), ends[1].min(1.0))
    }
}

/// What came of questions of a kind.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Score {
    /// Name of the kind: `recall` (cloze), `paraphrase`, `reverse`, `task`, `conflict` (recall of
    /// what was corrected), `retention` (recall after further facts).
    pub kind: &'static str,
    /// The most likely continuation contained the right answer.
    pub said: Rate,
    /// The right answer was the most likely of four of its kind. By chance: a quarter.
    pub chosen: Rate,
    /// Mean logarithm of the probability of the right answer, in nats.
    pub log_probability: f64,
}

impl Score {
    pub(super) fn of(kind: &'static str, answers: &[Answer]) -> Score {
        let log_p: f64 = answers.iter().map(|answer| answer.log_p).sum();
        Score {
            kind,
            said: Rate::of(answers.iter().map(|answer| answer.is_said)),
            chosen: Rate::of(answers.iter().map(|answer| answer.chosen == 0)),
            log_probability: log_p / answers.len().max(1) as f64,
        }
    }
}

/// What a way of being taught is worth.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ArmReport {
    /// The way.
    pub arm: BehaviourArm,
    /// By kind of question.
    pub scores: Vec<Score>,
    /// Questions about what was never taught, whose most likely answer of four stayed that of the
    /// model alone.
    pub locality: Rate,
    /// Change of the loss of control text in per cent, against the model alone.
    pub control_percent: f64,
    /// Questions whose notes had the fact that answers them; `None` without notes.
    pub found: Option<Rate>,
    /// Mean tokens of notes; 0 without them.
    pub note_tokens: f64,
    /// Median milliseconds to find and render notes, vector included; 0 without them.
    pub note_ms: f64,
    /// Seconds of teaching the facts.
    pub teach_seconds: f64,
    /// Bytes that are kept of them.
    pub bytes: u64,
}

impl ArmReport {
    /// The score of a kind of question.
    pub fn score(&self, kind: &str) -> Option<&Score> {
        self.scores.iter().find(|score| score.kind == kind)
    }
}

#[cfg(test)]
mod tests {
    use super::Rate;

    #[test]
    fn intervals_are_wilsons() {
        // Values of R's `prop.test(correct = FALSE)`.
        for (right, n, low, high) in [
            (0, 10, 0.0, 0.277_533),
            (8, 10, 0.490_162, 0.943_318),
            (50, 100, 0.403_832, 0.596_168),
        ] {
            let (found_low, found_high) = Rate { right, n }.interval();
            assert!((found_low - low).abs() < 1e-5, "{found_low}");
            assert!((found_high - high).abs() < 1e-5, "{found_high}");
        }
        assert_eq!(Rate { right: 0, n: 0 }.interval(), (0.0, 1.0));
    }
}
