//! The state of recurrent layers.
//!
//! Every token changes it, so a sequence keeps few: the one at its end, those of checkpoints, and a
//! *base*, from which on the inputs of the recurrences (`feeds`) are kept, too. A rewind to a
//! position after the base replays these inputs, without any matrix product; a rewind to before it
//! starts from a checkpoint, and the next forward pass recomputes the tokens after that.
//!
//! A forward pass begins at the state in the table, replays the inputs up to the end of the
//! sequence, and continues with its own tokens. It writes the state at its end to a page of its
//! own, and copies where checkpoints are due.

use crate::kv::error::KvError;
use crate::kv::layout::N_FEEDS;
use crate::kv::page::{Page, PageSize};
use crate::kv::sequence::{KV_BLOCK, KvType, SeqKv, StatePage, thin};
use crate::threads::PoolHandle;
use std::ops::Range;
use std::sync::Arc;

/// Values of a state that one task copies.
const COPIED: usize = 16 << 10;

/// Advances a state by some tokens, given their inputs and their rows in the forward pass (no rows
/// if they are replayed).
pub(crate) type Steps<'a> = dyn FnMut(&mut [f32], &[f32], Option<Range<usize>>) + 'a;

/// Recurrent state of a sequence, in addition to the page in its table. At position 0 the state is
/// zeros and has no page.
#[derive(Debug, Default)]
pub(super) struct States {
    /// Position of the state in the table: the end of the sequence, or before it if inputs are to
    /// be replayed.
    pos: usize,
    /// State at the position from which on all inputs are kept.
    base: Option<(usize, Option<Arc<Page>>)>,
    /// Inputs of the last tokens, `(N_FEEDS, n_feed)` for each recurrence; row `i` has those of the
    /// position `p` with `p % N_FEEDS == i`.
    feeds: Option<Arc<Page>>,
    /// Output of the running forward pass: its final state, and those for checkpoints.
    next: Option<Arc<Page>>,
    copies: Vec<(usize, Arc<Page>)>,
}

impl States {
    /// Copy for a fork.
    pub(super) fn fork(&self) -> States {
        let States {
            pos, base, feeds, ..
        } = self;
        States {
            pos: *pos,
            base: base.clone(),
            feeds: feeds.clone(),
            next: None,
            copies: Vec::new(),
        }
    }

    pub(super) fn pages(&self) -> impl Iterator<Item = &Arc<Page>> {
        let base = self.base.iter().filter_map(|(_, page)| page.as_ref());
        base.chain(&self.feeds)
            .chain(&self.next)
            .chain(self.copies.iter().map(|(_, page)| page))
    }
}

impl SeqKv {
    /// The state in the table, if it is that at position `pos`.
    pub(super) fn state_at(&self, pos: usize) -> Option<&Arc<Page>> {
        let table = self.layout.recurrences.as_ref()?.table;
        self.tables[table]
            .first()?
            .as_ref()
            .filter(|_| pos == self.states.pos)
    }

    /// Positions that are filled and need no replay.
    pub(super) fn settled(&self) -> usize {
        if self.layout.recurrences.is_some() {
            self.states.pos
        } else {
            self.len
        }
    }

    /// Sets the state `page` of position `pos`.
    pub(super) fn states_from(&mut self, pos: usize, page: Option<Arc<Page>>) {
        let Some(recurrences) = &self.layout.recurrences else {
            return;
        };
        self.tables[recurrences.table].clear();
        self.tables[recurrences.table].extend(page.map(Some));
        self.states.pos = pos;
        self.states.base = self.states.base.take().filter(|(base, _)| *base <= pos);
    }

    /// Rewinds to position `n`, before the end; returns whether that is possible.
    pub(super) fn return_states(&mut self, n: usize) -> bool {
        let Some(recurrences) = &self.layout.recurrences else {
            return true;
        };
        let table = recurrences.table;
        let checkpoint = self
            .checkpoints
            .iter()
            .find(|checkpoint| checkpoint.pos == n);
        let page =
            checkpoint.and_then(|checkpoint| checkpoint.pages.iter().find(|(t, ..)| *t == table));
        match (
            page.map(|(.., page)| Arc::clone(page)),
            self.states.base.clone(),
        ) {
            _ if self.states.pos == n => {
                self.states.base = self.states.base.take().filter(|(base, _)| *base <= n)
            }
            _ if n == 0 => self.states_from(0, None),
            (Some(page), _) => self.states_from(n, Some(page)),
            (None, Some((base, page))) if base <= n => self.states_from(base, page),
            _ => return false,
        }
        true
    }

