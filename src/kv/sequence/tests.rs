use crate::kv::layout::sparse;
use crate::kv::sequence::*;
use crate::kv::{CachedToken, KvPolicy, KvTiers, KvUse, LayerShape, PrefixKey};
use std::collections::HashMap;

/// Pseudo-random numbers, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    /// Unlike all others, but for one in 2³¹.
    fn token(&mut self) -> CachedToken {
        CachedToken {
            token: self.below(1 << 31) as u32,
            generated: self.below(5) == 0,
            ..CachedToken::default()
        }
    }
}

fn shape(
    window: Option<usize>,
    n_head_kv: usize,
    head_dim: usize,
    head_dim_v: usize,
) -> LayerShape {
    LayerShape {
        window,
        n_head_kv,
        head_dim,
        head_dim_v,
        use_of: KvUse::Attention,
    }
}

/// A sequence beside the keys and values that it must hold, by layer, part and form: `(len,
/// n_head_kv·dim)`.
struct Pair {
    seq: SeqKv,
    plain: Vec<[Vec<Vec<f32>>; 2]>,
    /// A token for each position. Keys and values that differ have different tokens.
    tokens: Vec<CachedToken>,
}

/// A key at another position, for tests of [`SeqKv::shift`].
fn turn(key: &mut [f32]) {
    key.reverse();
    key[0] = -key[0];
}

fn prefix_key(policy: KvPolicy) -> PrefixKey {
    let (device, salt) = ("scalar".into(), String::new());
    PrefixKey {
        model: 1,
        device,
        arithmetic: 1,
        adapters: 0,
        policy,
        ropes: 2,
        exact: false,
        salt,
    }
}

fn widths(s: LayerShape) -> [usize; 2] {
    [s.n_head_kv * s.head_dim, s.n_head_kv * s.head_dim_v]
}

/// The values of a head's row after it was stored in a page of the form: rounded when written,
/// and again for the form.
fn stored(group: &Group, form: usize, part: usize, row: &[f32]) -> Vec<f32> {
    let (arch, mut x) = (Arch::scalar(), row.to_vec());
    let turn = |x: &mut [f32]| {
        if group.transformed[part] {
            arch.hadamard(x);
        }
    };
    turn(&mut x);
    for form in if form == 0 { vec![0] } else { vec![0, form] } {
        let kind = group.forms[form].types[part];
        let mut block = vec![0u64; kind.block_bytes(x.len()) / 8];
        arch.store_kv(kind, bytemuck::cast_slice_mut(&mut block), 0, &x);
        arch.load_kv(kind, bytemuck::cast_slice(&block), x.len(), &mut x);
    }
    turn(&mut x);
    x
}

impl Pair {
    fn new(pool: &KvPool, layout: &Arc<KvLayout>) -> Pair {
        let forms = |at: &LayerAt| vec![Vec::new(); layout.groups[at.group].forms.len()];
        let plain = layout
            .layers
            .iter()
            .map(|at| [forms(at), forms(at)])
            .collect();
        Pair {
            seq: SeqKv::new(pool.clone(), Arc::clone(layout)),
            plain,
            tokens: Vec::new(),
        }
    }

    fn fork(&self) -> Pair {
        Pair {
            seq: self.seq.fork(),
            plain: self.plain.clone(),
            tokens: self.tokens.clone(),
        }
    }

