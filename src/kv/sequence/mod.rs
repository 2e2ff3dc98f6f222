//! Keys and values of one sequence of tokens.

mod attention;
mod device;
mod folder;
mod recurrent;
mod state;
#[cfg(test)]
mod tests;

use crate::arch::{Arch, KV_BLOCK, MAX_HEAD_DIM, drop_bits};
use crate::kv::layout::{Group, KvLayout, LayerAt, N_MARKED};
use crate::kv::page::{BlockTable, Checkpoint, DeviceMemory, Page, PageMemory, PageSize};
use crate::kv::pool::KvPool;
use crate::kv::prefix::{CachedToken, Prefix, PrefixKey, Stored};
use crate::kv::{KvBytes, KvError, KvPart, KvPolicy, KvType};
use crate::threads::PoolHandle;
pub use device::{CellPlace, PagePlace, StatePage};
use half::f16;
use recurrent::States;
pub(crate) use state::{KvCheckpoint, KvState};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A sequence: a block table for each precision tier of each group of the layout, and the number of
/// filled positions.
#[derive(Debug)]
pub(crate) struct SeqKv {
    pool: KvPool,
    layout: Arc<KvLayout>,
    tables: Vec<BlockTable>,
    len: usize,
    /// Checkpoints in ascending order of positions.
    checkpoints: Vec<Checkpoint>,
    /// Pinned position: queries from here on may be repeated, so the pages they read are kept.
    held: usize,
    /// Pages that the running forward pass converts from the tier before.
    pending: Vec<Pending>,
    /// State of recurrent layers, in addition to the page in their table.
    states: States,
}

/// A page that the running forward pass converts: its group, tier and number.
#[derive(Clone, Copy, Debug)]
struct Pending {
    group: usize,
    form: usize,
    page: usize,
}

/// Memory of a page that is only counted.
#[derive(Debug)]
struct NoMemory;

impl PageMemory for NoMemory {
    /// Not empty: the pool recognises pages without memory by that.
    fn bytes(&self) -> &[u8] {
        &[0]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut []
    }

    fn address(&self) -> u64 {
        0
    }
}

impl SeqKv {
    /// An empty sequence without pages.
    pub(crate) fn new(pool: KvPool, layout: Arc<KvLayout>) -> SeqKv {
        let tables = layout.page_sizes().map(|_| Vec::new()).collect();
        SeqKv {
            pool,
            layout,
            tables,
            len: 0,
            checkpoints: Vec::new(),
            held: usize::MAX,
            pending: Vec::new(),
            states: States::default(),
        }
    }

    /// Number of filled positions.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Peak bytes of sequences that are each filled with `n` tokens, `n_batch` at a time. Where pages are
    /// released, one and two of them are simulated without memory; very long ones use a bound.
    pub(crate) fn peak_bytes(
        layout: &Arc<KvLayout>,
        n: usize,
        n_batch: usize,
        n_sequences: usize,
    ) -> u64 {
        const MAX: usize = 1 << 18;
        let bound = layout.bytes(n, n_batch).saturating_mul(n_sequences as u64);
        if layout.window().is_none() || n > MAX {
            return bound;
        }
        let pool = KvPool::with_source(u64::MAX, true, |_| {
            Some(DeviceMemory::Shared(Box::new(NoMemory)))
        });
        let (mut filled, mut taken) = (Vec::new(), [0; 2]);
        for taken in taken.iter_mut().take(n_sequences) {
            let mut seq = SeqKv::new(pool.clone(), Arc::clone(layout));
            while seq.len < n {
                let n_new = (n - seq.len).min(n_batch.max(1));
                // There is no budget to exceed.
                if seq.reserve(n_new).is_err() {
                    return bound;
                }
                seq.commit(n_new);
            }
            // The end of the prompt is a checkpoint: a sequence that continues copies its last
            // page.
            let copied = layout
                .groups
                .iter()
                .filter(|group| is_given_back(group, 0))
                .map(|group| &group.forms[0]);
            let copies: Vec<_> = copied
                .map(|form| pool.page(form.page_bytes, form.bytes_by_type()))
                .collect();
            filled.push((seq, copies));
            // The pool keeps some released pages for later use.
            let stats = pool.stats();
            *taken = stats.used + stats.free;
        }
        let [first, two] = taken;
        first.saturating_add(
            two.saturating_sub(first)
                .saturating_mul((n_sequences as u64).saturating_sub(1)),
        )
    }

