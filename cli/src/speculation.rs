//! Flags that say who drafts, and what is told of drafts.

use super::output::milliseconds;
use clap::ValueEnum;
use ruvllm::exec::{DraftStats, Generation, NgramDrafter, Session, Speculation};
use ruvllm::sample::Sampler;
use serde_json::{Map, Value, json};

/// Several tokens per pass.
#[derive(clap::Args)]
pub(super) struct SpeculationArgs {
    /// Who guesses tokens, so that one pass computes several where that is faster; the text is the same with any
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',', default_value = "ngram")]
    spec: Vec<Who>,
    /// Compute one token per pass
    #[arg(long, conflicts_with = "spec")]
    no_spec: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Who {
    /// What came after the same words earlier in the text
    Ngram,
}

/// A generation that borrows its session and its sampler.
type Borrowing<'s> = Generation<&'s mut Session, &'s mut Sampler>;

impl SpeculationArgs {
    /// Lets those draft that the flags name.
    pub(super) fn apply<'s>(&self, generation: Borrowing<'s>) -> Borrowing<'s> {
        match self.spec.contains(&Who::Ngram) && !self.no_spec {
            true => generation.speculate(Speculation::by(NgramDrafter::default())),
            false => generation,
        }
    }
}

/// What became of drafts.
#[derive(Default)]
pub(super) struct Drafted {
    n_passes: usize,
    by_drafter: Vec<(&'static str, DraftStats)>,
}

impl Drafted {
    pub(super) fn of(generation: &Borrowing<'_>) -> Drafted {
        Drafted { n_passes: generation.n_passes(), by_drafter: generation.drafters() }
    }

    pub(super) fn json(&self) -> Value {
        let of = |stats: &DraftStats| {
            json!({
                "passes": stats.n_passes,
                "drafted": stats.n_drafted,
                "accepted": stats.n_accepted,
                "ms": milliseconds(stats.time),
            })
        };
        let by_drafter = self.by_drafter.iter().map(|(name, stats)| ((*name).to_owned(), of(stats)));
        json!({ "passes": self.n_passes, "drafters": by_drafter.collect::<Map<_, _>>() })
    }

    /// For a line of timings; empty where nothing was drafted.
    pub(super) fn note(&self) -> String {
        let drafted = self.by_drafter.iter().filter(|(_, stats)| stats.n_drafted > 0);
        let notes = drafted.map(|(name, stats)| format!("{name} {} of {}", stats.n_accepted, stats.n_drafted));
        match notes.collect::<Vec<_>>().join(", ") {
            none if none.is_empty() => none,
            notes => format!("; drafts accepted: {notes}"),
        }
    }
}