    fn append(&mut self, n: usize, random: &mut Random) -> Result<(), KvError> {
        self.seq.reserve(n)?;
        let pos = self.seq.len();
        self.tokens.extend((0..n).map(|_| random.token()));
        let layout = Arc::clone(&self.seq.layout);
        for (i, (at, plain)) in layout.layers.iter().zip(&mut self.plain).enumerate() {
            let rows = widths(at.shape).map(|width| {
                (0..n * width)
                    .map(|_| random.below(1000) as f32)
                    .collect::<Vec<_>>()
            });
            self.seq.append(
                &PoolHandle::alone(),
                Arch::scalar(),
                i,
                pos,
                &rows[0],
                &rows[1],
            )?;
            self.seq.convert(&PoolHandle::alone(), Arch::scalar(), i);
            let group = &layout.groups[at.group];
            for (part, rows) in rows.iter().enumerate() {
                for (form, plain) in plain[part].iter_mut().enumerate() {
                    plain.extend(
                        rows.chunks(at.dims()[part])
                            .flat_map(|row| stored(group, form, part, row)),
                    );
                }
            }
        }
        // Every page as the queries of this pass read it.
        for (layer, at) in layout.layers.iter().enumerate() {
            let group = &layout.groups[at.group];
            for query in (pos..pos + n)
                .filter(|query| group.is_tiered() && query % KV_BLOCK == (n + 5) % KV_BLOCK)
            {
                for page in 0..=query / KV_BLOCK {
                    let form = group.form_of(query / KV_BLOCK, page);
                    let bytes = self.seq.tables[group.table + form][page]
                        .as_ref()
                        .expect("what is read is there");
                    for head in 0..at.shape.n_head_kv {
                        self.check_page((layer, head), (page, form), bytes, pos + n);
                    }
                }
            }
        }
        self.seq.commit(n);
        Ok(())
    }

    /// A head's part of a page holds the first rows of what it must, up to position `end`.
    fn check_page(
        &self,
        (layer, head): (usize, usize),
        (i, form): (usize, usize),
        page: &Page,
        end: usize,
    ) {
        let layout = &self.seq.layout;
        let (at, group) = (
            &layout.layers[layer],
            &layout.groups[layout.layers[layer].group],
        );
        let n = (end - i * KV_BLOCK).min(KV_BLOCK);
        for (part, block) in at
            .head(form, &group.forms[form], head)
            .into_iter()
            .enumerate()
        {
            let (dim, width) = (at.dims()[part], widths(at.shape)[part]);
            let mut rows = vec![0.0; n * dim];
            Arch::scalar().load_kv(
                group.forms[form].types[part],
                &page.values::<u8>()[block],
                dim,
                &mut rows,
            );
            for (row, pos) in rows.chunks_exact_mut(dim).zip(i * KV_BLOCK..) {
                if group.transformed[part] {
                    Arch::scalar().hadamard(row);
                }
                let plain = &self.plain[layer][part][form][pos * width + head * dim..][..dim];
                assert_eq!(
                    row, plain,
                    "layer {layer} head {head} position {pos} form {form}"
                );
            }
        }
    }

    /// Returns where it is then.
    fn truncate(&mut self, n: usize) -> usize {
        let len = self.seq.truncate(n);
        assert!(len <= n && len == self.seq.len());
        self.cut();
        len
    }

    /// Forgets what the sequence does not hold any more.
    fn cut(&mut self) {
        let len = self.seq.len();
        self.tokens.truncate(len);
        for (at, plain) in self.seq.layout.layers.iter().zip(&mut self.plain) {
            for (plain, width) in plain.iter_mut().zip(widths(at.shape)) {
                plain
                    .iter_mut()
                    .for_each(|plain| plain.truncate(len * width));
            }
        }
    }

    /// Loads what it saves.
    fn reload(&mut self) -> Result<(), KvError> {
        let loaded = self.seq.with_state(&self.seq.state()?)?;
        self.seq = loaded.expect("what was saved is sound");
        Ok(())
    }

    /// Leaves its pages to the prefix cache, and begins again with what is found there.
    fn come_back(&mut self) {
        let key = prefix_key(self.seq.policy());
        let tokens = self.tokens.clone();
        self.seq.store(key.clone(), tokens.clone());
        let found = self.seq.reuse(&key, &tokens, 0, false);
        assert_eq!(
            (found.len(), &found[..]),
            (self.seq.len(), &tokens[..found.len()])
        );
        self.cut();
    }

