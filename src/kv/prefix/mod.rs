//! The prefix cache: keys and values of ended sequences, for later ones that begin with the same
//! tokens.
//!
//! There is a radix tree over tokens for each [`PrefixKey`] (PATRICIA: an edge holds a run of
//! tokens). A node has the pages of its tokens, reference-counted: two nodes share the page in
//! which they meet, and a page in use is shared with its sequence. A prefix may end inside an edge
//! and inside a page; a sequence that continues from there copies the filled rows, as a fork does.
//!
//! Pages that windows and precision by age release exist only at the checkpoints of the sequences:
//! for layouts with such groups a prefix ends at a checkpoint.
//!
//! Pages are evicted from the ends of the least recently used leaves, so that a prefix outlives its
//! continuations.

#[cfg(test)]
mod tests;

use crate::arch::KV_BLOCK;
use crate::kv::KvPolicy;
use crate::kv::page::{BlockTable, Checkpoint, Page};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Default limit on the bytes of the prefix cache.
pub(crate) const DEFAULT_PREFIX_BUDGET: u64 = 1 << 30;

/// An image at a position of a text: the first 128 bits of a hash of its pixels and of all else that
/// its embeddings depend on. Zero where a token is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ImageKey(pub(crate) [u64; 2]);

/// A token and its kind: whether its keys and values were computed as a decode row. Where an
/// embedding of an image stands, `token` is a placeholder, and `image` says which. Which of the
/// image's embeddings it is follows from the tokens before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CachedToken {
    pub(crate) token: u32,
    pub(crate) generated: bool,
    pub(crate) image: ImageKey,
}

/// Everything else that the bits of keys and values depend on, and the tenant's salt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PrefixKey {
    /// The model's fingerprint.
    pub(crate) model: u64,
    /// The instruction-set level or device.
    pub(crate) device: String,
    /// Version of the arithmetic.
    pub(crate) arithmetic: u32,
    /// Generation of the adapters before the last norm.
    pub(crate) adapters: u64,
    pub(crate) policy: KvPolicy,
    /// Fingerprint of the rope tables.
    pub(crate) ropes: u64,
    /// Whether prompts have the arithmetic of generated tokens.
    pub(crate) exact: bool,
    /// Salt of the tenant.
    pub(crate) salt: String,
}

/// Contents of a sequence, to be stored in the cache.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) tokens: Vec<CachedToken>,
    /// Block tables of groups that release no pages; the others are empty.
    pub(super) tables: Vec<BlockTable>,
    pub(super) checkpoints: Vec<Checkpoint>,
    /// Whether some groups release pages, so that a prefix must end at a checkpoint.
    pub(super) by_checkpoint: bool,
}

/// A prefix found in the cache.
#[derive(Debug)]
pub(super) struct Prefix {
    pub(super) tokens: Vec<CachedToken>,
    pub(super) tables: Vec<BlockTable>,
    /// Present if some groups need one.
    pub(super) checkpoint: Option<Checkpoint>,
}

/// Contents and counters of the prefix cache of a [`KvPool`](super::KvPool).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixStats {
    /// Prompts that were looked up.
    pub lookups: u64,
    /// Number of these for which a prefix was found.
    pub hits: u64,
    /// Number of hits that were shorter than what was looked up.
    pub partial_hits: u64,
    /// Tokens that were not computed.
    pub tokens_reused: u64,
    /// Number of leaf ends dropped to make room.
    pub evictions: u64,
    /// Number of times that the pool exceeded its high watermark and evicted.
    pub rounds: u64,
    /// Bytes of its pages, including those shared with sequences.
    pub bytes: u64,
    /// Upper bound of these bytes.
    pub budget: u64,
    /// Tokens loaded from the folder.
    pub tokens_loaded: u64,
    /// Blocks of the folder that were damaged and removed.
    pub damaged_blocks: u64,
    /// Blocks that could not be written to the folder.
    pub failed_blocks: u64,
}

impl PrefixStats {
    /// Lookups that found nothing.
    pub fn misses(&self) -> u64 {
        self.lookups - self.hits
    }
}

type NodeId = usize;

