//! Layout of pages: the layers that share a page, and each layer's place in it.

use crate::arch::{KV_BLOCK, KV_SPAN};
use crate::kv::page::PageSize;
use crate::kv::{KeyCentres, KvPolicy, KvTiers, KvType};
use std::ops::Range;
use std::sync::Arc;

/// What reads a layer's part of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum KvUse {
    /// Attention to all positions, or those of a window.
    #[default]
    Attention,
    /// Attention to chosen positions, or to some of them at a time: precision does not depend on
    /// age.
    Chosen,
    /// An index that chooses them: precision is F16 at least. There may be no values.
    Index,
}

/// Shape of the keys and values that a layer stores per position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerShape {
    /// Positions that a query sees, its own included; `None`: all.
    pub(crate) window: Option<usize>,
    pub(crate) n_head_kv: usize,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    pub(crate) use_of: KvUse,
}

/// Shape of a layer's recurrence: `f32` values of its state, and of its input per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CellShape {
    pub(crate) n_state: usize,
    pub(crate) n_feed: usize,
}

/// Last tokens whose recurrence inputs a sequence keeps: a rewind among them, in the last forward
/// pass, replays these inputs.
pub(super) const N_FEEDS: usize = 64;

/// Places of recurrences in a sequence's two pages for them, in values: one has the states of all,
/// the other [`N_FEEDS`] rows of inputs of each.
#[derive(Clone, Debug)]
pub(super) struct Recurrences {
    pub(super) states: Vec<Range<usize>>,
    pub(super) feeds: Vec<Range<usize>>,
    /// Index of the block table of the states' page, after those of the groups.
    pub(super) table: usize,
    /// Index of the first recurrence that a GPU has in memory of its own; their number without.
    pub(super) first_on_device: usize,
}

impl Recurrences {
    /// Sizes of the page of states, and of that of inputs: in each those of the CPU's layers come
    /// first. Bytes are multiples of 64.
    pub(super) fn sizes(&self) -> [PageSize; 2] {
        [&self.states, &self.feeds].map(|of_cells| {
            let bytes = |values: usize| values.saturating_mul(size_of::<f32>());
            let all = bytes(of_cells.last().map_or(0, |last| last.end))
                .checked_next_multiple_of(64)
                .unwrap_or(usize::MAX)
                .max(64);
            let first = of_cells.get(self.first_on_device);
            PageSize {
                bytes: all,
                on_host: first.map_or(all, |first| bytes(first.start)),
            }
        })
    }
}

/// Maximum number of precision tiers of a group.
pub(super) const MAX_FORMS: usize = 3;

/// Position of a layer in its group's pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerAt {
    pub(super) group: usize,
    /// Byte offset of the first key and of the first value, in a page of each tier.
    pub(super) at: [[usize; 2]; MAX_FORMS],
    pub(super) shape: LayerShape,
}

impl LayerAt {
    /// Width of a key row and of a value row.
    pub(super) fn dims(&self) -> [usize; 2] {
        [self.shape.head_dim, self.shape.head_dim_v]
    }

    /// Byte ranges of the keys and of the values of a head, in a page of the precision tier `form`,
    /// the group's number `i`.
    pub(super) fn head(&self, i: usize, form: &Form, head: usize) -> [Range<usize>; 2] {
        let [k, v] = [0, 1].map(|part| {
            let len = form.types[part].block_bytes(self.dims()[part]);
            let start = self.at[i][part] + head * len;
            start..start + len
        });
        [k, v]
    }
}

/// Precision tier of the pages of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// Precision of keys and of values.
    pub(super) types: [KvType; 2],
    /// Bytes of a page, a multiple of 64.
    pub(super) page_bytes: usize,
    /// Bytes at the start of a page, of the layers that the CPU computes, if a GPU has the others
    /// in memory of its own; otherwise all.
    pub(super) on_host: usize,
    /// Bytes of a page's values; the rest are its keys.
    v_bytes: usize,
    /// Range in pages: queries use this tier for pages up to this distance before their own, and
    /// the next tier beyond.
    pub(super) reach: usize,
}

impl Form {
    /// Size of a page.
    pub(super) fn page_size(&self) -> PageSize {
        PageSize {
            bytes: self.page_bytes,
            on_host: self.on_host,
        }
    }