    /// Drops the pages `gone`.
    fn shift(&mut self, gone: Range<usize>, random: &mut Random) -> Result<(), KvError> {
        self.seq.shift(
            &PoolHandle::alone(),
            Arch::scalar(),
            gone.clone(),
            &|_, key| turn(key),
        )?;
        let gone = gone.start * KV_BLOCK..gone.end * KV_BLOCK;
        self.tokens.drain(gone.clone());
        self.tokens[gone.start..].fill_with(|| random.token());
        let layout = Arc::clone(&self.seq.layout);
        for (at, [keys, values]) in layout.layers.iter().zip(&mut self.plain) {
            let ([width, width_v], dim) = (widths(at.shape), at.shape.head_dim);
            values[0].drain(gone.start * width_v..gone.end * width_v);
            keys[0].drain(gone.start * width..gone.end * width);
            for key in keys[0][gone.start * width..].chunks_exact_mut(dim) {
                turn(key);
                key.copy_from_slice(&stored(&layout.groups[at.group], 0, 0, key));
            }
        }
        Ok(())
    }

    /// What the next position sees is what was written.
    fn check(&self) {
        let (layout, len) = (&self.seq.layout, self.seq.len());
        assert!(self.seq.sees_all(len) && self.seq.pending.is_empty());
        for (layer, at) in layout.layers.iter().enumerate() {
            let group = &layout.groups[at.group];
            for page in group.seen(len) {
                let (form, bytes) = self
                    .seq
                    .page_for(group, len, page)
                    .expect("what is seen is there");
                (0..at.shape.n_head_kv)
                    .for_each(|head| self.check_page((layer, head), (page, form), bytes, len));
            }
        }
        let layer = len % layout.layers.len();
        let (at, group) = (
            &layout.layers[layer],
            &layout.groups[layout.layers[layer].group],
        );
        let [mut k, mut v] = at.dims().map(|dim| vec![f32::NAN; len * dim]);
        self.seq.read(Arch::scalar(), (layer, 0), &mut k, &mut v);
        for pos in group.seen(len).start * KV_BLOCK..len {
            let form = self
                .seq
                .page_for(group, len, pos / KV_BLOCK)
                .map_or(0, |(form, _)| form);
            for (part, read) in [&k, &v].into_iter().enumerate() {
                let (dim, width) = (at.dims()[part], widths(at.shape)[part]);
                let plain = &self.plain[layer][part][form][pos * width..][..dim];
                assert_eq!(
                    read[pos * dim..][..dim],
                    *plain,
                    "layer {layer} position {pos}"
                );
            }
        }
    }
}

/// Bytes and number of the pages that any of them holds.
fn held<'a>(sequences: impl Iterator<Item = &'a SeqKv>) -> (u64, usize) {
    let mut pages = HashMap::new();
    for seq in sequences {
        let live = seq.tables.iter().flatten().flatten();
        for page in live.chain(
            seq.checkpoints
                .iter()
                .flat_map(|c| c.pages.iter().map(|(_, _, page)| page)),
        ) {
            pages.insert(Arc::as_ptr(page), page.values::<u8>().len() as u64);
        }
    }
    (pages.values().sum(), pages.len())
}

/// A group that sees all, with the borders of its precisions after one page and after three.
const NEAR: KvTiers = KvTiers {
    recent: 64,
    middle: 192,
};

/// llama.cpp #12253: what moved keys and values to other places changed them.
#[test]
fn random_operations_against_plain_caches() {
    // In all a million.
    let n = if std::env::var_os("RUVLLM_LONG").is_some() {
        250_000
    } else {
        2000
    };
    let windows = [
        shape(None, 2, 8, 8),
        shape(Some(100), 2, 8, 8),
        shape(Some(100), 2, 8, 8),
        shape(Some(70), 1, 12, 4),
        shape(None, 2, 8, 8),
        shape(Some(1), 1, 3, 5),
    ];
    let no_windows = [
        shape(None, 2, 8, 8),
        shape(None, 1, 12, 4),
        shape(None, 2, 8, 8),
    ];
    let tiered = KvPolicy {
        tiers: Some(NEAR),
        ..KvPolicy::default()
    };
    let mixed = KvPolicy {
        k: KvType::Q6,
        v: KvType::Bf16,
        tiers: None,
    };
    operate(KvType::F16.into(), windows, n);
    operate(tiered, windows, n);
    operate(KvType::F16.into(), no_windows, n);
    operate(
        KvPolicy {
            k: KvType::Q8,
            v: KvType::Q4,
            tiers: None,
        },
        no_windows,
        n,
    );
    for policy in [
        mixed,
        KvType::F32.into(),
        KvType::Q8.into(),
        KvType::Q5.into(),
        KvType::Q4.into(),
    ] {
        operate(policy, windows, 300);
    }
}

