//! Loading and storing a sequence in the prefix cache's folder.

use crate::kv::CachedToken;
use crate::kv::folder::{Keys, PrefixFolder};
use crate::kv::page::{Checkpoint, Page};
use crate::kv::sequence::{KV_BLOCK, SeqKv};
use std::borrow::Cow;
use std::sync::Arc;

/// A page with the index of its table and its number, as in checkpoints.
type Placed = (usize, usize, Arc<Page>);

impl SeqKv {
    /// Whether the pool has a folder.
    pub(crate) fn uses_folder(&self) -> bool {
        self.pool.folder().is_some()
    }

    /// Extends the sequence, a prefix of `tokens`, with blocks of the pool's folder. Returns the
    /// number of positions it then has. `identity` describes everything else that bits depend on.
    pub(crate) fn load_files(&mut self, identity: &str, tokens: &[CachedToken]) -> usize {
        let (pool, before) = (self.pool.clone(), self.len);
        let Some(folder) = pool.folder() else {
            return before;
        };
        let blocks = Keys::new(identity, tokens);
        if self.layout.has_checkpoints() {
            let identity = of_checkpoints(identity);
            let checkpoints = Keys::new(&identity, tokens);
            let mut ends = (before + 1..=tokens.len()).rev();
            if let Some(found) =
                ends.find_map(|end| self.load_checkpoint(folder, &checkpoints, &blocks, end))
            {
                *self = found;
            }
        } else {
            for page in before / KV_BLOCK..tokens.len() / KV_BLOCK {
                if !self.load_block(folder, &blocks, page) {
                    break;
                }
                self.len = (page + 1) * KV_BLOCK;
            }
        }
        folder.add_loaded(self.len - before);
        self.len
    }

    /// A sequence that continues from the checkpoint of position `end`, if the folder has it and
    /// all blocks that it needs.
    fn load_checkpoint(
        &self,
        folder: &PrefixFolder,
        checkpoints: &Keys<'_>,
        blocks: &Keys<'_>,
        end: usize,
    ) -> Option<SeqKv> {
        let pages = self.load_pages(folder, checkpoints, end)?;
        let mut seq = SeqKv::new(self.pool.clone(), Arc::clone(&self.layout));
        let kept: Vec<usize> = self.layout.kept().map(|group| group.kept_table()).collect();
        for page in 0..end / KV_BLOCK {
            // Ages: pages near the end, and the first one, are only in the checkpoint.
            let is_listed = self.layout.kept().all(|group| {
                let tables = group.table..group.table + group.forms.len();
                pages
                    .iter()
                    .any(|(table, i, _)| *i == page && tables.contains(table))
            });
            if !is_listed && !seq.load_block(folder, blocks, page) {
                return None;
            }
        }
        let (last, pages) = pages
            .into_iter()
            .partition(|(table, ..)| kept.contains(table));
        let checkpoint = Checkpoint {
            pos: end,
            marked: true,
            pages,
        };
        seq.place(last);
        seq.len = end;
        seq.return_to(&checkpoint);
        seq.checkpoints = vec![checkpoint];
        seq.cut();
        seq.check().is_ok().then_some(seq)
    }

    /// Loads page number `page` of all groups that keep their pages; returns whether the folder has
    /// it.
    fn load_block(&mut self, folder: &PrefixFolder, blocks: &Keys<'_>, page: usize) -> bool {
        let kept: Vec<_> = self
            .layout
            .kept()
            .map(|group| (group.kept_table(), page))
            .collect();
        if kept.is_empty() {
            return true;
        }
        let Some(pages) = self.load_pages(folder, blocks, (page + 1) * KV_BLOCK) else {
            return false;
        };
        let is_whole = pages
            .iter()
            .map(|(table, page, _)| (*table, *page))
            .eq(kept);
        if is_whole {
            self.place(pages);
        }
        is_whole
    }

