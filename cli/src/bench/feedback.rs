//! Second moments of the inputs of matrices on a text, with which `quantize --feedback-text` makes
//! later columns make up for the errors of earlier ones.
//!
//! They take as many bytes as columns squared, so they are there for a group of tensors at a time,
//! and the text is computed again for the next one.

use super::probed::{ProbedText, n_matrices};
use super::target::measuring_session;
use crate::io::{Failure, Progress, note, printable, size};
use crate::quantize::Rows;
use ruvllm::compute::ProductCallback;
use ruvllm::gguf::{Gguf, TensorInfo};
use ruvllm::model::quantize::Planned;
use ruvllm::quant::Moments;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

/// Most bytes of the moments of a group; a tensor that takes more goes without feedback.
const GROUP_BYTES: u64 = 2 << 30;

/// A text, and what it says of the tensors that are being written.
pub(crate) struct FeedbackText<'a> {
    text: RefCell<ProbedText>,
    tokens: Vec<u32>,
    /// Tensors that get feedback, in the order of the file.
    tensors: Vec<&'a TensorInfo>,
    /// Threads that sums are made on.
    pool: Arc<rayon::ThreadPool>,
    group: RefCell<BTreeMap<String, Vec<Moments>>>,
}

impl<'a> FeedbackText<'a> {
    /// # Errors
    /// If the model cannot compute the text, or that is shorter than a context.
    pub(crate) fn new(
        gguf: &Gguf,
        plan: &'a [Planned<'a>],
        text: &str,
        n_threads: Option<NonZeroUsize>,
    ) -> Result<FeedbackText<'a>, Failure> {
        let probed = ProbedText::new(measuring_session(gguf.clone(), n_threads)?)?;
        let session = probed.session();
        let (model, n_ctx) = (session.model(), session.sequence().n_ctx());
        let Some(tokenizer) = model.tokenizer() else {
            let why = "--feedback-text: the model has no tokenizer for the text";
            return Err(Failure::Work(why.into()));
        };
        let mut tokens = tokenizer.encode(text, true, false);
        if tokens.len() < n_ctx {
            let n = tokens.len();
            let text =
                format!("--feedback-text: it has {n} tokens, and at least {n_ctx} are needed");
            return Err(Failure::Work(text));
        }
        tokens.truncate(tokens.len() / n_ctx * n_ctx);
        for chunk in tokens.chunks_exact_mut(n_ctx) {
            probed.give_ends(chunk)?;
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads.map_or(0, NonZeroUsize::get))
            .build()?;
        let quantized = plan.iter().filter(|planned| planned.is_quantized());
        let tensors = quantized.map(|planned| planned.tensor);
        let tensors = tensors.filter(|t| t.name.starts_with("blk."));
        let (tensors, too_wide): (Vec<_>, Vec<_>) = tensors.partition(|t| bytes(t) <= GROUP_BYTES);
        if let Some(first) = too_wide.first() {
            let (n, limit) = (too_wide.len(), size(GROUP_BYTES));
            note(format!(
                "{n} tensors go without feedback, {} the first: moments of their inputs take more than {limit} each",
                printable(&first.name)
            ));
        }
        if tensors.is_empty() && too_wide.is_empty() {
            let why = "--feedback-text: no tensor blk.… gets a type with blocks";
            return Err(Failure::Usage(why.into()));
        }
        Ok(FeedbackText {
            text: RefCell::new(probed),
            tokens,
            tensors,
            pool: Arc::new(pool),
            group: RefCell::default(),
        })
    }

    /// Whether a tensor gets feedback, where the text reaches it.
    pub(crate) fn has(&self, tensor: &TensorInfo) -> bool {
        self.tensors.iter().any(|other| other.name == tensor.name)
    }

    /// The moments of each matrix of a tensor that gets feedback.
    ///
    /// # Errors
    /// If the text cannot be computed, or `rows` is interrupted.
    pub(crate) fn moments(&self, tensor: &TensorInfo, rows: &Rows) -> io::Result<Vec<Moments>> {
        if !self.has(tensor) {
            return Ok(Vec::new());
        }
        if !self.group.borrow().contains_key(&tensor.name) {
            *self.group.borrow_mut() = self.compute(tensor, rows)?;
        }
        Ok(self
            .group
            .borrow_mut()
            .remove(&tensor.name)
            .unwrap_or_default())
    }

    /// The moments of a group that begins with `first`.
    fn compute(
        &self,
        first: &TensorInfo,
        rows: &Rows,
    ) -> io::Result<BTreeMap<String, Vec<Moments>>> {
        let mut left = GROUP_BYTES;
        let from = self.tensors.iter().skip_while(|t| t.name != first.name);
        let group = from.take_while(|t| match left.checked_sub(bytes(t)) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        });
        let moments = |t: &&TensorInfo| {
            let sums = vec![Moments::new(t.dims[0] as usize); n_matrices(t)];
            (t.name.clone(), sums)
        };
        let collector = Arc::new(Collector {
            sums: Mutex::new(group.map(moments).collect()),
            pool: Arc::clone(&self.pool),
        });
        let mut text = self.text.borrow_mut();
        let n_ctx = text.session().sequence().n_ctx();
        let progress = Progress::new("computing the text", self.tokens.len() as u64);
        for (i, chunk) in self.tokens.chunks_exact(n_ctx).enumerate() {
            if rows.is_interrupted() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            text.compute(chunk, false, collector.clone())
                .map_err(io::Error::other)?;
            progress.set(((i + 1) * n_ctx) as u64);
        }
        let mut sums = collector
            .sums
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut sums))
    }
}

/// Bytes of the moments of a tensor.
fn bytes(t: &TensorInfo) -> u64 {
    let square = t.dims[0].saturating_mul(t.dims[0]);
    square
        .saturating_mul(4)
        .saturating_mul(n_matrices(t) as u64)
}

/// Moments of the tensors of a group.
struct Collector {
    sums: Mutex<BTreeMap<String, Vec<Moments>>>,
    pool: Arc<rayon::ThreadPool>,
}

impl ProductCallback for Collector {
    fn inputs(&self, name: &str, matrix: usize, _: usize, x: &[f32]) {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(moments) = sums.get_mut(name).and_then(|all| all.get_mut(matrix)) {
            self.pool.install(|| moments.add(x));
        }
    }
}