    /// Reserves the pages that a forward pass over `n` tokens writes states to.
    pub(super) fn reserve_states(&mut self, n: usize) -> Result<(), KvError> {
        let layout = Arc::clone(&self.layout);
        let Some(recurrences) = &layout.recurrences else {
            return Ok(());
        };
        let [state_size, feed_size] = recurrences.sizes();
        let types = |size: PageSize| [(KvType::F32, size.bytes as u64), (KvType::F32, 0)];
        let (begin, end) = (self.states.pos, self.len + n);
        self.states.copies.clear();
        // The page of the base is reused if it is not shared.
        let base = self.states.base.take().and_then(|(_, page)| page);
        let spare = self.states.next.take().or(base);
        self.states.next = match spare.map(|mut page| (Arc::get_mut(&mut page).is_some(), page)) {
            Some((true, page)) => Some(page),
            _ => Some(self.new_page(state_size, types(state_size))?),
        };
        if self
            .states
            .feeds
            .as_mut()
            .is_none_or(|page| Arc::get_mut(page).is_none())
        {
            let mut page = self.new_page(feed_size, types(feed_size))?;
            if let (Some(from), Some(to)) = (&self.states.feeds, Arc::get_mut(&mut page))
                && begin < self.len
            {
                to.copy_on_device(from)?;
                to.values_mut::<u8>().copy_from_slice(from.values());
            }
            self.states.feeds = Some(page);
        }
        if end > begin + 1 {
            // Page boundaries that become checkpoints, and the next base. If there is no room,
            // there are fewer.
            let mut places: Vec<_> = self.checkpoints.iter().map(|c| (c.pos, c.marked)).collect();
            let borders = (self.len / KV_BLOCK + 1..=end / KV_BLOCK).map(|page| page * KV_BLOCK);
            places.extend(borders.map(|pos| (pos, false)));
            thin(&layout, end, &mut places, |place| *place);
            let mut stops: Vec<usize> = places.into_iter().map(|(pos, _)| pos).collect();
            stops.retain(|&pos| pos > self.len && pos < end);
            let base = end.saturating_sub(N_FEEDS);
            if base > begin && !stops.contains(&base) {
                stops.push(base);
                stops.sort_unstable();
            }
            for pos in stops {
                let Ok(page) = self.new_page(state_size, types(state_size)) else {
                    break;
                };
                self.states.copies.push((pos, page));
            }
        }
        Ok(())
    }

    /// Advances recurrence `cell` by the tokens of the running forward pass; `feeds`, their inputs,
    /// are `(n, n_feed)`.
    pub(crate) fn recur(
        &mut self,
        threads: &PoolHandle<'_>,
        cell: usize,
        feeds: &[f32],
        run: &mut Steps<'_>,
    ) {
        let recurrences = self
            .layout
            .recurrences
            .as_ref()
            .expect("a layout with recurrences");
        let (at, feeds_at) = (&recurrences.states[cell], &recurrences.feeds[cell]);
        let n_feed = feeds_at.len() / N_FEEDS;
        let n = feeds.len() / n_feed;
        let States {
            pos: begin,
            feeds: kept,
            next,
            copies,
            ..
        } = &mut self.states;
        let stops: Vec<usize> = copies
            .iter()
            .map(|(pos, _)| *pos)
            .filter(|&pos| pos > self.len)
            .collect();
        let next = next
            .as_mut()
            .and_then(Arc::get_mut)
            .expect("pages are reserved");
        let kept = &mut kept
            .as_mut()
            .and_then(Arc::get_mut)
            .expect("pages are reserved")
            .values_mut::<f32>()[feeds_at.clone()];
        let state = &mut next.values_mut::<f32>()[at.clone()];
        match self.tables[recurrences.table]
            .first()
            .and_then(Option::as_ref)
        {
            Some(page) => {
                let from = &page.values::<f32>()[at.clone()];
                let copy =
                    |i: usize, to: &mut [f32]| to.copy_from_slice(&from[i * COPIED..][..to.len()]);
                threads
                    .when(from.len() > COPIED)
                    .for_chunks(state, COPIED, copy);
            }
            None => state.fill(0.0),
        }
        let mut copy = |pos: usize, state: &[f32]| {
            for (_, page) in copies.iter_mut().filter(|(stop, _)| *stop == pos) {
                let page = Arc::get_mut(page).expect("pages are reserved");
                page.values_mut::<f32>()[at.clone()].copy_from_slice(state);
            }
        };
        for pos in *begin..self.len {
            run(state, &kept[pos % N_FEEDS * n_feed..][..n_feed], None);
            copy(pos + 1, state);
        }
        let mut row = 0;
        for stop in stops.into_iter().map(|pos| pos - self.len).chain([n]) {
            run(state, &feeds[row * n_feed..stop * n_feed], Some(row..stop));
            row = stop;
            copy(self.len + row, state);
        }
        for (row, feed) in feeds
            .chunks_exact(n_feed)
            .enumerate()
            .skip(n.saturating_sub(N_FEEDS))
        {
            kept[(self.len + row) % N_FEEDS * n_feed..][..n_feed].copy_from_slice(feed);
        }
    }

