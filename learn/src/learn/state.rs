//! Saved learners: a GGUF file type of its own, so that reading is bounded and validated as it is
//! for models, and writing leaves either the old file or the new one.

use crate::learn::LearnError;
use crate::learn::experts::Experts;
use crate::learn::inner_layers::{CONTROL_TOKENS, Layers};
use crate::learn::learner::{Learner, LearnerOptions};
use crate::learn::moments::{LARGEST, NO_TOKEN, SLOTS, Sample, Samples, computable};
use crate::learn::optimiser::{Evidence, HeadLearner};
use crate::learn::slices::Slices;
use crate::learn::topics::{Counts, MAX_TOPICS, Topic, TopicStatus, Topics, Trained};
use bytemuck::Pod;
use ruvllm::Model;
use ruvllm::gguf::{Gguf, Metadata, TensorInfo, Value, Writer};
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;

const TYPE: &str = "learned";
/// Incremented when a file of the new form could be misread as one of the old.
const VERSION: u32 = 3;
/// Largest sums that a file may contain: later additions, all below 1e100, are lost in rounding, so
/// no stream leads beyond.
const MOST_EVIDENCE: f64 = 1e150;
const MOST_LOSS: f64 = 1e300;
/// Largest number of values of one part of the mixture.
const MAX_NUMBERS: usize = 1 << 16;
/// Names of the weights of the mixture's two Bayesian averages.
const SWITCHING: &str = "mixture.switching";
const BAYES: &str = "mixture.bayes";