#[derive(Debug)]
struct Node {
    /// `None` for a root, which has no tokens.
    parent: Option<NodeId>,
    /// Position of the first token.
    start: usize,
    tokens: Vec<CachedToken>,
    /// Pages from page `start / 64` on.
    tables: Vec<BlockTable>,
    /// Checkpoints after `start`, in ascending order.
    checkpoints: Vec<Checkpoint>,
    by_checkpoint: bool,
    /// Children by their first token.
    children: BTreeMap<CachedToken, NodeId>,
    last_used: u64,
}

impl Node {
    fn end(&self) -> usize {
        self.start + self.tokens.len()
    }

    /// Length of the longest usable prefix that ends in this node, of the `n` tokens that lead here
    /// or into it.
    fn usable(&self, n: usize) -> usize {
        if !self.by_checkpoint {
            return n;
        }
        self.checkpoints
            .iter()
            .rev()
            .map(|c| c.pos)
            .find(|&pos| pos <= n)
            .unwrap_or(0)
    }

    /// End of the node without its last page or its last checkpoint.
    fn shorter(&self) -> usize {
        let end = self.end() - 1;
        if self.by_checkpoint {
            self.usable(end).max(self.start)
        } else {
            (end / KV_BLOCK * KV_BLOCK).max(self.start)
        }
    }

    /// Index, in the node's tables, of the first page without a token before position `end`.
    fn pages_to(&self, end: usize) -> usize {
        if end == self.start {
            0
        } else {
            end.div_ceil(KV_BLOCK) - self.start / KV_BLOCK
        }
    }

    /// Pages that are dropped if the node ends at `end`.
    fn pages_from(&self, end: usize) -> impl Iterator<Item = &Arc<Page>> {
        let first = self.pages_to(end);
        let of_tables = self
            .tables
            .iter()
            .flat_map(move |table| table.iter().skip(first).flatten());
        let of_checkpoints = self
            .checkpoints
            .iter()
            .filter(move |c| c.pos > end)
            .flat_map(Checkpoint::pages);
        of_tables.chain(of_checkpoints)
    }
}

/// Pages referenced by the trees.
#[derive(Debug, Default)]
struct PinnedPages {
    /// Number of references by address.
    counts: HashMap<usize, usize>,
    bytes: u64,
}

impl PinnedPages {
    fn add(&mut self, page: &Arc<Page>) {
        let count = self.counts.entry(Arc::as_ptr(page).addr()).or_default();
        *count += 1;
        if *count == 1 {
            self.bytes += page.n_bytes();
        }
    }

    fn remove(&mut self, page: &Arc<Page>) {
        let address = Arc::as_ptr(page).addr();
        let Some(count) = self.counts.get_mut(&address) else {
            return;
        };
        *count -= 1;
        if *count == 0 {
            self.counts.remove(&address);
            self.bytes -= page.n_bytes();
        }
    }

    /// Whether a sequence references it, too.
    fn in_use(&self, page: &Arc<Page>) -> bool {
        Arc::strong_count(page)
            > self
                .counts
                .get(&Arc::as_ptr(page).addr())
                .copied()
                .unwrap_or(0)
    }
}

/// The trees of all keys.
#[derive(Debug)]
pub(super) struct PrefixTree {
    budget: u64,
    roots: HashMap<PrefixKey, NodeId>,
    /// `None` for dropped nodes.
    nodes: Vec<Option<Node>>,
    free: Vec<NodeId>,
    /// Leaves with the time of their last use.
    leaves: BTreeSet<(u64, NodeId)>,
    /// Counter of uses.
    clock: u64,
    held: PinnedPages,
    lookups: u64,
    hits: u64,
    partial_hits: u64,
    tokens_reused: u64,
    evictions: u64,
    rounds: u64,
}

impl Default for PrefixTree {
    fn default() -> PrefixTree {
        PrefixTree {
            budget: DEFAULT_PREFIX_BUDGET,
            roots: HashMap::new(),
            nodes: Vec::new(),
            free: Vec::new(),
            leaves: BTreeSet::new(),
            clock: 0,
            held: PinnedPages::default(),
            lookups: 0,
            hits: 0,
            partial_hits: 0,
            tokens_reused: 0,
            evictions: 0,
            rounds: 0,
        }
    }
}