    /// Pages of the running forward pass over `n` tokens, for a device: the state that it begins with;
    /// the inputs, with the position of its first token; the pages that states are written to, by
    /// their positions, the last of which is its end. None without recurrences.
    pub(crate) fn state_pages(&self, n: usize) -> impl Iterator<Item = StatePage> {
        let States {
            pos,
            feeds,
            next,
            copies,
            ..
        } = &self.states;
        let at = |pos: usize, page: Option<&Arc<Page>>| StatePage {
            pos,
            address: page.map_or(0, |page| page.address()),
        };
        let copies = copies.iter().map(move |(pos, page)| at(*pos, Some(page)));
        let pages = [at(*pos, self.state_at(*pos)), at(self.len, feeds.as_ref())]
            .into_iter()
            .chain(copies)
            .chain([at(self.len + n, next.as_ref())]);
        let recurrences = self.layout.recurrences.iter();
        recurrences.flat_map(move |_| pages.clone())
    }

    /// Commits the state at the end of the forward pass.
    pub(super) fn commit_states(&mut self) {
        let Some(recurrences) = &self.layout.recurrences else {
            return;
        };
        let (table, end) = (recurrences.table, self.len);
        let before = self.tables[table].pop().flatten();
        let begin = std::mem::replace(&mut self.states.pos, end);
        let copies = std::mem::take(&mut self.states.copies);
        self.states.base = match end.saturating_sub(N_FEEDS) {
            base if base <= begin => Some((begin, before)),
            base => copies
                .iter()
                .find(|(pos, _)| *pos == base)
                .map(|(pos, page)| (*pos, Some(Arc::clone(page)))),
        };
        self.tables[table].clear();
        self.tables[table].push(self.states.next.take());
        for (pos, page) in copies
            .into_iter()
            .filter(|(pos, _)| pos.is_multiple_of(KV_BLOCK))
        {
            if self.checkpoints.last().is_none_or(|last| last.pos < pos) {
                self.add_checkpoint(pos, false, Some(page));
            }
        }
    }

    /// Cleans up after a failed forward pass: its states are invalid, and inputs to replay may be
    /// overwritten.
    pub(super) fn abandon_states(&mut self) {
        self.states.copies.clear();
        if self.layout.recurrences.is_some() && self.states.pos < self.len {
            self.states.base = None;
            self.truncate(self.states.pos);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::kv::sequence::recurrent::*;
    use crate::kv::{CellShape, KvLayout, KvPool, KvUse, LayerShape};

    const CELLS: [CellShape; 2] = [
        CellShape {
            n_state: 3,
            n_feed: 2,
        },
        CellShape {
            n_state: 40,
            n_feed: 1,
        },
    ];

    /// Numbers that look random, the same in every run.
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((self.0 >> 33) as usize) % n
        }
    }

    /// A recurrence in which the order of tokens matters.
    fn step(state: &mut [f32], feed: &[f32]) {
        for (i, s) in state.iter_mut().enumerate() {
            *s = 0.75 * *s + feed[i % feed.len()] * (i + 1) as f32;
        }
    }

    /// A sequence beside what fed each of its recurrences, token by token.
    struct Pair {
        seq: SeqKv,
        feeds: [Vec<f32>; 2],
    }