impl Learner {
    /// Saves all that was learnt. The file gets its name only when it is complete on disk, and then
    /// replaces an older one: a process that is killed meanwhile leaves the older one intact.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), LearnError> {
        let mut writer = self.writer()?;
        // It contains text of the user.
        writer.overwrite().private();
        Ok(writer.write(path)?)
    }

    /// The file that [`Learner::save`] writes.
    ///
    /// # Errors
    /// If it exceeds the limits of a GGUF file.
    pub fn to_bytes(&self) -> Result<Vec<u8>, LearnError> {
        Ok(self.writer()?.to_bytes()?)
    }

    /// Loads what was learnt with a model.
    ///
    /// # Errors
    /// If the file is invalid, of another version, or belongs to another model.
    pub fn open(path: impl AsRef<Path>, model: &Model) -> Result<Learner, LearnError> {
        Learner::from_gguf(&Gguf::open(path)?, model)
    }

    /// Loads what was learnt from memory.
    ///
    /// # Errors
    /// As [`Learner::open`].
    pub fn from_bytes(
        bytes: impl Into<Cow<'static, [u8]>>,
        model: &Model,
    ) -> Result<Learner, LearnError> {
        Learner::from_gguf(&Gguf::from_bytes(bytes)?, model)
    }

    fn writer(&self) -> Result<Writer<'static>, LearnError> {
        let mut w = Writer::new();
        w.metadata("general.type", TYPE);
        w.metadata("learned.version", VERSION);
        w.metadata("learned.fingerprint", self.fingerprint);
        write_options(&mut w, &self.options);
        self.write_numbers(&mut w);
        write_head(&mut w, &self.adapter);
        write_caches(&mut w, &self.experts, self.adapter.fisher.xi.len());
        write_layers(&mut w, &self.layers)?;
        write_mixture(&mut w, &self.experts);
        Ok(w)
    }

    fn from_gguf(gguf: &Gguf, model: &Model) -> Result<Learner, LearnError> {
        let metadata = gguf.metadata();
        check_type(metadata, model)?;
        // Sizes are validated like a caller's, before any memory is reserved.
        let mut learner = Learner::new(model, &options(metadata)?)?;
        let (n, n_vocab) = (model.hparams().n_embd, model.hparams().n_vocab as u32);
        learner.read_numbers(metadata)?;
        read_head(gguf, &mut learner.adapter, n, n_vocab)?;
        read_caches(gguf, &mut learner.experts, n, n_vocab)?;
        let layers = read_layers(gguf, model, n_vocab)?;
        read_mixture(gguf, &mut learner.experts)?;
        learner.set_layers(layers, &mut Slices::whole());
        Ok(learner)
    }

    /// Writes counts, sums and the length of the step.
    fn write_numbers(&self, w: &mut Writer<'static>) {
        let a = &self.adapter;
        w.metadata("learned.scale", a.learnt.0);
        w.metadata("learned.bound", a.learnt.1);
        w.metadata("learned.updates", a.n_updates);
        w.metadata("learned.since_choice", a.since_choice as u32);
        w.metadata("learned.rated", a.rated);
        w.metadata("learned.evidence.sum", a.evidence.sum);
        w.metadata("learned.evidence.squares", a.evidence.squares);
        w.metadata("learned.evidence.chunks", a.evidence.chunks);
        w.metadata(
            "learned.losses.n",
            self.total.n.min(u32::MAX as usize) as u32,
        );
        for (name, loss) in self.total.by_name() {
            w.metadata(name, *loss);
        }
        w.metadata("learned.fisher_texts", a.fisher.n_texts);
        w.metadata("learned.mean_reward", self.mean_reward);
        w.metadata("learned.rewards", self.n_rewards);
    }

    fn read_numbers(&mut self, metadata: &Metadata) -> Result<(), LearnError> {
        let a = &mut self.adapter;
        let scale = metadata.f32("learned.scale")?;
        if !(0.0..=f32::MAX).contains(&scale) {
            return Err(damaged("learned.scale", scale));
        }
        let bound = a.rates.max_divergence;
        // Files of earlier builds have none.
        let learnt_within = match metadata.get("learned.bound") {
            Some(_) => number(metadata, "learned.bound", 0.0..=bound)?,
            None => bound,
        };
        a.learnt = (scale, learnt_within);
        a.share(bound);
        a.n_updates = metadata.u64("learned.updates")?;
        a.since_choice = metadata.u32("learned.since_choice")? as usize;
        a.rated = metadata.bool("learned.rated")?;
        let sums = -MOST_EVIDENCE..=MOST_EVIDENCE;
        let squares = 0.0..=MOST_EVIDENCE * MOST_EVIDENCE;
        a.evidence = Evidence {
            sum: number(metadata, "learned.evidence.sum", sums)?,
            squares: number(metadata, "learned.evidence.squares", squares)?,
            chunks: metadata.u32("learned.evidence.chunks")?,
        };
        self.total.n = metadata.u32("learned.losses.n")? as usize;
        for (name, loss) in self.total.by_name_mut() {
            *loss = number(metadata, name, -MOST_LOSS..=MOST_LOSS)?;
        }
        a.fisher.n_texts = metadata.u32("learned.fisher_texts")?;
        self.mean_reward = metadata.f32("learned.mean_reward")?;
        self.n_rewards = metadata.u32("learned.rewards")?;
        if !self.mean_reward.is_finite() {
            return Err(damaged("learned.mean_reward", self.mean_reward));
        }
        Ok(())
    }
}

/// Checks that a file is one of this version that was learnt with this model.
fn check_type(metadata: &Metadata, model: &Model) -> Result<(), LearnError> {
    let found = metadata.opt_str("general.type")?.unwrap_or_default();
    if found != TYPE {
        return Err(LearnError::NotLearned {
            found: found.to_owned(),
        });
    }
    let found = metadata.u32("learned.version")?;
    if found != VERSION {
        return Err(LearnError::Version {
            found,
            supported: VERSION,
        });
    }
    let (found, expected) = (metadata.u64("learned.fingerprint")?, model.fingerprint());
    if found != expected {
        return Err(LearnError::OtherModel { found, expected });
    }
    Ok(())
}

fn write_options(w: &mut Writer<'static>, o: &LearnerOptions) {
    for (key, value) in [
        ("rank", o.rank),
        ("control_tokens", o.control_tokens),
        ("recent_tokens", o.recent_tokens),
        ("cache_tokens", o.cache_tokens),
        ("neighbours", o.neighbours),
    ] {
        w.metadata(format!("learned.{key}"), value as u32);
    }
    w.metadata("learned.max_divergence", o.max_divergence);
    w.metadata("learned.rate", o.rate);
    w.metadata("learned.decay", o.decay);
    w.metadata("learned.consolidation", o.consolidation);
    w.metadata("learned.generate_with_mixture", o.generate_with_mixture);
}

