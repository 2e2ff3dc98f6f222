//! Saved sessions: a GGUF file type of its own, so that reading is bounded as it is for models, and
//! writing leaves either the old file or the new one.
//!
//! The metadata describe everything on which bits depend, and must equal those of the session that
//! loads the file; the rest is in tensors, under a checksum.

use crate::compute::hook::TokenKind;
use crate::engine::SessionError;
use crate::engine::identity::{CENTRED, PRECISION, checksum, identity};
use crate::gguf::{Gguf, Writer};
use crate::kv::{KvCheckpoint, KvLayout, KvState, SEED, SeqKv};
use crate::quant::DType;
use crate::session::StateError;
use crate::session::saved_images as images;
use crate::session::session::Session;
use crate::session::state::{SessionCache, SessionState};
use bytemuck::Pod;
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

const TYPE: &str = "session";
/// Incremented when a file of the new form could be misread as one of the old.
const VERSION: u32 = 1;
const CHECKSUM: &str = "session.checksum";

/// Tensors: tokens; 1 for each generated one; the number of filled positions, and 1 if the last
/// token is still to be computed; logits; page tables, each preceded by its length; checkpoints,
/// each with position, mark and number of pages before its pages; pages; images (`saved_images.rs`).
const TOKENS: &str = "tokens";
const KINDS: &str = "kinds";
const COUNTS: &str = "counts";
const LOGITS: &str = "logits";
const TABLES: &str = "tables";
const CHECKPOINTS: &str = "checkpoints";

impl SessionState<'_> {
    /// Saves the session: tokens and their kinds, keys and values, logits, images. The file gets its name
    /// only when it is complete on disk, replaces an older one, and is readable only for this
    /// user. Adapters, which the session that loads the file must have, and hooks are not
    /// saved.
    ///
    /// # Errors
    /// If the file cannot be written, or the context was shifted.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), StateError> {
        self.0.save(path.as_ref())
    }

    /// The file that [`save`](Self::save) writes.
    ///
    /// # Errors
    /// If it does not fit a GGUF file, or the context was shifted.
    pub fn to_bytes(&self) -> Result<Vec<u8>, StateError> {
        self.0.to_bytes()
    }
}

impl SessionCache<'_> {
    /// Replaces the contents of this session by those of a saved one, and continues from there with
    /// the same bits.
    ///
    /// # Errors
    /// If the file is invalid or of another version; if it was saved with another model,
    /// instruction-set level or device, version of the arithmetic, adapters, precision of keys
    /// and values, rope scaling or `exact`; if there is not enough memory. The session is then
    /// unchanged.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<(), StateError> {
        self.0.load_gguf(&Gguf::open(path)?)
    }

    /// Loads a saved session from memory.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_bytes(&mut self, bytes: impl Into<Cow<'static, [u8]>>) -> Result<(), StateError> {
        self.0.load_gguf(&Gguf::from_bytes(bytes)?)
    }
}

impl Session {
    /// See [`SessionState::save`].
    pub(super) fn save(&self, path: &Path) -> Result<(), StateError> {
        self.check_unshifted()?;
        if self.seq.n_drafts() > 0 {
            return self.fork()?.save(path);
        }
        let kv = self.seq.kv.state().map_err(SessionError::from)?;
        let mut writer = self.writer(&kv);
        writer.overwrite().private();
        Ok(writer.write(path)?)
    }

    /// See [`SessionState::to_bytes`].
    fn to_bytes(&self) -> Result<Vec<u8>, StateError> {
        self.check_unshifted()?;
        if self.seq.n_drafts() > 0 {
            return self.fork()?.to_bytes();
        }
        let kv = self.seq.kv.state().map_err(SessionError::from)?;
        Ok(self.writer(&kv).to_bytes()?)
    }

    fn check_unshifted(&self) -> Result<(), StateError> {
        if self.seq.memory.is_some() {
            return Err(StateError::HasMemory);
        }
        if self.seq.n_dropped() > 0 {
            Err(StateError::Shifted {
                n_dropped: self.seq.n_dropped(),
            })
        } else {
            Ok(())
        }
    }

