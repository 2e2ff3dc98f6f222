//! What is recorded of a request.

use crate::sona::record::{Decoder, Encoder};
use ruvllm::Model;
use std::ops::Range;
use std::time::Duration;

/// A request and its answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trajectory {
    /// Number in the folder, from 1, given by [`Sona::record`](super::Sona::record).
    pub number: u64,
    /// Name of the request.
    pub request_id: String,
    /// Name of the conversation or user that it belongs to: what is forgotten together.
    pub session_id: String,
    /// Whom the folder belongs to.
    pub tenant: String,
    /// Tokens of the prompt, those that earlier requests of the session had included.
    pub n_prompt: usize,
    /// The prompt's first tokens, which an earlier request had and which are not learnt again.
    pub n_known: usize,
    /// Tokens of the answer.
    pub n_answer: usize,
    /// Pooled hidden state of the prompt's new tokens, `(n_embd)`; empty if the caller computes
    /// none.
    pub query_embedding: Vec<f32>,
    /// Pooled hidden state of the answer, `(n_embd)`; empty if the caller computes none.
    pub response_embedding: Vec<f32>,
    /// Rating, 0 to 1; `None` if nobody rated the answer.
    pub quality_score: Option<f32>,
    /// Time from the request to the end of its answer.
    pub latency: Duration,
    /// Names of the adapters that were in effect.
    pub adapters: Vec<String>,
    /// The version of what was learnt that was in effect, 0 for none.
    pub generation: u64,
    /// Milliseconds since 1970; 0 stands for the time of recording.
    pub timestamp: u64,
    /// Prompt and answer, to be learnt from; stored only if the owner says so.
    pub tokens: Vec<u32>,
}

/// The layer after which hidden states are pooled for [`Trajectory::query_embedding`] and
/// [`Trajectory::response_embedding`], see
/// [`SessionOptions::pooled_layer`](ruvllm::SessionOptions::pooled_layer): the middle one;
/// `docs/lab/learning.md` compares layers. `None` for a model of one layer.
pub fn pooled_layer(model: &Model) -> Option<usize> {
    let n_layer = model.hparams().n_layer;
    (n_layer > 1).then(|| (n_layer / 2).min(n_layer - 2))
}

impl Trajectory {
    /// What is learnt from it: what its user wrote, the answer too if it was rated `threshold` or
    /// better, nothing if it was rated worse.
    pub fn lesson(&self, threshold: f32) -> Range<usize> {
        let end = match self.quality_score {
            None => self.n_prompt,
            Some(score) if score >= threshold => self.n_prompt + self.n_answer,
            Some(_) => 0,
        };
        self.n_known.max(1)..end.min(self.tokens.len())
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut e = Encoder::default();
        e.u8(TRAJECTORY)
            .u64(self.number)
            .text(&self.request_id)
            .text(&self.session_id)
            .text(&self.tenant);
        e.u64(self.n_prompt as u64)
            .u64(self.n_known as u64)
            .u64(self.n_answer as u64);
        e.list(&self.query_embedding).list(&self.response_embedding);
        e.list(self.quality_score.as_slice())
            .u64(self.latency.as_micros() as u64)
            .u64(self.adapters.len() as u64);
        for name in &self.adapters {
            e.text(name);
        }
        e.u64(self.generation)
            .u64(self.timestamp)
            .list(&self.tokens);
        e.0
    }

    fn decode(d: &mut Decoder<'_>) -> Result<Trajectory, String> {
        Ok(Trajectory {
            number: d.u64()?,
            request_id: d.text()?,
            session_id: d.text()?,
            tenant: d.text()?,
            n_prompt: d.u64()? as usize,
            n_known: d.u64()? as usize,
            n_answer: d.u64()? as usize,
            query_embedding: d.list()?,
            response_embedding: d.list()?,
            quality_score: d.list()?.first().copied(),
            latency: Duration::from_micros(d.u64()?),
            adapters: (0..d.u64()?).map(|_| d.text()).collect::<Result<_, _>>()?,
            generation: d.u64()?,
            timestamp: d.u64()?,
            tokens: d.list()?,
        })
    }
}

const TRAJECTORY: u8 = 0;
const RATING: u8 = 1;

/// A record of the log of trajectories.
pub(super) enum Record {
    Trajectory(Box<Trajectory>),
    /// A rating that came later, of the request of that number.
    Rating {
        number: u64,
        score: f32,
    },
}

impl Record {
    pub(super) fn rating(number: u64, score: f32) -> Vec<u8> {
        let mut e = Encoder::default();
        e.u8(RATING).u64(number).list(&[score]);
        e.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Record, String> {
        let mut d = Decoder(bytes);
        let record = match d.u8()? {
            TRAJECTORY => Record::Trajectory(Box::new(Trajectory::decode(&mut d)?)),
            RATING => {
                let number = d.u64()?;
                Record::Rating {
                    number,
                    score: d.list()?.first().copied().ok_or("a rating is missing")?,
                }
            }
            kind => return Err(format!("a record is of the unknown kind {kind}")),
        };
        d.end()?;
        Ok(record)
    }
}
