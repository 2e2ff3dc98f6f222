//! The mix of types that loses least for a number of bytes.
//!
//! Tensors of one role are a group. How much a group matters is measured: it alone is quantised to
//! a probe type, and the divergence of what the model then predicts of a text, over the squared
//! error of the weights, is the group's sensitivity. Each other type is taken to lose its own squared
//! error times that, which is a fraction of the passes that every type of every group would take;
//! [`choose`] then fills the bytes.

use super::divergence::{Base, Divergence, Scratch, write_base};
use super::perplexity::{DEFAULT_CTX, n_chunks};
use crate::flags::{PlacementArgs, engine, open};
use crate::io::{Failure, Progress, note, size};
use crate::quantize::{Candidate, Rows, by_regex, choose, recipe_failure};
use rayon::prelude::*;
use ruvllm::Session;
use ruvllm::SessionOptions;
use ruvllm::engine::EngineOptions;
use ruvllm::gguf::{Gguf, TensorInfo};
use ruvllm::model::quantize::{Importance, NamedType, Planned, RecipeError, writer};
use ruvllm::quant::{DType, FileType, dequantize_row, quantize_row};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Types from which is chosen.
const TYPES: &[DType] = &[
    DType::IQ1_S,
    DType::IQ2_XXS,
    DType::IQ2_XS,
    DType::IQ2_S,
    DType::Q2_K,
    DType::IQ3_XXS,
    DType::IQ3_S,
    DType::Q3_K,
    DType::IQ4_XS,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::Q8_0,
];

/// The type whose divergence is measured: a loss that is well above what a text's length blurs, and
/// small enough to be proportional.
const PROBE: DType = DType::Q3_K;

/// Rows of a tensor whose error stands for that of all.
const SAMPLED: usize = 16;

/// Most chunks of the text.
const MAX_CHUNKS: usize = 8;

/// What is wanted.
pub(crate) struct Target<'t> {
    pub(crate) gguf: &'t Gguf,
    /// The tensors with the types of the mix; those that it leaves as they are stay so.
    pub(crate) plan: &'t [Planned<'t>],
    /// Types that are given.
    pub(crate) named: &'t [NamedType],
    pub(crate) importance: Option<&'t Importance>,
    pub(crate) text: &'t str,
    /// Of the file.
    pub(crate) bytes: u64,
    /// The file of log-probabilities that is there meanwhile.
    pub(crate) scratch: PathBuf,
    pub(crate) n_threads: Option<NonZeroUsize>,
}

/// Tensors of one role.
struct Group<'t> {
    role: String,
    tensors: Vec<&'t Planned<'t>>,
    candidates: Vec<Candidate<DType>>,
    /// Squared error in the probe type.
    probe_error: f64,
}