fn operate<const N: usize>(policy: KvPolicy, shapes: [LayerShape; N], n_steps: usize) {
    let layout = Arc::new(KvLayout::new(policy, shapes));
    // Keys are turned where no page is given back (`session/context_shift.rs`).
    let shifts = layout.window().is_none();
    // Some appends find the pool full.
    let pool = KvPool::new(
        16 * layout
            .groups
            .iter()
            .map(|g| g.forms[0].page_bytes as u64)
            .sum::<u64>(),
    );
    let mut random = Random(12);
    let mut pairs = vec![Pair::new(&pool, &layout)];
    let (mut full, mut restored, mut shifted) = (0, 0, 0);
    for step in 0..n_steps {
        let i = random.below(pairs.len());
        let len = pairs[i].seq.len();
        let mut or_full = |outcome: Result<(), KvError>| match outcome {
            Ok(()) => true,
            Err(KvError::PoolFull { need, used, budget }) => {
                assert!(used + need > budget);
                full += 1;
                false
            }
            Err(e) => panic!("{e}"),
        };
        match random.below(16) {
            0..5 => {
                let n = [1, 1, 3, 40, 150][random.below(5)];
                if len + n <= 700 {
                    or_full(pairs[i].append(n, &mut random));
                }
            }
            5 if pairs.len() < 6 => {
                let fork = pairs[i].fork();
                pairs.push(fork);
            }
            6 | 7 => {
                let n = random.below(len + 1);
                let left = pairs[i].truncate(n);
                restored += usize::from(0 < left && left < n);
            }
            8 if len > 0 => {
                pairs[i].truncate(len - 1);
            }
            9 => pairs[i].seq.checkpoint(),
            10 if random.below(4) == 0 => assert_eq!(pairs[i].truncate(0), 0),
            11 if pairs.len() > 1 => drop(pairs.swap_remove(i)),
            12 => {
                or_full(pairs[i].reload());
            }
            13 => pairs[i].come_back(),
            14 => drop(pool.prefix_tree().evict(random.below(2) == 0)),
            15 if shifts && len >= KV_BLOCK => {
                let first = random.below(len / KV_BLOCK);
                let n = 1 + random.below(len / KV_BLOCK - first);
                shifted += usize::from(or_full(pairs[i].shift(first..first + n, &mut random)));
            }
            _ => pairs.push(Pair::new(&pool, &layout)),
        }
        if pairs.len() > 8 {
            pairs.truncate(6);
        }
        pairs.iter().for_each(Pair::check);
        if step % 64 == 0 {
            pool.clear_prefixes();
        }
        let (stats, (bytes, n_pages)) = (pool.stats(), held(pairs.iter().map(|p| &p.seq)));
        let cached = pool.prefixes().bytes;
        assert!(
            (bytes..=bytes + cached).contains(&stats.used) && stats.n_pages >= n_pages,
            "step {step}"
        );
        assert!(stats.used + stats.free <= stats.budget);
        for seq in pairs.iter().map(|p| &p.seq) {
            assert!(seq.checkpoints.is_sorted_by(|a, b| a.pos < b.pos));
            assert!(seq.checkpoints.iter().filter(|c| c.marked).count() <= N_MARKED);
        }
    }
    let hits = pool.prefixes().hits;
    eprintln!(
        "{policy:?}: pool full {full} times, {restored} checkpoints restored, {hits} prefixes, {shifted} shifts"
    );
    assert!(
        n_steps < 2000
            || full > 0 && hits > 0 && (restored > 0) != shifts && (shifted > 0) == shifts
    );
    drop(pairs);
    pool.clear_prefixes();
    assert_eq!((pool.stats().used, pool.stats().n_pages), (0, 0));
}