    /// Empties the sequence and sets another layout.
    pub(crate) fn restart(&mut self, layout: Arc<KvLayout>) {
        *self = SeqKv::new(self.pool.clone(), layout);
    }

    /// Whether a device held keys and values, and is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.layout.is_on_device() && self.pool.is_lost()
    }

    /// Pool of the pages.
    pub(crate) fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// Layout of the pages.
    pub(crate) fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    /// Precision of keys and values.
    pub(crate) fn policy(&self) -> KvPolicy {
        self.layout.policy
    }

    /// Whether centres of keys are not stored.
    pub(crate) fn has_centres(&self) -> bool {
        self.layout.has_centres()
    }

    /// An independent sequence that continues from the same point. Pages are shared until one of
    /// them writes.
    pub(crate) fn fork(&self) -> SeqKv {
        let mut fork = SeqKv {
            pool: self.pool.clone(),
            layout: Arc::clone(&self.layout),
            tables: self.tables.clone(),
            len: self.len,
            checkpoints: self.checkpoints.clone(),
            held: usize::MAX,
            pending: self.pending.clone(),
            states: self.states.fork(),
        };
        fork.cut();
        fork
    }

    /// Starts this sequence, which must be empty, with a prefix of `tokens` from the pool's prefix
    /// cache; returns the number of tokens it then has. With `any`, tokens match whether they were
    /// computed as prompt or as generated ones.
    pub(crate) fn reuse(
        &mut self,
        key: &PrefixKey,
        tokens: &[CachedToken],
        min: usize,
        any: bool,
    ) -> Vec<CachedToken> {
        let found = self.pool.prefix_tree().find(key, tokens, min, any);
        let Some(Prefix {
            tokens,
            mut tables,
            checkpoint,
        }) = found
        else {
            return Vec::new();
        };
        tables.resize(self.tables.len(), Vec::new());
        (self.tables, self.len, self.states) = (tables, tokens.len(), States::default());
        if let Some(checkpoint) = checkpoint {
            self.return_to(&checkpoint);
            self.checkpoints = vec![checkpoint];
        }
        self.cut();
        tokens
    }

    /// Moves the contents, those of `tokens`, to the pool's prefix cache; the sequence is empty
    /// afterwards.
    pub(crate) fn store(&mut self, key: PrefixKey, tokens: Vec<CachedToken>) {
        if self.is_lost() {
            return self.restart(Arc::clone(&self.layout));
        }
        self.cut();
        self.add_checkpoint(self.len, true, None);
        let mut tables: Vec<_> = self.tables.iter_mut().map(std::mem::take).collect();
        for group in &self.layout.groups {
            for form in (0..group.forms.len()).filter(|&form| is_given_back(group, form)) {
                tables[group.table + form].clear();
            }
        }
        if let Some(recurrences) = &self.layout.recurrences {
            tables[recurrences.table].clear();
        }
        let (checkpoints, by_checkpoint) = (
            std::mem::take(&mut self.checkpoints),
            self.layout.has_checkpoints(),
        );
        (self.len, self.states) = (0, States::default());
        self.pool.prefix_tree().insert(
            key,
            Stored {
                tokens,
                tables,
                checkpoints,
                by_checkpoint,
            },
        );
    }

    /// Takes the pages that `n` more positions need, and copies the filled rows of a shared one. If
    /// the pool is full, the oldest checkpoints are dropped.
    pub(crate) fn reserve(&mut self, n: usize) -> Result<(), KvError> {
        self.forget_pending();
        let outcome = self.try_reserve(n);
        if outcome.is_err() {
            self.cut();
        }
        outcome
    }

    fn try_reserve(&mut self, n: usize) -> Result<(), KvError> {
        let layout = Arc::clone(&self.layout);
        for (g, group) in layout.groups.iter().enumerate() {
            for i in self.len / KV_BLOCK..(self.len + n).div_ceil(KV_BLOCK) {
                self.own_page(g, i)?;
            }
            // Tiers that the queries in these pages read.
            let (first, last) = (self.len / KV_BLOCK, (self.len + n.max(1) - 1) / KV_BLOCK);
            for form in 1..group.forms.len() {
                let start = first.saturating_sub(group.forms[form].reach).max(1);
                let end = last.saturating_sub(group.forms[form - 1].reach);
                for page in start..end {
                    let table = &mut self.tables[group.table + form];
                    if table.len() <= page {
                        table.resize(page + 1, None);
                    }
                    if table[page].is_none() {
                        let form_of_page = &group.forms[form];
                        let new =
                            self.new_page(form_of_page.page_size(), form_of_page.bytes_by_type())?;
                        self.tables[group.table + form][page] = Some(new);
                        self.pending.push(Pending {
                            group: g,
                            form,
                            page,
                        });
                    }
                }
            }
        }
        self.reserve_states(n)
    }

    /// A page from the pool; the oldest checkpoints make room for it.
    fn new_page(
        &mut self,
        size: impl Into<PageSize>,
        types: [(KvType, u64); 2],
    ) -> Result<Arc<Page>, KvError> {
        let size = size.into();
        loop {
            match self.pool.page(size, types) {
                Err(KvError::PoolFull { .. }) if !self.checkpoints.is_empty() => {
                    drop(self.checkpoints.remove(0))
                }
                outcome => return outcome,
            }
        }
    }

    /// Releases the pages that a failed pass did not convert.
    fn forget_pending(&mut self) {
        for Pending { group, form, page } in self.pending.drain(..) {
            if let Some(slot) = self.tables[self.layout.groups[group].table + form].get_mut(page) {
                *slot = None;
            }
        }
    }

    /// Makes page `i` of the group's first tier writable.
    fn own_page(&mut self, group: usize, i: usize) -> Result<(), KvError> {
        let table = self.layout.groups[group].table;
        let form = self.layout.groups[group].forms[0];
        let slots = &mut self.tables[table];
        if slots.len() <= i {
            slots.resize(i + 1, None);
        }
        if slots[i]
            .as_mut()
            .is_some_and(|page| Arc::get_mut(page).is_some())
        {
            return Ok(());
        }
        let mut page = self.new_page(form.page_size(), form.bytes_by_type())?;
        let slot = &mut self.tables[table][i];
        let filled = self.len.saturating_sub(i * KV_BLOCK).min(KV_BLOCK);
        if let (Some(from), Some(to)) = (
            slot.as_ref().filter(|_| filled > 0),
            Arc::get_mut(&mut page),
        ) {
            to.copy_on_device(from)?;
            let (from, to) = (from.values::<u8>(), to.values_mut::<u8>());
            let on_host = |l: &&LayerAt| l.group == group && l.at[0][0] < form.on_host;
            for at in self.layout.layers.iter().filter(on_host) {
                for head in 0..at.shape.n_head_kv {
                    for (part, block) in at.head(0, &form, head).into_iter().enumerate() {
                        let mut plane = block.start;
                        for row in form.types[part].row_bytes(at.dims()[part]) {
                            let rows = plane..plane + filled * row;
                            to[rows.clone()].copy_from_slice(&from[rows]);
                            plane += KV_BLOCK * row;
                        }
                    }
                }
            }
        }
        *slot = Some(page);
        Ok(())
    }

    /// Writes keys `(m, n_head_kv·head_dim)` and values of a layer at the positions from `pos` on,
    /// which must be reserved. They become valid when they are [committed](SeqKv::commit).
    pub(crate) fn append(
        &mut self,
        threads: &PoolHandle<'_>,
        arch: Arch,
        layer: usize,
        pos: usize,
        k: &[f32],
        v: &[f32],
    ) -> Result<(), KvError> {
        let layout = Arc::clone(&self.layout);
        let at = layout.layers[layer];
        let group = &layout.groups[at.group];
        let m = k.len() / (at.shape.n_head_kv * at.shape.head_dim);
        let pages = pos / KV_BLOCK..(pos + m).div_ceil(KV_BLOCK);
        let first = pages.start;
        // For keys and for values.
        let overflow = [AtomicBool::new(false), AtomicBool::new(false)];
        threads.for_chunks(&mut self.tables[group.table][pages], 1, |i, slot| {
            let page = slot[0]
                .as_mut()
                .and_then(Arc::get_mut)
                .expect("pages are reserved");
            let start = (first + i) * KV_BLOCK;
            let rows = pos.max(start)..(pos + m).min(start + KV_BLOCK);
            let finite = write_rows(arch, (&layout, layer), page, pos, rows, [k, v]);
            for (overflow, finite) in overflow.iter().zip(finite) {
                overflow.fetch_or(!finite, Ordering::Relaxed);
            }
        });
        match overflow.map(AtomicBool::into_inner) {
            [false, false] => Ok(()),
            [true, _] => Err(KvError::Overflow {
                layer,
                part: KvPart::Key,
            }),
            [false, true] => Err(KvError::Overflow {
                layer,
                part: KvPart::Value,
            }),
        }
    }

    /// Converts a layer's part of older pages to the tiers that the queries of this forward pass
    /// read.
    pub(crate) fn convert(&mut self, threads: &PoolHandle<'_>, arch: Arch, layer: usize) {
        if self.pending.is_empty() {
            return;
        }
        let layout = Arc::clone(&self.layout);
        let at = layout.layers[layer];
        let group = &layout.groups[at.group];
        for Pending { form, page, .. } in self.pending.iter().filter(|p| p.group == at.group) {
            let (form, page) = (*form, *page);
            let Some(mut target) = self.tables[group.table + form][page].take() else {
                continue;
            };
            let before = (0..form)
                .rev()
                .find_map(|f| Some((f, self.tables[group.table + f].get(page)?.as_ref()?)));
            let (from, source) = before.expect("a page has a form till it has the next");
            let source = source.values::<u8>();
            let to = Arc::get_mut(&mut target)
                .expect("a page that nobody has seen")
                .values_mut::<u8>();
            for part in 0..2 {
                let [of_source, of_target] = [from, form].map(|f| (f, &group.forms[f]));
                let (from_kind, to_kind) = (of_source.1.types[part], of_target.1.types[part]);
                let [first, last] = [0, at.shape.n_head_kv - 1].map(|head| {
                    let [k, v] = at.head(form, of_target.1, head);
                    if part == 0 { k } else { v }
                });
                let dim = at.dims()[part];
                threads.for_chunks(&mut to[first.start..last.end], first.len(), |head, to| {
                    let [k, v] = at.head(from, of_source.1, head);
                    let source = &source[if part == 0 { k } else { v }];
                    if from_kind.is_quantized() {
                        return drop_bits((from_kind, source), (to_kind, to), dim);
                    }
                    let mut row = [0.0; MAX_HEAD_DIM];
                    for (i, from) in bytemuck::cast_slice::<u8, f16>(source)
                        .chunks_exact(dim)
                        .enumerate()
                    {
                        arch.f16_to_f32(from, &mut row[..dim]);
                        arch.store_kv(to_kind, to, i, &row[..dim]);
                    }
                });
            }
            self.tables[group.table + form][page] = Some(target);
        }
    }

    /// Commits `n` more positions, appended in all layers. Releases pages that have left windows,
    /// and tiers that no later query reads, except those of a checkpoint at the newest border.
    pub(crate) fn commit(&mut self, n: usize) {
        self.commit_at(n, 0);
    }

    /// [`SeqKv::commit`] with one more checkpoint, where an image ends; 0: with none.
    pub(crate) fn commit_at(&mut self, n: usize, checkpoint: usize) {
        self.pending.clear();
        self.len += n;
        self.commit_states();
        // In their order: an image may end behind the border.
        let ends = [checkpoint, self.len / KV_BLOCK * KV_BLOCK];
        for pos in [ends[0].min(ends[1]), ends[0].max(ends[1])] {
            if self.checkpoints.last().is_none_or(|last| last.pos < pos) {
                self.add_checkpoint(pos, false, None);
            }
        }
        self.leave();
    }

    /// Cleans up after a failed forward pass, for which pages were [reserved](SeqKv::reserve).
    pub(crate) fn abandon(&mut self) {
        self.forget_pending();
        self.abandon_states();
    }

    /// Releases the pages that no position from the end, or from the pinned one, reads.
    fn leave(&mut self) {
        self.forget_pending();
        let pos = self.len.min(self.held);
        for group in &self.layout.groups {
            let tables = &mut self.tables[group.table..][..group.forms.len()];
            if let Some(window) = group.window {
                let table = &mut tables[0];
                let seen = (pos.saturating_sub(window) / KV_BLOCK).min(table.len());
                for slot in table[..seen].iter_mut().rev() {
                    if slot.take().is_none() {
                        break;
                    }
                }
            }
            for form in 0..group.forms.len() - 1 {
                let (tables, later) = tables.split_at_mut(form + 1);
                let read = (pos / KV_BLOCK)
                    .saturating_sub(group.forms[form].reach)
                    .min(tables[form].len());
                for page in (1..read).rev() {
                    let slot = &mut tables[form][page];
                    let next = group.form_of(pos / KV_BLOCK, page) - form - 1;
                    if slot.is_none() {
                        break;
                    }
                    if later[next].get(page).is_some_and(Option::is_some) {
                        *slot = None;
                    }
                }
            }
        }
    }

    /// Pins the pages that positions from `pos` on read, even if windows have left them, until
    /// [`SeqKv::release`].
    pub(crate) fn hold(&mut self, pos: usize) {
        self.held = pos;
    }

    /// Ends [`SeqKv::hold`].
    pub(crate) fn release(&mut self) {
        self.held = usize::MAX;
        self.leave();
    }

    /// Marks this position as the end of a message, to which [`SeqKv::truncate`] can return as long
    /// as it is one of the last few.
    pub(crate) fn checkpoint(&mut self) {
        self.forget_pending();
        self.add_checkpoint(self.len, true, None);
    }

    /// Page number `page` of a group, in the tier in which the query at `pos` reads it or a more
    /// precise one; returns the tier, too.
    fn page_for(&self, group: &Group, pos: usize, page: usize) -> Option<(usize, &Arc<Page>)> {
        let form = group.form_of(pos / KV_BLOCK, page);
        (0..=form)
            .rev()
            .find_map(|form| Some((form, self.tables[group.table + form].get(page)?.as_ref()?)))
    }

    /// Whether all pages that the query at position `pos` reads are present.
    fn sees_all(&self, pos: usize) -> bool {
        let given_back = |group: &&Group| group.window.is_some() || group.is_tiered();
        let mut groups = self.layout.groups.iter().filter(given_back);
        groups.all(|group| {
            group
                .seen(pos)
                .all(|page| self.page_for(group, pos, page).is_some())
        })
    }

    /// Adds a checkpoint at `pos`; `state` is the state of recurrent layers there, if it is not the
    /// one at the end.
    fn add_checkpoint(&mut self, pos: usize, marked: bool, state: Option<Arc<Page>>) {
        if pos == 0 || !self.layout.has_checkpoints() {
            return;
        }
        let recurrences = self
            .layout
            .recurrences
            .as_ref()
            .map(|recurrences| recurrences.table);
        let state = state.or_else(|| self.state_at(pos).cloned());
        if let Some(last) = self.checkpoints.last_mut().filter(|last| last.pos == pos) {
            last.marked |= marked;
        } else if self.sees_all(pos) && recurrences.is_some() == state.is_some() {
            let mut pages: Vec<_> = recurrences
                .zip(state)
                .map(|(table, page)| (table, 0, page))
                .into_iter()
                .collect();
            for group in &self.layout.groups {
                for page in group.seen(pos) {
                    let Some((form, arc)) = self.page_for(group, pos, page) else {
                        continue;
                    };
                    if is_given_back(group, form) {
                        pages.push((group.table + form, page, Arc::clone(arc)));
                    }
                }
            }
            self.checkpoints.push(Checkpoint { pos, marked, pages });
        }
        let mut old = self
            .checkpoints
            .iter()
            .filter(|c| c.marked)
            .count()
            .saturating_sub(N_MARKED);
        for checkpoint in self.checkpoints.iter_mut().filter(|c| c.marked) {
            checkpoint.marked = old == 0;
            old = old.saturating_sub(1);
        }
        let layout = Arc::clone(&self.layout);
        thin(&layout, self.len, &mut self.checkpoints, |checkpoint| {
            (checkpoint.pos, checkpoint.marked)
        });
    }

    /// Drops everything from position `n` on; returns the number of positions left. This is less
    /// than `n` if pages that `n` needs were released: then it is the nearest checkpoint before
    /// it, or 0.
    pub(crate) fn truncate(&mut self, n: usize) -> usize {
        if n >= self.len {
            return self.len;
        }
        self.forget_pending();
        self.len = n;
        self.checkpoints.retain(|checkpoint| checkpoint.pos <= n);
        if !self.return_states(n) || !self.sees_all(n) {
            self.len = self
                .checkpoints
                .last()
                .map_or(0, |checkpoint| checkpoint.pos);
            match self.checkpoints.last().cloned() {
                Some(checkpoint) => self.return_to(&checkpoint),
                None => self.states_from(0, None),
            }
        }
        self.cut();
        self.len
    }

    /// Restores the pages of a checkpoint in the tables whose pages are released in time.
    fn return_to(&mut self, checkpoint: &Checkpoint) {
        for group in &self.layout.groups {
            for form in (0..group.forms.len()).filter(|&form| is_given_back(group, form)) {
                self.tables[group.table + form].fill(None);
            }
        }
        let recurrences = self
            .layout
            .recurrences
            .as_ref()
            .map(|recurrences| recurrences.table);
        for (table, page, arc) in &checkpoint.pages {
            if Some(*table) == recurrences {
                self.states_from(checkpoint.pos, Some(Arc::clone(arc)));
                continue;
            }
            let table = &mut self.tables[*table];
            table.resize(table.len().max(page + 1), None);
            table[*page] = Some(Arc::clone(arc));
        }
    }

    /// Releases the pages after the filled positions; later tiers have whole pages only.
    fn cut(&mut self) {
        self.forget_pending();
        for group in &self.layout.groups {
            let tables = &mut self.tables[group.table..][..group.forms.len()];
            tables[0].truncate(self.len.div_ceil(KV_BLOCK));
            tables[1..]
                .iter_mut()
                .for_each(|table| table.truncate(self.len / KV_BLOCK));
        }
    }

    /// Drops the pages `gone` and moves the following ones to their places: `turn` rotates a key of
    /// a layer to its new position, where it is rounded as when it was stored. Not for layouts that
    /// release pages or transform keys.
    ///
    /// # Errors
    /// If there is no memory for copies of shared pages; nothing has changed then. If a key no
    /// longer fits its precision: then everything from the first page of `gone` on is invalid.
    pub(crate) fn shift(
        &mut self,
        threads: &PoolHandle<'_>,
        arch: Arch,
        gone: Range<usize>,
        turn: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Result<(), KvError> {
        self.forget_pending();
        let (layout, len) = (Arc::clone(&self.layout), self.len);
        let moved = gone.end..len.div_ceil(KV_BLOCK);
        for group in 0..layout.groups.len() {
            moved
                .clone()
                .try_for_each(|page| self.own_page(group, page))?;
        }
        let overflow = AtomicUsize::new(usize::MAX);
        for (g, group) in layout.groups.iter().enumerate() {
            let form = &group.forms[0];
            threads.for_chunks(
                &mut self.tables[group.table][moved.clone()],
                1,
                |i, slot| {
                    let bytes = slot[0]
                        .as_mut()
                        .and_then(Arc::get_mut)
                        .expect("pages are owned")
                        .values_mut::<u8>();
                    let n_rows = (len - (moved.start + i) * KV_BLOCK).min(KV_BLOCK);
                    for (layer, at) in layout
                        .layers
                        .iter()
                        .enumerate()
                        .filter(|(_, at)| at.group == g)
                    {
                        let dim = at.shape.head_dim;
                        let mut keys = vec![0.0; n_rows * dim];
                        for head in 0..at.shape.n_head_kv {
                            let [block, _] = at.head(0, form, head);
                            arch.load_kv(form.types[0], &bytes[block.clone()], dim, &mut keys);
                            for (row, key) in keys.chunks_exact_mut(dim).enumerate() {
                                turn(layer, key);
                                if !arch.store_kv(
                                    form.types[0],
                                    &mut bytes[block.clone()],
                                    row,
                                    key,
                                ) {
                                    overflow.fetch_min(layer, Ordering::Relaxed);
                                }
                            }
                        }
                    }
                },
            );
            self.tables[group.table].drain(gone.clone());
        }
        self.len -= gone.len() * KV_BLOCK;
        match overflow.into_inner() {
            usize::MAX => Ok(()),
            layer => Err(KvError::Overflow {
                layer,
                part: KvPart::Key,
            }),
        }
    }

    /// The first keys and values of KV head `head`, as many as fit into `k` and `v`; zeros where a
    /// window has left them.
    pub(crate) fn read(
        &self,
        arch: Arch,
        (layer, head): (usize, usize),
        k: &mut [f32],
        v: &mut [f32],
    ) {
        let at = self.layout.layers[layer];
        let group = &self.layout.groups[at.group];
        let [d, d_v] = at.dims();
        let rows = k.chunks_mut(KV_BLOCK * d).zip(v.chunks_mut(KV_BLOCK * d_v));
        for (page_index, (k, v)) in rows.enumerate() {
            let Some((form, page)) = self.page_for(group, self.len, page_index) else {
                k.fill(0.0);
                v.fill(0.0);
                continue;
            };
            let of_form = &group.forms[form];
            let contents = page.contents().unwrap_or_default();
            if contents.is_empty() {
                k.fill(0.0);
                v.fill(0.0);
                continue;
            }
            let blocks = at.head(form, of_form, head).map(|block| &contents[block]);
            for (part, rows) in [k, v].into_iter().enumerate() {
                let dim = at.dims()[part];
                arch.load_kv(of_form.types[part], blocks[part], dim, rows);
                let centre = self.layout.centre(layer, head, page_index * KV_BLOCK);
                if let Some(centre) = centre.filter(|_| part == 0) {
                    let all = rows.chunks_exact_mut(dim);
                    all.for_each(|row| row.iter_mut().zip(centre).for_each(|(k, c)| *k += c));
                }
                if group.transformed[part] {
                    rows.chunks_exact_mut(dim)
                        .for_each(|row| arch.hadamard(row));
                }
            }
        }
    }

    /// Bytes of the pages, by precision; shared pages count in full.
    pub(crate) fn memory(&self) -> KvBytes {
        let of_tables = self.tables.iter().flatten().flatten();
        let of_checkpoints = self.checkpoints.iter().flat_map(Checkpoint::pages);
        let mut seen = HashSet::new();
        let mut bytes = KvBytes::default();
        for page in of_tables
            .chain(of_checkpoints)
            .chain(self.states.pages())
            .filter(|page| seen.insert(Arc::as_ptr(page)))
        {
            page.types()
                .into_iter()
                .for_each(|(kind, n)| bytes.add(kind, n));
        }
        bytes
    }
}