    /// Bytes of a page's keys and of its values, with their precision.
    pub(super) fn bytes_by_type(&self) -> [(KvType, u64); 2] {
        let [k, v] = self.types;
        [
            (k, (self.page_bytes - self.v_bytes) as u64),
            (v, self.v_bytes as u64),
        ]
    }
}

/// Cache group: layers with the same window and shape.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) window: Option<usize>,
    /// Precision tiers, from the nearest pages to the farthest; one unless precision depends on
    /// age.
    pub(super) forms: Vec<Form>,
    /// Index of the block table of the first tier.
    pub(super) table: usize,
    /// Whether keys, and values, are stored transformed, see [`crate::arch::Arch::hadamard`].
    pub(super) transformed: [bool; 2],
}

impl Group {
    /// Tier in which queries of page `i` read page `j`.
    pub(super) fn form_of(&self, i: usize, j: usize) -> usize {
        if j == 0 {
            return 0;
        }
        self.forms
            .iter()
            .position(|form| i.saturating_sub(j) <= form.reach)
            .unwrap_or(0)
    }

    /// Whether precision depends on age.
    pub(super) fn is_tiered(&self) -> bool {
        self.forms.len() > 1
    }

    /// Index of the table of the tier that is never released, if there is no window.
    pub(super) fn kept_table(&self) -> usize {
        self.table + self.forms.len() - 1
    }

    /// Pages that a query at position `pos` reads, its own included.
    pub(super) fn seen(&self, pos: usize) -> Range<usize> {
        let start = self
            .window
            .map_or(0, |window| (pos + 1).saturating_sub(window) / KV_BLOCK);
        start..pos.div_ceil(KV_BLOCK)
    }
}

/// Number of marked checkpoints (ends of messages) that are never thinned out, see
/// [`super::SeqKv::checkpoint`].
pub(super) const N_MARKED: usize = 2;

/// Minimum distance of the other checkpoints: together they take at most a quarter of the memory
/// that the window saves.
pub(super) fn sparse(window: usize) -> usize {
    window.saturating_mul(4).max(KV_BLOCK)
}

/// Layout of the pages of a model.
#[derive(Clone, Debug)]
pub(crate) struct KvLayout {
    pub(super) policy: KvPolicy,
    pub(super) groups: Vec<Group>,
    pub(super) layers: Vec<LayerAt>,
    /// Recurrences of all layers that have one.
    pub(super) recurrences: Option<Recurrences>,
    /// What is not stored of keys of less than 8 bits.
    pub(super) centres: Option<Arc<KeyCentres>>,
}

impl KvLayout {
    /// Whether keys of any layer are stored in less than 8 bits.
    pub(crate) fn has_small_keys(&self) -> bool {
        self.groups.iter().any(|group| group.transformed[0])
    }

    /// Whether centres of keys are not stored.
    pub(crate) fn has_centres(&self) -> bool {
        self.centres.is_some()
    }

    /// The same, where these centres of keys are not stored.
    pub(crate) fn centred(self, centres: Option<Arc<KeyCentres>>) -> KvLayout {
        KvLayout { centres, ..self }
    }

    /// What is not stored of the keys of a layer's head at a position, transformed as they are.
    pub(super) fn centre(&self, layer: usize, head: usize, pos: usize) -> Option<&[f32]> {
        let centres = self.centres.as_ref()?;
        let is_small = self.groups[self.layers[layer].group].transformed[0];
        centres.at(layer, head, pos).filter(|_| is_small)
    }