fn options(metadata: &Metadata) -> Result<LearnerOptions, LearnError> {
    let size = |key: &str| Ok::<_, LearnError>(metadata.u32(&format!("learned.{key}"))? as usize);
    Ok(LearnerOptions {
        rank: size("rank")?,
        max_divergence: number(metadata, "learned.max_divergence", 0.0..=f64::MAX)?,
        control_tokens: size("control_tokens")?,
        recent_tokens: size("recent_tokens")?,
        cache_tokens: size("cache_tokens")?,
        neighbours: size("neighbours")?,
        // Files of earlier builds have none.
        rate: metadata.opt_f32("learned.rate")?.unwrap_or(1.0),
        decay: metadata.f32("learned.decay")?,
        consolidation: metadata.f32("learned.consolidation")?,
        generate_with_mixture: metadata.bool("learned.generate_with_mixture")?,
    })
}

/// Hidden states, token numbers, logits and the rest's logits of moments of text.
const MOMENTS: [[&str; 4]; 2] = [
    ["control.h", "control.ids", "control.raw", "control.rest"],
    ["recent.h", "recent.ids", "recent.raw", "recent.rest"],
];

/// Writes the adapter of the output head and the moments that it learns from.
fn write_head(w: &mut Writer<'static>, a: &HeadLearner) {
    let n = a.fisher.xi.len();
    put(w, "head.a", &[n, a.head.rank], DType::F32, &a.head.a);
    put(w, "head.b", &[n, a.head.rank], DType::F32, &a.head.b);
    put_list(w, "fisher.gamma", DType::F32, &a.fisher.gamma);
    put_list(w, "fisher.xi", DType::F32, &a.fisher.xi);
    for (names, moments) in MOMENTS.into_iter().zip([&a.control, &a.recent]) {
        let (mut all_h, mut all_ids, mut all_raw, mut all_rest) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for m in moments.iter() {
            all_h.extend_from_slice(m.h);
            all_ids.extend_from_slice(m.ids);
            all_raw.extend_from_slice(m.raw);
            all_rest.push(m.rest);
        }
        let ([h, ids, raw, rest], len) = (names, moments.len());
        put(w, h, &[n, len], DType::F16, &all_h);
        put(w, ids, &[SLOTS, len], DType::I32, &all_ids);
        put(w, raw, &[SLOTS, len], DType::F32, &all_raw);
        put_list(w, rest, DType::F32, &all_rest);
    }
}

fn read_head(gguf: &Gguf, a: &mut HeadLearner, n: usize, n_vocab: u32) -> Result<(), LearnError> {
    let rank = a.head.rank;
    let sound = |x: &f32| computable(&[*x]);
    a.head.a = values(gguf, "head.a", n, rank..=rank, DType::F32, sound)?;
    a.head.b = values(gguf, "head.b", n, rank..=rank, DType::F32, sound)?;
    let positive = |x: &f32| (0.0..=LARGEST).contains(x);
    a.fisher.gamma = values(gguf, "fisher.gamma", 1, n..=n, DType::F32, positive)?;
    a.fisher.xi = values(gguf, "fisher.xi", 1, n..=n, DType::F32, positive)?;
    for (names, moments) in MOMENTS.into_iter().zip([&mut a.control, &mut a.recent]) {
        read_moments(gguf, names, moments, n, n_vocab)?;
    }
    Ok(())
}

