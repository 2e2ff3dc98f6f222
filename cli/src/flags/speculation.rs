//! Flags that say who drafts, and what is told of drafts.

use super::model::{PlacementArgs, open};
use super::session::SessionArgs;
use crate::io::{Failure, measured, milliseconds, note};
use clap::ValueEnum;
use ruvllm::Generation;
use ruvllm::Model;
use ruvllm::Sampler;
use ruvllm::Session;
use ruvllm::decode::{
    DraftStats, Drafter, ModelDrafter, MtpDrafter, NgramDrafter, Speculation, TrainedDrafter,
};
use ruvllm::engine::DrafterMemory;
use ruvllm::gguf::Gguf;
use ruvllm::{Engine, SessionError, SessionOptions};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Several tokens per pass.
#[derive(clap::Args)]
#[command(next_help_heading = "Speculative decoding")]
pub(crate) struct SpeculationArgs {
    /// Where drafts come from: tokens that are guessed, and checked several at a time where that is
    /// faster; the output is unchanged [default: ngram, and draft with -md]
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    spec: Vec<Who>,
    /// Draft model: a smaller one with the same vocabulary, or a drafter that was trained for the
    /// model (EAGLE 3, DFlash, Gemma 4's assistant) [short: -md]
    #[arg(long, value_name = "FILE", conflicts_with = "no_spec")]
    model_draft: Option<PathBuf>,
    /// No speculative decoding: one token per pass
    #[arg(long, conflicts_with = "spec")]
    no_spec: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Who {
    /// What came after the same words earlier in the text
    Ngram,
    /// What the model given with -md thinks most probable
    Draft,
    /// What the model's own block for multi-token prediction thinks most probable
    #[value(alias = "draft-mtp")]
    Mtp,
}

/// A generation that borrows its session and its sampler.
type Borrowing<'s> = Generation<&'s mut Session, &'s mut Sampler>;

impl SpeculationArgs {
    /// Whether any of the flags is given.
    pub(crate) fn is_given(&self) -> bool {
        !self.spec.is_empty() || self.model_draft.is_some() || self.no_spec
    }

    /// Whether sessions have to keep hidden states, see [`SessionOptions::keep_states`].
    pub(crate) fn reads_states(&self) -> bool {
        self.spec.contains(&Who::Mtp)
    }

    /// Memory of the drafter that -md gives, if it does.
    #[cfg(feature = "serve")]
    pub(crate) fn memory(&self, model: &Model) -> Result<Option<DrafterMemory>, Failure> {
        let is_wanted = self.spec.is_empty() || self.spec.contains(&Who::Draft);
        match self.model_draft.as_ref().filter(|_| is_wanted) {
            Some(path) => drafter_memory(path, model).map(Some),
            None => Ok(None),
        }
    }

    /// Those that the flags name, as [`SpeculationArgs::open`] has them; `target` knows from then
    /// on what earlier runs measured of its passes.
    pub(crate) fn begin(
        &self,
        target: &Engine,
        n_ctx: usize,
        session: &SessionArgs,
    ) -> Result<Option<Speculation>, Failure> {
        let speculation = self.open(target, n_ctx, |model, options| {
            session.engine(model, false, options, None)
        })?;
        if speculation.is_some() {
            measured::assume(target);
        }
        Ok(speculation)
    }