    pub(crate) fn new(policy: KvPolicy, shapes: impl IntoIterator<Item = LayerShape>) -> KvLayout {
        let KvPolicy { k, v, tiers } = policy;
        let mut groups = Vec::<Group>::new();
        let mut layers = Vec::<LayerAt>::new();
        for shape in shapes {
            let group = layers
                .iter()
                .find(|l| l.shape == shape)
                .map_or(groups.len(), |l| l.group);
            if group == groups.len() {
                let form = |types, reach| Form {
                    types,
                    page_bytes: 0,
                    on_host: 0,
                    v_bytes: 0,
                    reach,
                };
                let has_tiers = shape.window.is_none() && shape.use_of == KvUse::Attention;
                let forms = match tiers.filter(|_| has_tiers) {
                    None if shape.use_of == KvUse::Index => {
                        let kind = if k == KvType::F32 { k } else { KvType::F16 };
                        vec![form([kind; 2], usize::MAX)]
                    }
                    None => vec![form([k, v], usize::MAX)],
                    Some(KvTiers { recent, middle }) => vec![
                        form([k, v], recent.div_ceil(KV_BLOCK)),
                        form([KvType::Q8; 2], middle.div_ceil(KV_BLOCK)),
                        form([KvType::Q4; 2], usize::MAX),
                    ],
                };
                let table = groups
                    .last()
                    .map_or(0, |last| last.table + last.forms.len());
                let is_small = |part: usize| forms.iter().any(|form| form.types[part].bits() < 8);
                let transformed = [is_small(0), is_small(1)];
                groups.push(Group {
                    window: shape.window,
                    forms,
                    table,
                    transformed,
                });
            }
            let mut layer = LayerAt {
                group,
                at: [[0; 2]; MAX_FORMS],
                shape,
            };
            let dims = layer.dims();
            for (form, at) in groups[group].forms.iter_mut().zip(&mut layer.at) {
                // Bytes for 64 rows: each part begins on a cache line, whatever the widths.
                for part in 0..2 {
                    at[part] = form.page_bytes;
                    let bytes = shape
                        .n_head_kv
                        .saturating_mul(form.types[part].block_bytes(dims[part]));
                    form.page_bytes = form.page_bytes.saturating_add(bytes);
                    form.v_bytes = form.v_bytes.saturating_add(part * bytes);
                }
            }
            layers.push(layer);
        }
        groups
            .iter_mut()
            .flat_map(|group| &mut group.forms)
            .for_each(|form| form.on_host = form.page_bytes);
        KvLayout {
            policy,
            groups,
            layers,
            recurrences: None,
            centres: None,
        }
    }

    /// The same where the layers with keys and values from `first_layer` on, and the recurrences from
    /// `first_cell` on, have theirs in memory of a GPU's own: in each page those of the CPU's layers
    /// come first.
    pub(crate) fn with_device(mut self, first_layer: usize, first_cell: usize) -> KvLayout {
        for layer in self.layers.iter().skip(first_layer) {
            let forms = &mut self.groups[layer.group].forms;
            for (form, [keys, _]) in forms.iter_mut().zip(layer.at) {
                form.on_host = form.on_host.min(keys);
            }
        }
        if let Some(recurrences) = &mut self.recurrences {
            recurrences.first_on_device = first_cell;
        }
        self
    }

    /// Whether a GPU has keys and values, or states, in memory of its own.
    pub(crate) fn is_on_device(&self) -> bool {
        self.page_sizes().any(|size| size.on_host < size.bytes)
    }

    /// Precision of keys and values.
    pub(crate) fn policy(&self) -> KvPolicy {
        self.policy
    }

    /// The same with recurrences.
    pub(crate) fn with_recurrences(
        mut self,
        cells: impl IntoIterator<Item = CellShape>,
    ) -> KvLayout {
        let (mut states, mut feeds) = (Vec::<Range<usize>>::new(), Vec::<Range<usize>>::new());
        let after = |ranges: &[Range<usize>], n: usize| {
            let start = ranges.last().map_or(0, |last| last.end);
            start..start.saturating_add(n)
        };
        for cell in cells {
            states.push(after(&states, cell.n_state));
            feeds.push(after(&feeds, cell.n_feed.saturating_mul(N_FEEDS)));
        }
        let table = self.tables().count();
        self.recurrences = (!states.is_empty()).then_some(Recurrences {
            first_on_device: states.len(),
            states,
            feeds,
            table,
        });
        self
    }

    /// Size of a page of each table.
    pub(super) fn page_sizes(&self) -> impl Iterator<Item = PageSize> {
        let of_states = self
            .recurrences
            .iter()
            .map(|recurrences| recurrences.sizes()[0]);
        self.tables()
            .map(|(_, form)| form.page_size())
            .chain(of_states)
    }

    /// Bytes of a page of each table by their precision.
    pub(super) fn page_types(&self) -> impl Iterator<Item = [(KvType, u64); 2]> {
        let of_states = self
            .recurrences
            .iter()
            .map(|r| [(KvType::F32, r.sizes()[0].bytes as u64), (KvType::F32, 0)]);
        self.tables()
            .map(|(_, form)| form.bytes_by_type())
            .chain(of_states)
    }

    /// Groups that keep pages of all positions, in at least one tier.
    pub(super) fn kept(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter().filter(|group| group.window.is_none())
    }

