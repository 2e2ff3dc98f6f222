//! Flags of learning from recorded requests.

use crate::io::{Failure, note, paint, read_text};
use ruvllm::engine::Engine;
use ruvllm_learn::sona::Sona;
use std::path::{Path, PathBuf};

/// Whether to record and learn.
#[derive(clap::Args)]
pub(crate) struct SonaArgs {
    /// Record requests in this folder, and learn from them in the background (see `ruvllm sona`)
    #[arg(long, value_name = "DIR")]
    pub(crate) sona: Option<PathBuf>,
    /// Store their tokens, too: to learn the rest again after a session is forgotten, and to train
    /// on
    #[arg(long, requires = "sona")]
    sona_text: bool,
    /// Text that must not be forgotten, for a folder that has none yet
    #[arg(long, value_name = "FILE", requires = "sona")]
    sona_control: Option<PathBuf>,
    /// The rating, 0 to 1, from which on an answer is learnt; of worse ones nothing is [default:
    /// 0.5]
    #[arg(long, value_name = "RATING", requires = "sona")]
    sona_quality_threshold: Option<f32>,
    /// Factor on the steps of learning [default: that of the folder, at first 1]
    #[arg(long, value_name = "FACTOR", requires = "sona")]
    sona_lr: Option<f32>,
    /// Requests from which on the background learns [default: 10]
    #[arg(long, value_name = "N", requires = "sona")]
    sona_min_samples: Option<usize>,
    /// Most requests that wait to be learnt; older ones are not learnt [default: 1000]
    #[arg(long, value_name = "N", requires = "sona")]
    sona_max_pending: Option<usize>,
    /// Milliseconds between two looks of the background at what waits [default: 100]
    #[arg(long, value_name = "MS", requires = "sona")]
    sona_interval_ms: Option<u64>,
    /// Adapt the output alone, not inner layers, too, which takes some seven more prefills of what
    /// is learnt
    #[arg(long, requires = "sona")]
    sona_head_only: bool,
}

impl SonaArgs {
    /// What is recorded and learnt in `folder`.
    pub(crate) fn open(
        &self,
        folder: &Path,
        tenant: &str,
        engine: &Engine,
    ) -> Result<Sona, Failure> {
        let mut builder = Sona::builder()
            .tenant(tenant)
            .keep_text(self.sona_text)
            .inner_layers(!self.sona_head_only);
        if let Some(rating) = self.sona_quality_threshold {
            builder = builder.quality_threshold(rating);
        }
        if let Some(rate) = self.sona_lr {
            builder = builder.instant_lr(rate);
        }
        if let Some(n) = self.sona_min_samples {
            builder = builder.background_min_samples(n);
        }
        if let Some(n) = self.sona_max_pending {
            builder = builder.max_pending_samples(n);
        }
        if let Some(ms) = self.sona_interval_ms {
            builder = builder.background_interval_ms(ms);
        }
        let sona = builder.open(folder, engine)?;
        if sona.learner().n_control() == 0 {
            match (&self.sona_control, engine.model().tokenizer()) {
                (Some(path), Some(tokenizer)) => {
                    sona.calibrate(&tokenizer.encode(&read_text(path)?, true, false))?
                }
                _ => {
                    let why = "has no control text: what must not be forgotten is not known.";
                    note(paint(
                        "33",
                        &format!("{} {why} --sona-control FILE tells.", folder.display()),
                    ));
                }
            }
        }
        Ok(sona)
    }
}