    impl Pair {
        fn new(pool: &KvPool) -> Pair {
            let shape = LayerShape {
                window: None,
                n_head_kv: 1,
                head_dim: 8,
                head_dim_v: 8,
                use_of: KvUse::Attention,
            };
            let layout = KvLayout::new(KvType::F16.into(), [shape]).with_recurrences(CELLS);
            Pair {
                seq: SeqKv::new(pool.clone(), Arc::new(layout)),
                feeds: Default::default(),
            }
        }

        fn fork(&self) -> Pair {
            Pair {
                seq: self.seq.fork(),
                feeds: self.feeds.clone(),
            }
        }

        /// A pass, which may fail in its second recurrence.
        fn append(&mut self, n: usize, fails: bool, random: &mut Random) -> Result<(), KvError> {
            self.seq.reserve(n)?;
            for (i, cell) in CELLS
                .into_iter()
                .enumerate()
                .take(if fails { 1 } else { 2 })
            {
                let feeds: Vec<f32> = (0..n * cell.n_feed)
                    .map(|_| random.below(100) as f32)
                    .collect();
                let mut rows_seen = 0;
                self.seq.recur(
                    &PoolHandle::alone(),
                    i,
                    &feeds,
                    &mut |state, feeds, rows| {
                        feeds
                            .chunks_exact(cell.n_feed)
                            .for_each(|feed| step(state, feed));
                        if let Some(rows) = rows {
                            assert_eq!(
                                (rows.start, rows.len() * cell.n_feed),
                                (rows_seen, feeds.len())
                            );
                            rows_seen = rows.end;
                        }
                    },
                );
                assert_eq!(rows_seen, n);
                if !fails {
                    self.feeds[i].extend(feeds);
                }
            }
            if fails {
                self.seq.abandon();
                self.cut(self.seq.len());
            } else {
                self.seq.commit(n);
            }
            Ok(())
        }

        fn cut(&mut self, len: usize) {
            for (feeds, cell) in self.feeds.iter_mut().zip(CELLS) {
                feeds.truncate(len * cell.n_feed);
            }
        }

        /// Returns how many positions are left.
        fn truncate(&mut self, n: usize) -> usize {
            let len = self.seq.truncate(n);
            assert!(len <= n && len == self.seq.len());
            self.cut(len);
            len
        }

        /// The state after the first `n` tokens.
        fn expected(&self, n: usize) -> Vec<f32> {
            let of_cell = |(feeds, cell): (&Vec<f32>, CellShape)| {
                let mut state = vec![0.0; cell.n_state];
                feeds
                    .chunks_exact(cell.n_feed)
                    .take(n)
                    .for_each(|feed| step(&mut state, feed));
                state
            };
            self.feeds.iter().zip(CELLS).flat_map(of_cell).collect()
        }

        /// The state in the table and those of checkpoints are what they must be.
        fn check(&self) {
            let pos = self.seq.settled();
            assert!(pos <= self.seq.len());
            let table = self.seq.layout.recurrences.as_ref().unwrap().table;
            let page = self.seq.tables[table].first().cloned().flatten();
            let of_checkpoints = self.seq.checkpoints.iter().map(|checkpoint| {
                let page = checkpoint.pages.iter().find(|(t, ..)| *t == table);
                (checkpoint.pos, page.map(|(.., page)| Arc::clone(page)))
            });
            for (pos, page) in of_checkpoints.chain([(pos, page)]) {
                let found = page.map(|page| page.values::<f32>()[..43].to_vec());
                assert_eq!(
                    found.unwrap_or(vec![0.0; 43]),
                    self.expected(pos),
                    "{pos} of {}",
                    self.seq.len()
                );
            }
        }
    }