    /// Whether sequences need checkpoints: pages are released, or a state is overwritten.
    pub(crate) fn has_checkpoints(&self) -> bool {
        self.window().is_some() || self.recurrences.is_some()
    }

    /// Whether two checkpoints are close enough to need none between them; `apart` is their
    /// distance, `behind` that of the later one from the end.
    pub(super) fn is_near(&self, apart: usize, behind: usize) -> bool {
        match (&self.recurrences, self.window()) {
            // A rewind recomputes at most as many tokens as it goes back, plus a page.
            (Some(_), _) => apart <= behind.max(KV_BLOCK),
            (None, window) => apart <= (2 * behind).max(sparse(window.unwrap_or(0))),
        }
    }

    /// All tiers of all groups, table by table.
    pub(super) fn tables(&self) -> impl Iterator<Item = (&Group, &Form)> {
        self.groups
            .iter()
            .flat_map(|group| group.forms.iter().map(move |form| (group, form)))
    }

    /// Narrowest window, or range of a precision tier, if there is any.
    pub(super) fn window(&self) -> Option<usize> {
        let tiered = |g: &Group| {
            g.forms
                .len()
                .checked_sub(2)
                .map(|i| g.forms[i].reach.saturating_mul(KV_BLOCK))
        };
        self.groups
            .iter()
            .filter_map(|g| g.window.or_else(|| tiered(g)))
            .min()
    }

    /// Bytes that the query at `pos` reads.
    pub(crate) fn bytes_read(&self, pos: usize) -> u64 {
        let of_group = |group: &Group| {
            let bytes = |page| group.forms[group.form_of(pos / KV_BLOCK, page)].page_bytes as u64;
            group.seen(pos).map(bytes).sum::<u64>()
        };
        let states = self
            .recurrences
            .iter()
            .map(|recurrences| recurrences.sizes()[0].bytes as u64);
        self.groups.iter().map(of_group).chain(states).sum()
    }

    /// [Pieces](super::SeqKv::pieces) of a sequence that ends at position `end` at most.
    pub(crate) fn max_pieces(&self, end: usize) -> usize {
        let borders = self
            .groups
            .iter()
            .map(|group| group.forms.len())
            .max()
            .unwrap_or(1);
        // The first page has the first tier, too. Rounded up, so that a sequence that grows seldom
        // needs more room.
        end.div_ceil(KV_SPAN).next_power_of_two() + if borders > 1 { borders } else { 0 }
    }

    /// Maximum bytes of a sequence of `n_ctx` positions, computed at most `n_batch` at a time.
    pub(crate) fn bytes(&self, n_ctx: usize, n_batch: usize) -> u64 {
        let pages = |n: usize| n.div_ceil(KV_BLOCK) as u64;
        let all = pages(n_ctx);
        // Pages that are released after `window` positions: those of the batch and its window (both
        // ends may be inside a page), and of a window for each checkpoint.
        let windowed = |window: usize| {
            let doublings = (n_ctx / sparse(self.window().unwrap_or(window)))
                .checked_ilog2()
                .unwrap_or(0) as u64;
            let checkpoints = 2 + N_MARKED as u64 + doublings * 5 / 4;
            let live = pages(window.saturating_add(n_batch.min(n_ctx))) + 1;
            // The checkpoint before a marked one has at most one page more.
            all.min(live.saturating_add(checkpoints * (pages(window) + 1) + N_MARKED as u64))
        };
        let of_table = |(g, form): (&Group, &Form)| {
            let n = match (g.window, form.reach) {
                (Some(window), _) => windowed(window),
                (None, usize::MAX) => all,
                // Plus the first page.
                (None, reach) => all.min(windowed(reach.saturating_mul(KV_BLOCK)) + 1),
            };
            n.saturating_mul(form.page_bytes as u64)
        };
        let recurrences = self.recurrences.as_ref().map_or(0, |recurrences| {
            let [states, feeds] = recurrences.sizes().map(|size| size.bytes as u64);
            // Three during a forward pass, marked checkpoints and those before them, and at most
            // two for each doubling of the distance.
            let doublings = (n_ctx / KV_BLOCK).checked_ilog2().unwrap_or(0) as u64;
            states
                .saturating_mul(all.min(4 + 2 * N_MARKED as u64 + 2 * doublings) + 3)
                .saturating_add(feeds)
        });
        self.tables()
            .map(of_table)
            .fold(recurrences, u64::saturating_add)
    }
}
