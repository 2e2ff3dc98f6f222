//! Contents of a sequence as numbers and bytes, for files, and back.

use crate::kv::error::KvError;
use crate::kv::layout::Group;
use crate::kv::page::{Checkpoint, Page};
use crate::kv::sequence::{KV_BLOCK, SeqKv, is_given_back};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// Pages of a sequence, each once, with the tables that refer to them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KvState<'a> {
    /// Positions that are filled.
    pub(crate) len: usize,
    pub(crate) pages: Vec<Cow<'a, [u8]>>,
    /// Page numbers, or [`NO_PAGE`], for each table.
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) checkpoints: Vec<KvCheckpoint>,
}

/// A checkpoint with numbers of pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KvCheckpoint {
    pub(crate) pos: usize,
    /// Whether it is the end of a message.
    pub(crate) marked: bool,
    /// Index of the table, index in it, and number of the page.
    pub(crate) pages: Vec<[u32; 3]>,
}

/// Page that has left the window, or does not exist in this tier.
const NO_PAGE: u32 = u32::MAX;

impl SeqKv {
    /// The contents of the sequence.
    ///
    /// # Errors
    /// If a device does not give its part of them.
    pub(crate) fn state<'a>(&'a self) -> Result<KvState<'a>, KvError> {
        let mut numbers = HashMap::new();
        let mut listed: Vec<&'a Arc<Page>> = Vec::new();
        let mut number = |page: &'a Arc<Page>| {
            *numbers.entry(Arc::as_ptr(page)).or_insert_with(|| {
                listed.push(page);
                listed.len() as u32 - 1
            })
        };
        let mut tables = Vec::new();
        for (t, table) in self.tables.iter().enumerate() {
            let filled = table.iter().take(self.pages_of(t));
            tables.push(
                filled
                    .map(|page| page.as_ref().map_or(NO_PAGE, &mut number))
                    .collect(),
            );
        }
        let mut checkpoints = Vec::new();
        let len = self.settled();
        for Checkpoint { pos, marked, pages } in self
            .checkpoints
            .iter()
            .filter(|checkpoint| checkpoint.pos <= len)
        {
            let pages = pages
                .iter()
                .map(|(table, i, page)| [*table as u32, *i as u32, number(page)])
                .collect();
            checkpoints.push(KvCheckpoint {
                pos: *pos,
                marked: *marked,
                pages,
            });
        }
        let pages = listed.into_iter().map(|page| page.contents());
        Ok(KvState {
            len,
            pages: pages.collect::<Result<_, _>>()?,
            tables,
            checkpoints,
        })
    }

    /// Number of pages of a table that can have contents.
    fn pages_of(&self, table: usize) -> usize {
        let len = self.settled();
        if self
            .layout
            .recurrences
            .as_ref()
            .is_some_and(|recurrences| recurrences.table == table)
        {
            return len.min(1);
        }
        let is_first = self.layout.groups.iter().any(|group| group.table == table);
        // Later tiers have whole pages only.
        if is_first {
            len.div_ceil(KV_BLOCK)
        } else {
            len / KV_BLOCK
        }
    }

    /// A sequence with the contents `state`, or the fault in these.
    pub(crate) fn with_state(
        &self,
        state: &KvState<'_>,
    ) -> Result<Result<SeqKv, &'static str>, KvError> {
        let mut seq = SeqKv::new(self.pool.clone(), Arc::clone(&self.layout));
        seq.len = state.len;
        seq.states_from(state.len, None);
        let types: Vec<_> = self.layout.page_types().collect();
        let page_sizes: Vec<_> = self.layout.page_sizes().collect();
        if state.tables.len() != page_sizes.len() {
            return Ok(Err("another number of page tables"));
        }
        let mut made: Vec<Option<Arc<Page>>> = vec![None; state.pages.len()];
        let mut page = |table: usize, number: u32| {
            let (Some(&size), Some(slot)) = (page_sizes.get(table), made.get_mut(number as usize))
            else {
                return Ok(None);
            };
            let bytes = &state.pages[number as usize];
            if bytes.len() != size.bytes {
                return Ok(None);
            }
            if slot.is_none() {
                let mut page = seq.pool.page(size, types[table])?;
                if let Some(page) = Arc::get_mut(&mut page) {
                    page.fill(bytes)?;
                }
                *slot = Some(page);
            }
            Ok::<_, KvError>(slot.clone())
        };
        for (t, listed) in state.tables.iter().enumerate() {
            let mut table = Vec::new();
            for &number in listed {
                if number == NO_PAGE {
                    table.push(None);
                    continue;
                }
                let Some(page) = page(t, number)? else {
                    return Ok(Err("a page that is not there"));
                };
                table.push(Some(page));
            }
            seq.tables[t] = table;
        }
        for KvCheckpoint {
            pos,
            marked,
            pages: listed,
        } in &state.checkpoints
        {
            let mut pages = Vec::new();
            for &[table, i, number] in listed {
                let Some(page) = page(table as usize, number)? else {
                    return Ok(Err("a page that is not there"));
                };
                pages.push((table as usize, i as usize, page));
            }
            seq.checkpoints.push(Checkpoint {
                pos: *pos,
                marked: *marked,
                pages,
            });
        }
        Ok(seq.check().map(|()| seq))
    }

    /// Checks that all pages are present that queries from the end and from checkpoints on read.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        if (0..self.tables.len()).any(|t| self.tables[t].len() > self.pages_of(t)) {
            return Err("more pages than positions");
        }
        let held =
            |table: usize, page: usize| self.tables[table].get(page).is_some_and(Option::is_some);
        if !self.sees(self.len, |_, table, page| held(table, page)) {
            return Err("too few pages");
        }
        if !self.checkpoints.is_sorted_by(|a, b| a.pos < b.pos) {
            return Err("checkpoints out of order");
        }
        for checkpoint in &self.checkpoints {
            if checkpoint.pos == 0 || checkpoint.pos > self.len {
                return Err("a checkpoint behind the end");
            }
            let listed: std::collections::HashSet<_> = checkpoint
                .pages
                .iter()
                .map(|&(t, page, _)| (t, page))
                .collect();
            let is_sound =
                |&(t, page)| page < checkpoint.pos.div_ceil(KV_BLOCK) && t < self.tables.len();
            let has = |given_back: bool, t, page| {
                if given_back {
                    listed.contains(&(t, page))
                } else {
                    held(t, page)
                }
            };
            if !listed.iter().all(is_sound) || !self.sees(checkpoint.pos, has) {
                return Err("a checkpoint with too few pages");
            }
        }
        Ok(())
    }

    /// Whether all pages that the query at `pos` reads are present: `has` is called with whether a
    /// table's pages may be released, the table, and the page.
    fn sees(&self, pos: usize, has: impl Fn(bool, usize, usize) -> bool) -> bool {
        let of_group = |group: &Group| {
            group.seen(pos).all(|page| {
                let form = group.form_of(pos / KV_BLOCK, page);
                (0..=form).any(|form| has(is_given_back(group, form), group.table + form, page))
            })
        };
        let state = |table: usize| pos == 0 || has(true, table, 0);
        let states = self
            .layout
            .recurrences
            .as_ref()
            .is_none_or(|recurrences| state(recurrences.table));
        states && self.layout.groups.iter().all(of_group)
    }
}