    /// The pages of a file; `None` if it is missing or damaged, or the pool is full.
    fn load_pages(
        &self,
        folder: &PrefixFolder,
        keys: &Keys<'_>,
        end: usize,
    ) -> Option<Vec<Placed>> {
        let page_sizes: Vec<_> = self.layout.page_sizes().collect();
        let page_bytes: Vec<_> = page_sizes.iter().map(|size| size.bytes).collect();
        let found = folder.find(keys, end, &page_bytes)?;
        let types: Vec<_> = self.layout.page_types().collect();
        let mut pages: Vec<Placed> = Vec::new();
        for [table, i] in found.places.iter().map(|place| place.map(|n| n as usize)) {
            pages.push((
                table,
                i,
                self.pool.page(page_sizes[table], types[table]).ok()?,
            ));
        }
        if self.layout.is_on_device() {
            let mut contents = Vec::with_capacity(pages.len());
            for (table, ..) in &pages {
                contents.push(bytemuck::allocation::try_zeroed_vec(page_bytes[*table]).ok()?);
            }
            let mut parts: Vec<&mut [u8]> = contents.iter_mut().map(Vec::as_mut_slice).collect();
            let is_intact = folder.read(found, &mut parts);
            for ((.., page), bytes) in pages.iter_mut().zip(&contents).filter(|_| is_intact) {
                Arc::get_mut(page)?.fill(bytes).ok()?;
            }
            return is_intact.then_some(pages);
        }
        let pages_mut = pages.iter_mut().filter_map(|(.., page)| Arc::get_mut(page));
        let mut parts: Vec<&mut [u8]> = pages_mut.map(Page::values_mut).collect();
        folder.read(found, &mut parts).then_some(pages)
    }

    fn place(&mut self, pages: Vec<Placed>) {
        for (table, i, page) in pages {
            let table = &mut self.tables[table];
            table.resize(table.len().max(i + 1), None);
            table[i] = Some(page);
        }
    }

    /// Stores the contents, those of `tokens`, in the pool's folder: whole pages, and checkpoints.
    pub(crate) fn save_files(&mut self, identity: &str, tokens: &[CachedToken]) {
        let pool = self.pool.clone();
        let Some(folder) = pool.folder() else { return };
        self.cut();
        self.add_checkpoint(self.len, true, None);
        let page = |table: usize, i: usize| {
            let page = self.tables[table].get(i)?.as_ref()?;
            Some(([table as u32, i as u32], page.contents().ok()?))
        };
        let blocks = Keys::new(identity, &tokens[..self.len]);
        for i in 0..self.len / KV_BLOCK {
            let pages: Option<Vec<_>> = self
                .layout
                .kept()
                .map(|group| page(group.kept_table(), i))
                .collect();
            if let Some(pages) = pages.filter(|pages| !pages.is_empty()) {
                folder.write(&blocks, (i + 1) * KV_BLOCK, &borrowed(&pages));
            }
        }
        let identity = of_checkpoints(identity);
        let checkpoints = Keys::new(&identity, &tokens[..self.len]);
        // A lookup treats all tokens as those of a prompt.
        let n_prompt = tokens.iter().take_while(|token| !token.generated).count();
        for Checkpoint { pos, pages, .. } in self
            .checkpoints
            .iter()
            .filter(|checkpoint| checkpoint.pos <= n_prompt)
        {
            let given_back = pages.iter().map(|(table, i, page)| {
                let contents = page.contents().ok()?;
                Some(([*table as u32, *i as u32], contents))
            });
            let partial = self
                .layout
                .kept()
                .filter(|group| !group.is_tiered() && !pos.is_multiple_of(KV_BLOCK));
            let partial = partial.filter_map(|group| page(group.table, pos / KV_BLOCK));
            // A device that is lost gives nothing to store.
            if let Some(pages) = given_back
                .chain(partial.map(Some))
                .collect::<Option<Vec<_>>>()
            {
                folder.write(&checkpoints, *pos, &borrowed(&pages));
            }
        }
    }
}

/// Pages for [`PrefixFolder::write`].
fn borrowed<'a>(pages: &'a [([u32; 2], Cow<'_, [u8]>)]) -> Vec<([u32; 2], &'a [u8])> {
    pages
        .iter()
        .map(|(place, contents)| (*place, &**contents))
        .collect()
}

/// `identity` for files of checkpoints.
fn of_checkpoints(identity: &str) -> String {
    format!("{identity}checkpoint\n")
}