fn read_moments(
    gguf: &Gguf,
    names: [&'static str; 4],
    moments: &mut Samples,
    n: usize,
    n_vocab: u32,
) -> Result<(), LearnError> {
    let [h, ids, raw, rest] = names;
    let sound = |x: &f32| computable(&[*x]);
    let all_rest: Vec<f32> = values(gguf, rest, 1, 0..=moments.capacity(), DType::F32, sound)?;
    let len = all_rest.len();
    let all_h: Vec<half::f16> = values(gguf, h, n, len..=len, DType::F16, |x: &half::f16| {
        x.is_finite()
    })?;
    let all_ids: Vec<u32> = values(gguf, ids, SLOTS, len..=len, DType::I32, |t| {
        *t < n_vocab || *t == NO_TOKEN
    })?;
    let all_raw: Vec<f32> = values(gguf, raw, SLOTS, len..=len, DType::F32, sound)?;
    for listed in all_ids.chunks_exact(SLOTS) {
        // The first slot is the observed token, which always exists.
        if listed[0] == NO_TOKEN {
            return Err(LearnError::Value {
                name: ids,
                what: "no token".into(),
            });
        }
        let mut sorted = [0; SLOTS];
        sorted.copy_from_slice(listed);
        sorted.sort_unstable();
        if sorted
            .windows(2)
            .any(|pair| pair[0] == pair[1] && pair[0] != NO_TOKEN)
        {
            return Err(LearnError::Value {
                name: ids,
                what: "a token twice".into(),
            });
        }
    }
    let rows = all_h
        .chunks_exact(n)
        .zip(all_ids.chunks_exact(SLOTS))
        .zip(all_raw.chunks_exact(SLOTS))
        .zip(all_rest);
    for (((h, ids), raw), rest) in rows {
        moments.push_raw(Sample { h, ids, raw, rest });
    }
    Ok(())
}

/// Writes the text of the n-gram cache and the nearest neighbours, whose keys have `n` values.
fn write_caches(w: &mut Writer<'static>, e: &Experts, n: usize) {
    put_list(w, "cache.tokens", DType::I32, e.ngrams.tokens());
    let (mut keys, mut tokens) = (Vec::new(), Vec::new());
    for (key, token) in e.neighbours.entries() {
        keys.extend_from_slice(key);
        tokens.push(token);
    }
    put(w, "neighbours.keys", &[n, tokens.len()], DType::F16, &keys);
    put_list(w, "neighbours.tokens", DType::I32, &tokens);
}

fn read_caches(gguf: &Gguf, e: &mut Experts, n: usize, n_vocab: u32) -> Result<(), LearnError> {
    let known = |t: &u32| *t < n_vocab;
    let cached = 0..=e.ngrams.capacity();
    let tokens = values(gguf, "cache.tokens", 1, cached, DType::I32, |t| {
        known(t) || *t == NO_TOKEN
    })?;
    e.ngrams.restore(&tokens);
    let most = 0..=e.neighbours.capacity();
    let tokens: Vec<u32> = values(gguf, "neighbours.tokens", 1, most, DType::I32, known)?;
    let (len, is_finite) = (tokens.len(), |x: &half::f16| x.is_finite());
    let keys = values(gguf, "neighbours.keys", n, len..=len, DType::F16, is_finite)?;
    keys.chunks_exact(n)
        .zip(tokens)
        .for_each(|(key, token)| e.neighbours.push(key, token));
    Ok(())
}

/// Numbers of a topic: its own, its requests, divergence, kinds of tokens, and the bytes of its
/// adapter.
const NUMBERS: usize = 5;

/// Writes control text and topics of inner layers.
fn write_layers(w: &mut Writer<'static>, layers: &Layers) -> Result<(), LearnError> {
    put_list(w, "layers.control", DType::I32, layers.control());
    w.metadata("learned.next_topic", layers.topics.next);
    let (mut numbers, mut tokens, mut counts, mut files) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for topic in &layers.topics.all {
        let adapter = topic.trained.adapter.as_ref();
        let file = adapter.map(|adapter| adapter.to_bytes()).transpose()?;
        let file = file.unwrap_or_default();
        let (id, n_kinds) = (f64::from(topic.id), topic.counts.each.len() as f64);
        numbers.extend([
            id,
            topic.n_requests as f64,
            topic.trained.divergence,
            n_kinds,
            file.len() as f64,
        ]);
        tokens.extend(topic.counts.each.iter().map(|(token, _)| *token));
        counts.extend(topic.counts.each.iter().map(|(_, count)| *count));
        files.extend(file);
    }
    let n_topics = numbers.len() / NUMBERS;
    put(
        w,
        "topics.numbers",
        &[NUMBERS, n_topics],
        DType::F64,
        &numbers,
    );
    put_list(w, "topics.tokens", DType::I32, &tokens);
    put_list(w, "topics.counts", DType::I32, &counts);
    put_list(w, "topics.adapters", DType::I8, &files);
    Ok(())
}

fn read_layers(gguf: &Gguf, model: &Model, n_vocab: u32) -> Result<Layers, LearnError> {
    let most = 0..=CONTROL_TOKENS;
    let known = |t: &u32| *t < n_vocab;
    let mut layers = Layers::new(values(gguf, "layers.control", 1, most, DType::I32, known)?);
    layers.topics = read_topics(gguf, n_vocab, &mut |_, file| {
        Ok(Some(Arc::new(Adapter::from_bytes(file, model)?)))
    })?;
    Ok(layers)
}

/// What is known of the topics in a file, without the model.
pub(crate) fn topics_in(path: &Path) -> Result<Vec<TopicStatus>, LearnError> {
    let gguf = Gguf::open(path)?;
    let control = values(
        &gguf,
        "layers.control",
        1,
        0..=CONTROL_TOKENS,
        DType::I32,
        |_| true,
    )?;
    let mut adapted = Vec::new();
    let topics = read_topics(&gguf, u32::MAX, &mut |id, _| {
        adapted.push(id);
        Ok(None)
    })?;
    let mut status = topics.status(&Counts::of(&control));
    status
        .iter_mut()
        .for_each(|topic| topic.has_adapter = adapted.contains(&topic.id));
    Ok(status)
}

/// Reads topics; `adapter` makes that of a topic of its file.
fn read_topics(
    gguf: &Gguf,
    n_vocab: u32,
    adapter: &mut dyn FnMut(u32, Vec<u8>) -> Result<Option<Arc<Adapter>>, LearnError>,
) -> Result<Topics, LearnError> {
    let name = "topics.numbers";
    let most = MAX_TOPICS.saturating_mul(n_vocab as usize);
    let sound = |x: &f64| (0.0..=1e15).contains(x);
    let numbers: Vec<f64> = values(gguf, name, NUMBERS, 0..=MAX_TOPICS, DType::F64, sound)?;
    let tokens: Vec<u32> = values(gguf, "topics.tokens", 1, 0..=most, DType::I32, |token| {
        *token < n_vocab
    })?;
    let n = tokens.len();
    let counts: Vec<u32> = values(gguf, "topics.counts", 1, n..=n, DType::I32, |count| {
        *count > 0
    })?;
    let mut files = gguf
        .tensor("topics.adapters")
        .map_or(&[][..], |t| gguf.data(t));
    let mut each = tokens.into_iter().zip(counts);
    // Files of earlier builds have none.
    let next = gguf
        .metadata()
        .opt_u64("learned.next_topic")?
        .unwrap_or(0)
        .min(1 << 30) as u32;
    let mut topics = Topics {
        all: Vec::new(),
        next,
    };
    let damaged = |what: &str| LearnError::Value {
        name,
        what: what.into(),
    };
    for numbers in numbers.chunks_exact(NUMBERS) {
        let id = numbers[0] as u32;
        if id >= next || topics.get(id).is_some() {
            return Err(damaged("a topic twice, or out of order"));
        }
        let each: Vec<(u32, u32)> = each.by_ref().take(numbers[3] as usize).collect();
        if each.len() as f64 != numbers[3] || each.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
            return Err(damaged("counts out of order"));
        }
        let total = each.iter().map(|(_, count)| u64::from(*count)).sum();
        let (file, rest) = files
            .split_at_checked(numbers[4] as usize)
            .ok_or_else(|| damaged("adapters end early"))?;
        files = rest;
        let adapter = if file.is_empty() {
            None
        } else {
            adapter(id, file.to_vec())?
        };
        topics.all.push(Topic {
            id,
            counts: Counts { each, total },
            n_requests: numbers[1] as u64,
            trained: Trained {
                adapter,
                divergence: numbers[2],
            },
        });
    }
    Ok(topics)
}