    /// Those that the flags name, drafting for sessions of `target` with a context of `n_ctx`;
    /// `engine` makes that of a model that drafts.
    pub(crate) fn open(
        &self,
        target: &Engine,
        n_ctx: usize,
        engine: impl FnOnce(&Model, &SessionOptions) -> Result<Engine, Failure>,
    ) -> Result<Option<Speculation>, Failure> {
        if self.no_spec {
            return Ok(None);
        }
        let has = |who| self.spec.contains(&who) || self.spec.is_empty() && who != Who::Mtp;
        let mut all = has(Who::Ngram).then(|| Speculation::by(NgramDrafter::default()));
        match &self.model_draft {
            Some(path) if has(Who::Draft) => {
                let label = path.display().to_string();
                let failed = |error: SessionError| Failure::Work(format!("{label}: {error}"));
                let trained = TrainedDrafter::open(Gguf::open(path)?, target).map_err(failed)?;
                all = Some(match trained {
                    Some(drafter) => with(all, drafter),
                    None => {
                        let model = open(Gguf::open(path)?, &PlacementArgs::default(), &label)?;
                        let options = SessionOptions {
                            n_ctx: Some(n_ctx),
                            ..SessionOptions::default()
                        };
                        let engine = engine(&model, &options)?;
                        let drafter = ModelDrafter::new(&engine, target.model(), &options);
                        with(all, drafter.map_err(failed)?)
                    }
                });
            }
            None if self.spec.contains(&Who::Draft) => {
                return Err(Failure::Usage(
                    "--spec draft: give the model that drafts with -md FILE".into(),
                ));
            }
            _ => {}
        }
        if has(Who::Mtp) {
            let drafter = MtpDrafter::new(
                target,
                &SessionOptions {
                    n_ctx: Some(n_ctx),
                    ..SessionOptions::default()
                },
            );
            all = Some(with(
                all,
                drafter.map_err(|error| Failure::Work(format!("--spec mtp: {error}")))?,
            ));
        }
        Ok(all)
    }
}

/// Memory of the drafter in a file, for a model.
pub(crate) fn drafter_memory(path: &Path, model: &Model) -> Result<DrafterMemory, Failure> {
    let failed = |error: SessionError| Failure::Work(format!("{}: {error}", path.display()));
    DrafterMemory::open(Gguf::open(path)?, model).map_err(failed)
}

/// Lets a session keep what drafters read, also of a prompt that is computed before they are asked.
/// Without memory for that, they draft nothing.
pub(crate) fn keep_for(session: &mut Session, speculation: Option<&Speculation>) {
    if let Some(Err(error)) = speculation.map(|speculation| speculation.keep_in(session)) {
        note(format!("drafts: {error}"));
    }
}

/// Those, and one more.
fn with(all: Option<Speculation>, drafter: impl Drafter + 'static) -> Speculation {
    match all {
        Some(all) => all.and(drafter),
        None => Speculation::by(drafter),
    }
}

/// Lets them draft for `generation`.
pub(crate) fn speculate<'s>(
    generation: Borrowing<'s>,
    speculation: Option<&Speculation>,
) -> Borrowing<'s> {
    match speculation {
        Some(speculation) => generation.speculate(speculation.clone()),
        None => generation,
    }
}

/// What became of drafts.
#[derive(Default)]
pub(crate) struct Drafted {
    n_passes: usize,
    by_drafter: Vec<(&'static str, DraftStats)>,
}

impl Drafted {
    pub(crate) fn of(generation: &Borrowing<'_>) -> Drafted {
        Drafted {
            n_passes: generation.n_passes(),
            by_drafter: generation.drafters(),
        }
    }

    pub(crate) fn json(&self) -> Value {
        let of = |stats: &DraftStats| {
            json!({
                "passes": stats.n_passes,
                "drafted": stats.n_drafted,
                "accepted": stats.n_accepted,
                "ms": milliseconds(stats.time),
            })
        };
        let by_drafter = self
            .by_drafter
            .iter()
            .map(|(name, stats)| ((*name).to_owned(), of(stats)));
        json!({ "passes": self.n_passes, "drafters": by_drafter.collect::<Map<_, _>>() })
    }

    /// For a line of timings; empty where nothing was drafted.
    pub(crate) fn note(&self) -> String {
        let drafted = self
            .by_drafter
            .iter()
            .filter(|(_, stats)| stats.n_drafted > 0);
        let notes = drafted
            .map(|(name, stats)| format!("{name} {} of {}", stats.n_accepted, stats.n_drafted));
        match notes.collect::<Vec<_>>().join(", ") {
            none if none.is_empty() => none,
            notes => format!("; drafts accepted: {notes}"),
        }
    }
}