impl PrefixTree {
    pub(super) fn stats(&self) -> PrefixStats {
        let &PrefixTree {
            lookups,
            hits,
            partial_hits,
            tokens_reused,
            evictions,
            rounds,
            budget,
            ..
        } = self;
        let bytes = self.held.bytes;
        PrefixStats {
            lookups,
            hits,
            partial_hits,
            tokens_reused,
            evictions,
            rounds,
            bytes,
            budget,
            ..PrefixStats::default()
        }
    }

    pub(super) fn set_budget(&mut self, bytes: u64) {
        self.budget = bytes;
        self.keep_budget();
    }

    /// Drops all nodes.
    pub(super) fn clear(&mut self) {
        self.roots.clear();
        self.nodes.clear();
        self.free.clear();
        self.leaves.clear();
        self.held = PinnedPages::default();
    }

    /// The longest prefix of `tokens` in the cache with at least `min` tokens. With `any`, tokens
    /// match whether they were computed as prompt or as generated ones.
    pub(super) fn find(
        &mut self,
        key: &PrefixKey,
        tokens: &[CachedToken],
        min: usize,
        any: bool,
    ) -> Option<Prefix> {
        self.lookups += 1;
        let (len, last) = self.longest(*self.roots.get(key)?, tokens, any);
        if len < min.max(1) {
            return None;
        }
        self.hits += 1;
        self.partial_hits += u64::from(len < tokens.len());
        self.tokens_reused += len as u64;
        self.touch(last);
        let mut path = vec![last];
        while let Some(parent) = self.node(path[path.len() - 1]).parent {
            path.push(parent);
        }
        let mut prefix = Prefix {
            tokens: Vec::with_capacity(len),
            tables: Vec::new(),
            checkpoint: None,
        };
        for node in path.into_iter().rev().map(|id| self.node(id)) {
            let end = node.end().min(len);
            prefix
                .tokens
                .extend_from_slice(&node.tokens[..end - node.start]);
            prefix
                .tables
                .resize(node.tables.len().max(prefix.tables.len()), Vec::new());
            for (to, from) in prefix.tables.iter_mut().zip(&node.tables) {
                // If a page is in both nodes, the later one has more rows.
                to.resize(node.start / KV_BLOCK, None);
                to.extend(from.iter().take(node.pages_to(end)).cloned());
            }
        }
        prefix.checkpoint = self
            .node(last)
            .checkpoints
            .iter()
            .find(|c| c.pos == len)
            .cloned();
        Some(prefix)
    }

    /// Length of the longest usable prefix, and the node that contains its end.
    fn longest(&self, root: NodeId, tokens: &[CachedToken], any: bool) -> (usize, NodeId) {
        let (mut best, mut open) = ((0, root), vec![root]);
        while let Some(id) = open.pop() {
            let node = self.node(id);
            let n = node.end();
            let Some(&next) = tokens.get(n) else { continue };
            let other = CachedToken {
                generated: !next.generated,
                ..next
            };
            let firsts = [Some(next), any.then_some(other)].into_iter().flatten();
            for child_id in firsts.filter_map(|first| node.children.get(&first).copied()) {
                let child = self.node(child_id);
                let same = |(a, b): &(&CachedToken, &CachedToken)| {
                    a == b || any && (a.token, a.image) == (b.token, b.image)
                };
                let n_same = child
                    .tokens
                    .iter()
                    .zip(&tokens[n..])
                    .take_while(same)
                    .count();
                if child.usable(n + n_same) > best.0 {
                    best = (child.usable(n + n_same), child_id);
                }
                if n_same == child.tokens.len() {
                    open.push(child_id);
                }
            }
        }
        best
    }