fn write_mixture(w: &mut Writer<'static>, e: &Experts) {
    for (name, blend) in e.blends() {
        put_list(w, name, DType::F64, &blend.numbers());
    }
    put_list(w, SWITCHING, DType::F64, e.switching.log_weights());
    put_list(w, BAYES, DType::F64, e.bayes.log_weights());
}

fn read_mixture(gguf: &Gguf, e: &mut Experts) -> Result<(), LearnError> {
    let numbers = |name| -> Result<Vec<f64>, LearnError> {
        let most = 0..=MAX_NUMBERS;
        values(gguf, name, 1, most, DType::F64, |x: &f64| x.is_finite())
    };
    let check = |name, is_restored| {
        let what = "no distribution".into();
        if is_restored {
            Ok(())
        } else {
            Err(LearnError::Value { name, what })
        }
    };
    for (name, blend) in e.blends_mut() {
        check(name, blend.restore(&numbers(name)?))?;
    }
    check(SWITCHING, e.switching.restore(&numbers(SWITCHING)?))?;
    check(BAYES, e.bayes.restore(&numbers(BAYES)?))
}

/// Reads a 64-bit floating-point number within limits.
pub(crate) fn number(
    metadata: &Metadata,
    name: &'static str,
    limits: RangeInclusive<f64>,
) -> Result<f64, LearnError> {
    match metadata.get(name) {
        Some(&Value::F64(x)) if limits.contains(&x) => Ok(x),
        found => Err(LearnError::Value {
            name,
            what: found.map_or("missing".into(), |v| format!("{v:?}")),
        }),
    }
}