    #[test]
    fn random_operations_against_plain_states() {
        let (pool, mut random) = (KvPool::new(60 << 10), Random(5));
        let (mut full, mut replayed, mut restored) = (0, 0, 0);
        let mut pairs = vec![Pair::new(&pool)];
        for _ in 0..3000 {
            let i = random.below(pairs.len());
            let len = pairs[i].seq.len();
            match random.below(14) {
                0..6 if len < 1500 => {
                    let n = [1, 1, 3, 40, 64, 65, 150, 300][random.below(8)];
                    match pairs[i].append(n, random.below(12) == 0, &mut random) {
                        Err(KvError::PoolFull { .. }) => {
                            full += 1;
                            pairs[i].seq.abandon();
                            let len = pairs[i].seq.len();
                            pairs[i].cut(len);
                        }
                        outcome => outcome.unwrap(),
                    }
                }
                6 if pairs.len() < 5 => {
                    let fork = pairs[i].fork();
                    pairs.push(fork);
                }
                7 => {
                    let n = random.below(len + 1);
                    let left = pairs[i].truncate(n);
                    restored += usize::from(0 < left && left < n);
                }
                8..11 if len > 0 => {
                    let n = len - random.below(len.min(70));
                    pairs[i].truncate(n);
                    replayed += usize::from(pairs[i].seq.settled() < pairs[i].seq.len());
                }
                11 => pairs[i].seq.checkpoint(),
                12 => {
                    let state = pairs[i].seq.state().unwrap();
                    let Ok(loaded) = pairs[i].seq.with_state(&state) else {
                        continue;
                    };
                    let len = loaded.as_ref().unwrap().len();
                    pairs[i].seq = loaded.unwrap();
                    pairs[i].cut(len);
                }
                _ if pairs.len() > 2 => drop(pairs.swap_remove(i)),
                _ => pairs.push(Pair::new(&pool)),
            }
            pairs.iter().for_each(Pair::check);
        }
        eprintln!(
            "the pool was full {full} times, {replayed} replays, {restored} checkpoints were restored"
        );
        assert!(full > 0 && replayed > 0 && restored > 0);
        drop(pairs);
        assert_eq!((pool.stats().used, pool.stats().n_pages), (0, 0));
    }

    /// Inside the last pass, up to 64 tokens back, nothing; farther back, as many tokens as the
    /// distance, or 64.
    #[test]
    fn a_rewind_loses_little() {
        let (pool, mut random) = (KvPool::default(), Random(7));
        let mut pair = Pair::new(&pool);
        for n in [1, 512, 512, 30, 1, 1, 700, 100, 64, 1, 1, 1000, 20, 1] {
            let begin = pair.seq.len();
            pair.append(n, false, &mut random).unwrap();
            let end = pair.seq.len();
            for back in 0..=end {
                let mut fork = pair.fork();
                let lost = end - back - fork.truncate(end - back);
                let inside = back <= n.min(64) && end - back >= begin;
                assert!(
                    lost <= if inside { 0 } else { back.max(64) },
                    "{lost} lost from {} of {end}",
                    end - back
                );
            }
            assert!(
                pair.seq.checkpoints.len() <= 20,
                "{}",
                pair.seq.checkpoints.len()
            );
        }
        let bytes = pool.stats().used;
        assert!(
            bytes <= pair.seq.layout.bytes(pair.seq.len(), 1000),
            "{bytes}"
        );
    }

    #[test]
    fn states_that_lack_a_page_are_refused() {
        let (pool, mut random) = (KvPool::default(), Random(9));
        let mut pair = Pair::new(&pool);
        pair.append(100, false, &mut random).unwrap();
        let sound = pair.seq.state().unwrap();
        assert!(pair.seq.with_state(&sound).unwrap().is_ok());
        let mut state = sound.clone();
        state.tables[1].clear();
        assert_eq!(
            pair.seq.with_state(&state).unwrap().unwrap_err(),
            "too few pages"
        );
        let mut state = sound.clone();
        state.tables[1] = vec![state.tables[0][0]];
        assert_eq!(
            pair.seq.with_state(&state).unwrap().unwrap_err(),
            "a page that is not there"
        );
        let mut state = sound.clone();
        state.tables.pop();
        assert_eq!(
            pair.seq.with_state(&state).unwrap().unwrap_err(),
            "another number of page tables"
        );
        let mut state = sound.clone();
        assert_eq!(state.checkpoints[0].pos, 64);
        state.checkpoints[0].pages.clear();
        assert_eq!(
            pair.seq.with_state(&state).unwrap().unwrap_err(),
            "a checkpoint with too few pages"
        );
        let mut state = sound.clone();
        let page = state.tables[1][0];
        state.tables[1].push(page);
        assert_eq!(
            pair.seq.with_state(&state).unwrap().unwrap_err(),
            "more pages than positions"
        );
    }
}