    /// Stores the contents of a sequence.
    pub(super) fn insert(&mut self, key: PrefixKey, mut stored: Stored) {
        if stored.by_checkpoint {
            stored
                .tokens
                .truncate(stored.checkpoints.last().map_or(0, |c| c.pos));
        }
        if stored.tokens.is_empty() {
            return;
        }
        let mut id = match self.roots.get(&key) {
            Some(&root) => root,
            None => {
                let root = self.add_node(Node {
                    parent: None,
                    start: 0,
                    tokens: Vec::new(),
                    tables: Vec::new(),
                    checkpoints: Vec::new(),
                    by_checkpoint: stored.by_checkpoint,
                    children: BTreeMap::new(),
                    last_used: 0,
                });
                self.roots.insert(key, root);
                root
            }
        };
        loop {
            let n = self.node(id).end();
            let Some(first) = stored.tokens.get(n) else {
                break;
            };
            let Some(&child) = self.node(id).children.get(first) else {
                id = self.add_leaf(id, &stored);
                break;
            };
            let node = self.node(child);
            let n_same = node
                .tokens
                .iter()
                .zip(&stored.tokens[n..])
                .take_while(|(a, b)| a == b)
                .count();
            let (splits, end) = (n_same < node.tokens.len(), n + n_same);
            id = child;
            if splits && end < stored.tokens.len() {
                id = self.split(child, end);
            }
            self.fill(id, end, &stored);
            if splits && end == stored.tokens.len() {
                break;
            }
        }
        self.touch(id);
        // Pages that only the sequence referenced now belong to the tree.
        drop(stored);
        self.keep_budget();
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id]
            .as_ref()
            .expect("ids are those of nodes that are there")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id]
            .as_mut()
            .expect("ids are those of nodes that are there")
    }

    fn add_node(&mut self, node: Node) -> NodeId {
        node.pages_from(node.start)
            .for_each(|page| self.held.add(page));
        let id = self.free.pop().unwrap_or(self.nodes.len());
        if id == self.nodes.len() {
            self.nodes.push(None);
        }
        self.nodes[id] = Some(node);
        id
    }

    /// Adds a leaf with the tokens after those of `parent`.
    fn add_leaf(&mut self, parent: NodeId, stored: &Stored) -> NodeId {
        let start = self.node(parent).end();
        let first = start / KV_BLOCK;
        let last_used = self.clock;
        let leaf = self.add_node(Node {
            parent: Some(parent),
            start,
            tokens: stored.tokens[start..].to_vec(),
            tables: stored
                .tables
                .iter()
                .map(|table| table.get(first..).unwrap_or_default().to_vec())
                .collect(),
            checkpoints: stored
                .checkpoints
                .iter()
                .filter(|c| c.pos > start)
                .cloned()
                .collect(),
            by_checkpoint: stored.by_checkpoint,
            children: BTreeMap::new(),
            last_used,
        });
        let parent_used = (self.node(parent).last_used, parent);
        self.leaves.remove(&parent_used);
        self.node_mut(parent)
            .children
            .insert(stored.tokens[start], leaf);
        self.leaves.insert((last_used, leaf));
        leaf
    }

    /// Splits a node at position `at`, inside it; returns the new node, which ends there.
    fn split(&mut self, id: NodeId, at: usize) -> NodeId {
        let Some(mut lower) = self.take_node(id) else {
            return id;
        };
        let n_upper = lower.pages_to(at);
        let n_before = at / KV_BLOCK - lower.start / KV_BLOCK;
        let n_tokens = at - lower.start;
        let n_checkpoints = lower.checkpoints.partition_point(|c| c.pos <= at);
        let upper = Node {
            tables: lower
                .tables
                .iter()
                .map(|table| table[..n_upper.min(table.len())].to_vec())
                .collect(),
            tokens: lower.tokens.drain(..n_tokens).collect(),
            checkpoints: lower.checkpoints.drain(..n_checkpoints).collect(),
            children: BTreeMap::from([(lower.tokens[0], id)]),
            ..lower
        };
        lower
            .tables
            .iter_mut()
            .for_each(|table| drop(table.drain(..n_before.min(table.len()))));
        lower.start = at;
        let (parent, first) = (upper.parent, upper.tokens[0]);
        let upper = self.add_node(upper);
        lower.parent = Some(upper);
        lower
            .pages_from(lower.start)
            .for_each(|page| self.held.add(page));
        self.nodes[id] = Some(lower);
        if let Some(parent) = parent {
            self.node_mut(parent).children.insert(first, upper);
        }
        upper
    }

    /// Removes a node and uncounts its pages.
    fn take_node(&mut self, id: NodeId) -> Option<Node> {
        let node = self.nodes[id].take()?;
        node.pages_from(node.start)
            .for_each(|page| self.held.remove(page));
        Some(node)
    }

    /// Adds to a node the pages and checkpoints that it lacks, from a sequence with the same tokens
    /// up to `end`.
    fn fill(&mut self, id: NodeId, end: usize, stored: &Stored) {
        let PrefixTree { nodes, held, .. } = self;
        let Some(node) = &mut nodes[id] else { return };
        let (node_end, first) = (node.end(), node.start / KV_BLOCK);
        let last = node.end().min(end).div_ceil(KV_BLOCK);
        for (to, from) in node.tables.iter_mut().zip(&stored.tables) {
            for (i, page) in from.iter().enumerate().take(last).skip(first) {
                let Some(page) = page
                    .as_ref()
                    .filter(|_| node_end.min((i + 1) * KV_BLOCK) <= end)
                else {
                    continue;
                };
                to.resize(to.len().max(i - first + 1), None);
                to[i - first].get_or_insert_with(|| {
                    held.add(page);
                    Arc::clone(page)
                });
            }
        }
        for checkpoint in stored
            .checkpoints
            .iter()
            .filter(|c| c.pos > node.start && c.pos <= end.min(node_end))
        {
            if let Err(i) = node
                .checkpoints
                .binary_search_by_key(&checkpoint.pos, |c| c.pos)
            {
                checkpoint.pages().for_each(|page| held.add(page));
                node.checkpoints.insert(i, checkpoint.clone());
            }
        }
    }

    /// Marks a node and its ancestors as used.
    fn touch(&mut self, id: NodeId) {
        self.clock += 1;
        let (clock, before) = (self.clock, (self.node(id).last_used, id));
        if self.leaves.remove(&before) {
            self.leaves.insert((clock, id));
        }
        let mut next = Some(id);
        while let Some(id) = next {
            let node = self.node_mut(id);
            node.last_used = clock;
            next = node.parent;
        }
    }

    fn keep_budget(&mut self) {
        while self.held.bytes > self.budget && (self.evict(false) || self.evict(true)) {}
    }

    /// Evicts pages that no sequence uses until `is_enough`; returns whether it is.
    pub(super) fn evict_until(&mut self, is_enough: impl Fn() -> bool) -> bool {
        let before = self.evictions;
        while !is_enough() {
            if !self.evict(false) {
                break;
            }
        }
        self.rounds += u64::from(self.evictions > before);
        is_enough()
    }

    /// Drops the end of the least recently used leaf that no sequence uses, or of any leaf. Returns
    /// whether there was one.
    pub(super) fn evict(&mut self, any: bool) -> bool {
        let free = |id| {
            let node = self.node(id);
            !node
                .pages_from(node.shorter())
                .any(|page| self.held.in_use(page))
        };
        let Some(&(used, id)) = self.leaves.iter().find(|&&(_, id)| any || free(id)) else {
            return false;
        };
        let Some(mut node) = self.take_node(id) else {
            return false;
        };
        self.evictions += 1;
        let end = node.shorter();
        if end > node.start {
            let n_pages = node.pages_to(end);
            node.tables
                .iter_mut()
                .for_each(|table| table.truncate(n_pages));
            node.tokens.truncate(end - node.start);
            node.checkpoints.retain(|c| c.pos <= end);
            node.pages_from(node.start)
                .for_each(|page| self.held.add(page));
            self.nodes[id] = Some(node);
            return true;
        }
        self.leaves.remove(&(used, id));
        self.free.push(id);
        let Some(parent_id) = node.parent else {
            return true;
        };
        let parent = self.node_mut(parent_id);
        parent.children.remove(&node.tokens[0]);
        if parent.children.is_empty() {
            let used = parent.last_used;
            if parent.parent.is_some() {
                self.leaves.insert((used, parent_id));
            } else {
                self.roots.retain(|_, root| *root != parent_id);
                self.nodes[parent_id] = None;
                self.free.push(parent_id);
            }
        }
        true
    }
}