    fn writer<'a>(&'a self, kv: &'a KvState<'_>) -> Writer<'a> {
        let kinds: Vec<u8> = self
            .seq
            .kinds()
            .iter()
            .map(|&kind| u8::from(kind == TokenKind::Generated))
            .collect();
        let tables: Vec<u32> = kv
            .tables
            .iter()
            .flat_map(|table| [&[table.len() as u32], &table[..]].concat())
            .collect();
        let mut checkpoints = Vec::new();
        for KvCheckpoint { pos, marked, pages } in &kv.checkpoints {
            checkpoints.extend([*pos as u32, u32::from(*marked), pages.len() as u32]);
            checkpoints.extend(pages.iter().flatten());
        }
        let counts = [kv.len as u32, u32::from(self.ahead)];
        let mut tensors = vec![
            tensor(TOKENS, DType::I32, self.tokens()),
            tensor(KINDS, DType::I8, &kinds),
            tensor(COUNTS, DType::I32, &counts),
            tensor(LOGITS, DType::F32, self.logits()),
            tensor(TABLES, DType::I32, &tables),
            tensor(CHECKPOINTS, DType::I32, &checkpoints),
        ];
        let (embeddings, spans) = images::to_save(&self.seq.spans);
        tensors.push(tensor(images::SPANS, DType::I32, &spans));
        let image = |(i, rows): (usize, &&'a Arc<[f32]>)| {
            let bytes: &[u8] = bytemuck::cast_slice(rows);
            (
                images::name(i),
                DType::F32,
                rows.len(),
                Cow::Borrowed(bytes),
            )
        };
        tensors.extend(embeddings.iter().enumerate().map(image));
        let page = |(i, page): (usize, &'a Cow<'_, [u8]>)| {
            let bytes: &[u8] = page;
            (page_name(i), DType::I8, bytes.len(), Cow::Borrowed(bytes))
        };
        tensors.extend(kv.pages.iter().enumerate().map(page));
        // GGUF has no tensors without values.
        tensors.retain(|(_, _, n, _)| *n > 0);
        let hash = tensors.iter().fold(SEED, |hash, (name, _, _, bytes)| {
            checksum(hash, name, bytes)
        });

        let mut w = Writer::new();
        w.metadata("general.type", TYPE);
        w.metadata("session.version", VERSION);
        for (key, _, value) in identity(&self.seq) {
            w.metadata(key, value);
        }
        w.metadata(CHECKSUM, hash);
        for (name, dtype, n, bytes) in tensors {
            w.tensor(name, &[n as u64], dtype, bytes);
        }
        w
    }

    fn load_gguf(&mut self, gguf: &Gguf) -> Result<(), StateError> {
        self.check_belongs(gguf)?;
        // The contents may be malicious even if the checksum is right: everything below is
        // validated.
        let n_vocab = self.model().hparams().n_vocab;
        let (tokens, kinds) = read_tokens(gguf, self.seq.n_ctx(), n_vocab)?;
        let counts: Vec<u32> = values(gguf, COUNTS, DType::I32)?;
        let &[len, ahead @ 0..=1] = &counts[..] else {
            return Err(damaged(COUNTS, "not two counts"));
        };
        if len as usize > tokens.len() || ahead == 1 && kinds.last() != Some(&TokenKind::Generated)
        {
            return Err(damaged(COUNTS, "more than there are tokens"));
        }
        let logits: Vec<f32> = values(gguf, LOGITS, DType::F32)?;
        if !logits.is_empty() && logits.len() != n_vocab {
            return Err(damaged(LOGITS, "not one for each token of the vocabulary"));
        }

        let h = self.model().hparams();
        let spans: Vec<u32> = values(gguf, images::SPANS, DType::I32)?;
        let spans = images::read(gguf, &spans, tokens.len(), (h.n_embd, h.n_layer))?;
        let state = read_kv(gguf, len as usize)?;
        let kv = SeqKv::new(self.seq.kv.pool().clone(), self.layout_of(gguf)?);
        let kv = kv.with_state(&state)?;
        let kv = kv.map_err(|what| damaged(TABLES, what))?;
        self.outputs.reserve(n_vocab, 0)?;
        self.seq.replace(&tokens, &kinds, kv)?;
        self.seq.spans = spans;
        self.outputs.set_last(&logits, n_vocab);
        self.ahead = ahead == 1;
        Ok(())
    }

    /// The layout of the file's keys and values: files of earlier builds have whole keys.
    fn layout_of(&self, gguf: &Gguf) -> Result<Arc<KvLayout>, StateError> {
        let found = gguf.metadata().str(PRECISION)?;
        let policy = self.seq.kv.policy();
        let layout = self.engine.layout(policy)?;
        let (precision, layout) = match found.strip_suffix(CENTRED) {
            Some(precision) => (precision, layout),
            None => (found, Arc::new(KvLayout::clone(&layout).centred(None))),
        };
        let expected = policy.to_string();
        if precision != expected || found.ends_with(CENTRED) != layout.has_centres() {
            return Err(StateError::Other {
                what: "precision of keys and values",
                found: found.to_owned(),
                expected,
            });
        }
        Ok(layout)
    }

    /// Checks type, version, identity and checksum.
    fn check_belongs(&self, gguf: &Gguf) -> Result<(), StateError> {
        let metadata = gguf.metadata();
        let found = metadata.opt_str("general.type")?.unwrap_or_default();
        if found != TYPE {
            return Err(StateError::NotASession {
                found: found.to_owned(),
            });
        }
        let found = metadata.u32("session.version")?;
        if found != VERSION {
            return Err(StateError::Version {
                found,
                supported: VERSION,
            });
        }
        let identity = identity(&self.seq);
        self.layout_of(gguf)?;
        for (key, what, expected) in &identity {
            let found = metadata.str(key)?;
            if found != expected && *key != PRECISION {
                return Err(StateError::Other {
                    what,
                    found: found.to_owned(),
                    expected: expected.clone(),
                });
            }
        }
        if metadata.len() != identity.len() + 3 {
            return Err(damaged("metadata", "keys that are not known"));
        }
        let tensors = gguf.tensors().iter();
        let found = tensors.fold(SEED, |hash, t| checksum(hash, &t.name, gguf.data(t)));
        let expected = metadata.u64(CHECKSUM)?;
        if found != expected {
            return Err(StateError::Checksum { found, expected });
        }
        Ok(())
    }
}