/// 26 layers of one KV head of 256, every sixth sees all, the others 512 positions. By hand: a
/// page of the 22 is `22·64·(256 + 256)·2` bytes, one of the four `4·64·512·2`.
#[test]
fn windows_hold_their_pages_only() {
    let layers = (0..26).map(|i| shape((i % 6 != 5).then_some(512), 1, 256, 256));
    let layout = Arc::new(KvLayout::new(KvType::F16.into(), layers));
    let pool = KvPool::default();
    let mut seq = SeqKv::new(pool.clone(), Arc::clone(&layout));
    for _ in 0..8 {
        seq.reserve(512).unwrap();
        seq.commit(512);
    }
    let (of_window, of_full) = (22 * 64 * 512 * 2, 4 * 64 * 512 * 2);
    assert_eq!(
        seq.checkpoints.iter().map(|c| c.pos).collect::<Vec<_>>(),
        [2048, 4096]
    );
    // The window, which is also the checkpoint at the end, and that of the checkpoint half-way.
    assert_eq!(pool.stats().used, 64 * of_full + (8 + 8) * of_window);
    seq.checkpoints.clear();
    assert_eq!(pool.stats().used, 64 * of_full + 8 * of_window);
    // A token more takes a page; the window begins inside its first.
    seq.reserve(1).unwrap();
    seq.commit(1);
    assert_eq!(pool.stats().used, 65 * of_full + 9 * of_window);
    assert!(layout.bytes(4096, 512) <= 64 * (of_full + of_window));
    // A context of 32,768: all pages of the four, and of the 22 at most batch, window and
    // checkpoints.
    assert!(layout.bytes(32768, 512) <= 512 * of_full + 100 * of_window);
}

/// Where an image ends behind the last border of a page, both are places where a later text may go on.
#[test]
fn a_border_before_an_image_ends_is_a_checkpoint() {
    let layout = KvLayout::new(KvType::F16.into(), [shape(Some(64), 1, 8, 8)]);
    for (image_ends, expected) in [(90, vec![64, 90]), (40, vec![40, 64]), (64, vec![64])] {
        let mut seq = SeqKv::new(KvPool::default(), Arc::new(layout.clone()));
        seq.reserve(100).unwrap();
        seq.commit_at(100, image_ends);
        let found: Vec<usize> = seq.checkpoints.iter().map(|c| c.pos).collect();
        assert_eq!(found, expected, "{image_ends}");
    }
}

#[test]
fn checkpoints_lie_at_growing_distances() {
    let layout = Arc::new(KvLayout::new(
        KvType::F16.into(),
        [shape(Some(64), 1, 8, 8)],
    ));
    let pool = KvPool::default();
    let mut seq = SeqKv::new(pool, layout);
    for _ in 0..1000 {
        seq.reserve(100).unwrap();
        seq.commit(100);
        let len = seq.len();
        assert!(seq.checkpoints.len() <= 16, "{}", seq.checkpoints.len());
        // To go back loses no more than three times as much, or what they are apart at least.
        for n in [len - 1, len - 100, len / 2, len / 10] {
            let before = seq
                .checkpoints
                .iter()
                .rev()
                .find(|c| c.pos <= n)
                .map_or(0, |c| c.pos);
            let lost = if seq.sees_all(n) { 0 } else { n - before };
            assert!(
                lost <= (3 * (len - n)).max(2 * sparse(64)),
                "{lost} lost from {n} of {len}"
            );
        }
    }
}