/// Thins out `checkpoints` (position, marked) of a sequence of `len` positions: drops those whose
/// neighbours are near each other, so that distances grow with the distance from the end. Kept are
/// the page boundary within the last page, where a sequence with the same tokens but the last
/// continues, and the checkpoint before a marked one.
fn thin<T>(
    layout: &KvLayout,
    len: usize,
    checkpoints: &mut Vec<T>,
    place: impl Fn(&T) -> (usize, bool),
) {
    let mut i = 0;
    while i + 1 < checkpoints.len() {
        let before = i
            .checked_sub(1)
            .map_or(0, |before| place(&checkpoints[before]).0);
        let ((pos, marked), (after, is_before_marked)) =
            (place(&checkpoints[i]), place(&checkpoints[i + 1]));
        let recent = len - pos < KV_BLOCK;
        let is_border = is_before_marked && after - pos <= KV_BLOCK;
        if layout.is_near(after - before, len - after) && !recent && !marked && !is_border {
            checkpoints.remove(i);
        } else {
            i += 1;
        }
    }
}

/// Whether pages of the tier are released.
fn is_given_back(group: &Group, form: usize) -> bool {
    group.window.is_some() || form + 1 < group.forms.len()
}

/// Writes the rows of the positions `rows`, all in `page`; `from` begins at position `pos`. Returns
/// whether all finite keys, and all finite values, are still finite.
fn write_rows(
    arch: Arch,
    (layout, layer): (&KvLayout, usize),
    page: &mut Page,
    pos: usize,
    rows: Range<usize>,
    from: [&[f32]; 2],
) -> [bool; 2] {
    let at = layout.layers[layer];
    let group = &layout.groups[at.group];
    let (form, bytes) = (&group.forms[0], page.values_mut::<u8>());
    let mut stored = [true; 2];
    let mut buffer = [0.0; MAX_HEAD_DIM];
    for head in 0..at.shape.n_head_kv {
        let centre = layout.centre(layer, head, rows.start);
        for (part, block) in at.head(0, form, head).into_iter().enumerate() {
            let centre = centre.filter(|_| part == 0).unwrap_or_default();
            let (dim, block) = (at.dims()[part], &mut bytes[block]);
            if dim == 0 {
                continue;
            }
            let rows_of_all = from[part]
                .chunks_exact(at.shape.n_head_kv * dim)
                .skip(rows.start - pos);
            for (i, row) in (rows.start % KV_BLOCK..).zip(rows_of_all.take(rows.len())) {
                let mut row = &row[head * dim..][..dim];
                if group.transformed[part] {
                    buffer[..dim].copy_from_slice(row);
                    arch.hadamard(&mut buffer[..dim]);
                    buffer.iter_mut().zip(centre).for_each(|(k, c)| *k -= c);
                    row = &buffer[..dim];
                }
                stored[part] &= arch.store_kv(form.types[part], block, i, row);
            }
        }
    }
    stored
}