/// Tokens and their kinds.
fn read_tokens(
    gguf: &Gguf,
    n_ctx: usize,
    n_vocab: usize,
) -> Result<(Vec<u32>, Vec<TokenKind>), StateError> {
    let tokens: Vec<u32> = values(gguf, TOKENS, DType::I32)?;
    if tokens.len() > n_ctx {
        return Err(SessionError::ContextFull {
            n_ctx,
            n_past: 0,
            n_new: tokens.len(),
        }
        .into());
    }
    if let Some(&token) = tokens.iter().find(|&&t| t as usize >= n_vocab) {
        return Err(SessionError::TokenOutOfRange { token, n_vocab }.into());
    }
    let kinds: Vec<u8> = values(gguf, KINDS, DType::I8)?;
    if kinds.len() != tokens.len() || kinds.iter().any(|&kind| kind > 1) {
        return Err(damaged(KINDS, "not one of two kinds for each token"));
    }
    let kind = |&kind: &u8| {
        if kind == 1 {
            TokenKind::Generated
        } else {
            TokenKind::Prompt
        }
    };
    Ok((tokens, kinds.iter().map(kind).collect()))
}

/// Keys and values of the first `len` tokens.
fn read_kv(gguf: &Gguf, len: usize) -> Result<KvState<'_>, StateError> {
    let known = [
        TOKENS,
        KINDS,
        COUNTS,
        LOGITS,
        TABLES,
        CHECKPOINTS,
        images::SPANS,
    ];
    let n_pages = gguf
        .tensors()
        .iter()
        .filter(|t| !known.contains(&t.name.as_str()) && !images::is_image(&t.name))
        .count();
    let mut pages = Vec::new();
    for i in 0..n_pages {
        let page = gguf
            .tensor(&page_name(i))
            .ok_or(damaged("pages", "one is missing"))?;
        pages.push(Cow::Borrowed(gguf.data(page)));
    }
    let tables: Vec<u32> = values(gguf, TABLES, DType::I32)?;
    let checkpoints: Vec<u32> = values(gguf, CHECKPOINTS, DType::I32)?;
    Ok(KvState {
        len,
        pages,
        tables: read_tables(&tables).ok_or(damaged(TABLES, "they end inside one"))?,
        checkpoints: read_checkpoints(&checkpoints)
            .ok_or(damaged(CHECKPOINTS, "they end inside one"))?,
    })
}

fn page_name(i: usize) -> String {
    format!("page.{i}")
}

/// Name, type, number of values, and their bytes.
type Tensor<'a> = (String, DType, usize, Cow<'a, [u8]>);

fn tensor<'a, T: Pod>(name: &str, dtype: DType, values: &[T]) -> Tensor<'a> {
    (
        name.into(),
        dtype,
        values.len(),
        Cow::Owned(bytemuck::cast_slice(values).to_vec()),
    )
}

/// All values of a tensor; none if it does not exist.
fn values<T: Pod>(gguf: &Gguf, name: &'static str, dtype: DType) -> Result<Vec<T>, StateError> {
    match gguf.tensor(name) {
        None => Ok(Vec::new()),
        Some(t) if t.dtype == dtype && t.dims.len() == 1 => {
            Ok(bytemuck::pod_collect_to_vec(gguf.data(t)))
        }
        Some(_) => Err(damaged(name, "another type or shape")),
    }
}

fn read_tables(mut rest: &[u32]) -> Option<Vec<Vec<u32>>> {
    let mut tables = Vec::new();
    while let Some((&n, pages)) = rest.split_first() {
        let (table, after) = pages.split_at_checked(n as usize)?;
        tables.push(table.to_vec());
        rest = after;
    }
    Some(tables)
}

fn read_checkpoints(mut rest: &[u32]) -> Option<Vec<KvCheckpoint>> {
    let mut checkpoints = Vec::new();
    while let Some((&[pos, marked, n], pages)) = rest.split_first_chunk::<3>() {
        let (listed, after) = pages.split_at_checked((n as usize).checked_mul(3)?)?;
        let pages = listed.chunks_exact(3).map(|p| [p[0], p[1], p[2]]).collect();
        checkpoints.push(KvCheckpoint {
            pos: pos as usize,
            marked: marked == 1,
            pages,
        });
        rest = after;
    }
    rest.is_empty().then_some(checkpoints)
}

fn damaged(item: &'static str, what: &'static str) -> StateError {
    StateError::Damaged { item, what }
}