fn damaged(name: &'static str, value: f32) -> LearnError {
    LearnError::Value {
        name,
        what: format!("{value}"),
    }
}

/// Adds a tensor; an empty one is omitted, since GGUF has none.
pub(crate) fn put<T: Pod>(
    w: &mut Writer<'static>,
    name: &str,
    dims: &[usize],
    dtype: DType,
    values: &[T],
) {
    if !values.is_empty() {
        let dims: Vec<u64> = dims.iter().map(|&n| n as u64).collect();
        w.tensor(
            name,
            &dims,
            dtype,
            bytemuck::cast_slice::<T, u8>(values).to_vec(),
        );
    }
}

/// [`put`] of a tensor of one dimension.
fn put_list<T: Pod>(w: &mut Writer<'static>, name: &str, dtype: DType, values: &[T]) {
    put(w, name, &[values.len()], dtype, values);
}

/// All values of a tensor of `width` columns and a number of rows within `rows`, each checked by
/// `sound`.
pub(crate) fn values<T: Pod + std::fmt::Debug>(
    gguf: &Gguf,
    name: &'static str,
    width: usize,
    rows: RangeInclusive<usize>,
    dtype: DType,
    sound: impl Fn(&T) -> bool,
) -> Result<Vec<T>, LearnError> {
    let Some(t) = gguf.tensor(name) else {
        if rows.contains(&0) {
            return Ok(Vec::new());
        }
        return Err(LearnError::Tensor {
            name,
            found: "missing".into(),
            expected: format!("{dtype}"),
        });
    };
    let TensorInfo { dims, .. } = t;
    let n_rows = usize::try_from(t.n_elems()).unwrap_or(usize::MAX) / width;
    // One row, and a single column, can be written with one dimension.
    let shaped = match dims[..] {
        [n] => width == 1 || n == width as u64,
        [n, _] => n == width as u64,
        _ => false,
    };
    if t.dtype != dtype || !shaped || !rows.contains(&n_rows) {
        let expected = format!(
            "{dtype} of {width} times {} to {}",
            rows.start(),
            rows.end()
        );
        return Err(LearnError::Tensor {
            name,
            found: format!("{} of {dims:?}", t.dtype),
            expected,
        });
    }
    let values: Vec<T> = bytemuck::pod_collect_to_vec(gguf.data(t));
    match values.iter().find(|x| !sound(x)) {
        Some(x) => Err(LearnError::Value {
            name,
            what: format!("{x:?}"),
        }),
        None => Ok(values),
    }
}