#[test]
fn ends_of_messages_are_kept() {
    let width = if cfg!(miri) { 2 } else { 8 };
    let layout = Arc::new(KvLayout::new(
        KvType::F16.into(),
        [
            shape(Some(64), 1, width, width),
            shape(None, 1, width, width),
        ],
    ));
    let pool = KvPool::default();
    let mut pair = Pair::new(&pool, &layout);
    let mut random = Random(3);
    for n in [90, 77, 123, 200] {
        pair.append(n, &mut random).unwrap();
        pair.seq.checkpoint();
    }
    for _ in 0..5 {
        pair.append(30, &mut random).unwrap();
    }
    assert_eq!(pair.truncate(600), 490);
    pair.check();
    pair.append(50, &mut random).unwrap();
    assert_eq!(pair.truncate(300), 290);
    pair.check();
    assert!(pair.truncate(200) < 200);
    pair.check();
}

/// 1B shape: 16 layers, 8 KV heads of 64.
#[test]
fn forks_share_pages_and_copy_filled_rows_only() {
    let layout = Arc::new(KvLayout::new(
        KvType::F16.into(),
        vec![shape(None, 8, 64, 64); 16],
    ));
    let page_bytes = layout.groups[0].forms[0].page_bytes as u64;
    assert_eq!(page_bytes, 2 << 20);
    let pool = KvPool::default();
    let mut seq = SeqKv::new(pool.clone(), layout);
    seq.reserve(4096).unwrap();
    seq.commit(4096);
    seq.reserve(31).unwrap();
    for layer in 0..16 {
        let rows = vec![1.0 + layer as f32; 31 * 512];
        seq.append(
            &PoolHandle::alone(),
            Arch::scalar(),
            layer,
            4096,
            &rows,
            &rows,
        )
        .unwrap();
    }
    seq.commit(31);
    assert_eq!(pool.stats().used, 65 * page_bytes);
    let best = (0..20)
        .map(|_| {
            let start = std::time::Instant::now();
            let fork = seq.fork();
            let elapsed = start.elapsed();
            drop(fork);
            elapsed
        })
        .min()
        .unwrap();
    eprintln!("a fork of 4127 tokens takes {best:?}");
    assert!(best < std::time::Duration::from_micros(50));

    let mut fork = seq.fork();
    assert_eq!(pool.stats().used, 65 * page_bytes);
    fork.reserve(1).unwrap();
    assert_eq!(pool.stats().used, 66 * page_bytes);
    let page = fork.tables[0][64].as_ref().unwrap().values::<f16>();
    for (i, rows) in page.chunks_exact(64 * 64).enumerate() {
        // Keys and values of eight heads each.
        let value = f16::from_f32(1.0 + (i / 16) as f32);
        assert!(rows[..31 * 64].iter().all(|&x| x == value), "head {i}");
        assert!(rows[31 * 64..].iter().all(|&x| x == f16::ZERO), "head {i}");
    }
    // The other goes on in the page that is now its own.
    seq.reserve(1).unwrap();
    assert_eq!(pool.stats().used, 66 * page_bytes);
}

#[test]
fn what_half_precision_cannot_hold_is_an_error() {
    let shapes = [shape(None, 2, 4, 4); 2];
    let pool = KvPool::default();
    for (kind, x, part, fits) in [
        (KvType::F16, 65504.0, 0, true),
        (KvType::F16, 65520.0, 0, false),
        (KvType::F16, -1e9, 1, false),
        (KvType::F32, -1e9, 1, true),
        // Not by rounding.
        (KvType::F16, f32::INFINITY, 0, true),
        (KvType::F16, f32::NAN, 1, true),
    ] {
        let mut seq = SeqKv::new(pool.clone(), Arc::new(KvLayout::new(kind.into(), shapes)));
        seq.reserve(70).unwrap();
        let mut rows = [vec![1.0; 70 * 8], vec![1.0; 70 * 8]];
        rows[part][67 * 8 + 5] = x;
        let outcome = seq.append(
            &PoolHandle::alone(),
            Arch::scalar(),
            1,
            0,
            &rows[0],
            &rows[1],
        );
        let expected = [KvPart::Key, KvPart::Value][part];
        match outcome {
            Ok(()) => assert!(fits, "{x} {kind:?}"),
            Err(KvError::Overflow { layer: 1, part }) => {
                assert!(!fits && part == expected, "{x} {kind:?}")
            }
            Err(e) => panic!("{e}"),
        }
    }
}