impl Target<'_> {
    /// The type of each group, as `--tensor-type` names it; tells the table.
    ///
    /// # Errors
    /// If the bytes are fewer than the smallest types take, or the text is too short.
    pub(crate) fn mix(&self) -> Result<Vec<NamedType>, Failure> {
        let mut groups = self.groups()?;
        if groups.is_empty() {
            return Err(Failure::Usage(
                "the type of the file quantises nothing, so there is nothing to choose".into(),
            ));
        }
        let others = self.plan.iter().filter(|planned| !self.is_chosen(planned));
        let tensors: u64 = self.gguf.tensors().iter().map(|t| t.n_bytes).sum();
        let header = self.gguf.file_size().saturating_sub(tensors);
        let fixed = header
            + others
                .map(|other| n_bytes(other.tensor, other.to))
                .sum::<u64>();

        // What is impossible is told before anything is measured.
        let limit = self.bytes.saturating_sub(fixed);
        let sizes = |group: &Group<'_>| group.candidates.clone();
        let too_small = |least| {
            let (least, asked) = (size(fixed + least), size(self.bytes));
            Failure::Usage(format!("{asked}: the smallest file is {least}"))
        };
        choose(&groups.iter().map(sizes).collect::<Vec<_>>(), limit).map_err(too_small)?;

        let _scratch = Scratch(self.scratch.clone());
        let n_chunks = self.write_base()?;
        for group in &mut groups {
            let sensitivity = self.sensitivity(group, n_chunks)?;
            for candidate in &mut group.candidates {
                candidate.loss *= sensitivity;
            }
        }
        let all: Vec<_> = groups.iter().map(sizes).collect();
        let chosen = choose(&all, limit).map_err(too_small)?;
        let mut named = Vec::new();
        let (mut bytes, mut loss) = (fixed, 0.0);
        note("| tensors | type | size | divergence |\n|---|---|---|---|");
        for (group, i) in groups.iter().zip(chosen) {
            let candidate = group.candidates[i];
            bytes += candidate.bytes;
            loss += candidate.loss;
            note(format!(
                "| {} | {} | {} | {:.6} |",
                group.role,
                candidate.what,
                size(candidate.bytes),
                candidate.loss
            ));
            let failed = |error: regex::Error| Failure::Work(error.to_string());
            named.push(by_regex(&pattern(&group.role), candidate.what).map_err(failed)?);
        }
        let measured = self.measure(n_chunks, |planned| {
            let of = named
                .iter()
                .find(|named| named.is_match(&planned.tensor.name));
            let of = of.filter(|_| self.is_chosen(planned));
            Some(of.map_or(planned.to, NamedType::dtype))
        })?;
        note(format!(
            "| all | | {} | {loss:.6}, measured {:.6} |",
            size(bytes),
            measured.mean().0
        ));
        Ok(named)
    }

    /// Whether the type of a tensor is chosen: the mix quantises it, and nobody has named its type.
    fn is_chosen(&self, planned: &Planned<'_>) -> bool {
        let is_named = |named: &NamedType| named.is_match(&planned.tensor.name);
        planned.is_quantized() && !self.named.iter().any(is_named)
    }

    /// The groups, with the squared errors of their candidates.
    fn groups(&self) -> Result<Vec<Group<'_>>, Failure> {
        let mut by_role = BTreeMap::<String, Vec<&Planned<'_>>>::new();
        for planned in self.plan.iter().filter(|planned| self.is_chosen(planned)) {
            by_role
                .entry(role(&planned.tensor.name))
                .or_default()
                .push(planned);
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(self.n_threads.map_or(0, NonZeroUsize::get))
            .build()?;
        let mut groups = Vec::with_capacity(by_role.len());
        for (role, tensors) in by_role {
            let error = |what: DType| {
                pool.install(|| {
                    let errors = tensors.par_iter();
                    let errors = errors.map(|planned| self.error(planned.tensor, what));
                    errors.collect::<Result<Vec<f64>, Failure>>()
                })
                .map(|errors| errors.into_iter().sum::<f64>())
            };
            let probe_error = error(PROBE)?;
            let mut candidates = Vec::<Candidate<DType>>::new();
            for &what in TYPES {
                let bytes =
                    |planned: &&Planned<'_>| n_bytes(planned.tensor, of_rows(what, planned.tensor));
                let bytes: u64 = tensors.iter().map(bytes).sum();
                if candidates.iter().any(|other| other.bytes == bytes) {
                    // Its rows fall back to a type that another one falls back to.
                    continue;
                }
                let loss = match what {
                    PROBE => probe_error,
                    what => error(what)?,
                };
                candidates.push(Candidate { what, bytes, loss });
            }
            groups.push(Group {
                role,
                tensors,
                candidates,
                probe_error,
            });
        }
        Ok(groups)
    }

    /// Squared error of a tensor in a type, from some of its rows; those of weights that matter
    /// more count more.
    fn error(&self, t: &TensorInfo, what: DType) -> Result<f64, Failure> {
        let (n, to) = (t.dims[0] as usize, of_rows(what, t));
        let (n_rows, data) = ((t.n_elems() / t.dims[0]) as usize, self.gguf.data(t));
        let row_bytes = data.len() / n_rows;
        let means = self.means(t)?;
        let rows_per_matrix = t.dims.get(1).map_or(1, |&n| n.max(1) as usize);
        let step = n_rows.div_ceil(SAMPLED);
        let (mut x, mut y) = (vec![0.0; n], vec![0.0; n]);
        let mut blocks = vec![0; n / to.block().0 as usize * to.block().1 as usize];
        let (mut sum, mut n_sampled) = (0.0, 0);
        for row in (0..n_rows).step_by(step) {
            dequantize_row(t.dtype, &data[row * row_bytes..][..row_bytes], &mut x)?;
            let importance = means
                .as_ref()
                .map(|all| &all[row / rows_per_matrix * n..][..n]);
            quantize_row(to, &x, importance, &mut blocks)?;
            dequantize_row(to, &blocks, &mut y)?;
            let weight = |i: usize| importance.map_or(1.0, |importance| f64::from(importance[i]));
            let errors = x.iter().zip(&y).enumerate();
            let errors = errors.map(|(i, (x, y))| weight(i) * f64::from(y - x).powi(2));
            sum += errors.sum::<f64>();
            n_sampled += 1;
        }
        Ok(sum * n_rows as f64 / f64::from(n_sampled))
    }

    /// Importance of the weights of a tensor.
    fn means(&self, t: &TensorInfo) -> Result<Option<Vec<f32>>, Failure> {
        let means = self
            .importance
            .map_or(Ok(None), |all| all.means(&t.name, &t.dims));
        means.map_err(|error| recipe_failure(RecipeError::from(error)))
    }

    /// Divergence for a unit of squared error.
    fn sensitivity(&self, group: &Group<'_>, n_chunks: usize) -> Result<f64, Failure> {
        let is_in = |planned: &Planned<'_>| {
            group
                .tensors
                .iter()
                .any(|other| other.tensor.name == planned.tensor.name)
        };
        let divergence = self.measure(n_chunks, |planned| is_in(planned).then_some(PROBE))?;
        Ok(divergence.mean().0.max(0.0) / group.probe_error.max(f64::MIN_POSITIVE))
    }

    /// Divergence of the model in which some tensors have other types.
    fn measure(
        &self,
        n_chunks: usize,
        to: impl Fn(&Planned<'_>) -> Option<DType>,
    ) -> Result<Divergence, Failure> {
        let mut plan = Vec::with_capacity(self.plan.len());
        for planned in self.plan {
            let tensor = planned.tensor;
            let to = to(planned).map_or(tensor.dtype, |dtype| of_rows(dtype, tensor));
            let importance = match self.importance {
                Some(_) if to != tensor.dtype => self.means(tensor)?,
                _ => None,
            };
            plan.push(Planned {
                tensor,
                to,
                importance,
            });
        }
        let rows = Rows::in_memory(Progress::hidden(), self.n_threads)?;
        let made = Gguf::from_writer(writer(
            self.gguf,
            &plan,
            FileType::F16,
            &rows.converter,
            None,
        ));
        let mut session = self.session(rows.finish(made)?)?;
        let progress = Progress::new("measuring", (n_chunks * session.sequence().n_ctx()) as u64);
        Base::open(&self.scratch)?.compare(&mut session, n_chunks, &self.scratch, &progress)
    }

    /// Writes what the model as it is predicts; returns the number of chunks.
    fn write_base(&self) -> Result<usize, Failure> {
        let mut session = self.session(self.gguf.clone())?;
        let Some(tokenizer) = session.model().tokenizer() else {
            return Err(Failure::Work(
                "the model has no tokenizer for the text".into(),
            ));
        };
        let tokens = tokenizer.encode(self.text, true, false);
        let n_chunks = n_chunks(&tokens, session.sequence().n_ctx())?.min(MAX_CHUNKS);
        let progress = Progress::new("measuring", (n_chunks * session.sequence().n_ctx()) as u64);
        write_base(&mut session, &tokens, n_chunks, &self.scratch, &progress)?;
        Ok(n_chunks)
    }

    fn session(&self, gguf: Gguf) -> Result<Session, Failure> {
        measuring_session(gguf, self.n_threads)
    }
}

/// A session that texts are computed with, of the usual length.
pub(crate) fn measuring_session(
    gguf: Gguf,
    n_threads: Option<NonZeroUsize>,
) -> Result<Session, Failure> {
    let model = open(gguf, &PlacementArgs::default(), "the model")?;
    let options = SessionOptions {
        n_ctx: Some(DEFAULT_CTX.min(model.hparams().n_ctx_train)),
        ..SessionOptions::default()
    };
    let engine = engine(&model, n_threads, false, &options, EngineOptions::default())?;
    Ok(engine.session_with(&options)?)
}

/// The type that rows of this tensor get.
fn of_rows(dtype: DType, t: &TensorInfo) -> DType {
    dtype.for_rows_of(t.dims[0])
}

fn n_bytes(t: &TensorInfo, dtype: DType) -> u64 {
    let (elems, bytes) = dtype.block();
    t.n_elems() / elems * bytes
}

/// A name without its layer.
fn role(name: &str) -> String {
    match name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'))
    {
        Some((_, role)) => role.to_owned(),
        None => name.to_owned(),
    }
}

/// The expression that the names of a role match.
fn pattern(role: &str) -> String {
    format!(r"^(blk\.\d+\.)?{}$", regex::escape(role))
}
