use crate::arch::KvType;
use crate::kv::KvPool;
use crate::kv::prefix::*;
use std::collections::HashSet;

/// A page of 64 bytes: at each position a byte that depends on all tokens up to there.
const PAGE: u64 = KV_BLOCK as u64;

fn bytes(tokens: &[CachedToken]) -> Vec<u8> {
    let mix = |hash: &mut u32, t: &CachedToken| {
        *hash = (*hash ^ (2 * t.token + u32::from(t.generated) + 1))
            .wrapping_mul(0x9E37_79B1)
            .rotate_left(13);
        Some(*hash as u8)
    };
    tokens.iter().scan(7, mix).collect()
}

fn table(pool: &KvPool, bytes: &[u8]) -> BlockTable {
    let page = |rows: &[u8]| {
        let mut page = pool.page(KV_BLOCK, [(KvType::F16, PAGE / 2); 2]).unwrap();
        Arc::get_mut(&mut page).unwrap().values_mut()[..rows.len()].copy_from_slice(rows);
        Some(page)
    };
    bytes.chunks(KV_BLOCK).map(page).collect()
}

/// With checkpoints: one complete table, and one that has only the last page before each of
/// `ends`.
fn stored(pool: &KvPool, tokens: &[CachedToken], ends: &[usize]) -> Stored {
    let bytes = bytes(tokens);
    let checkpoint = |&pos: &usize| Checkpoint {
        pos,
        marked: false,
        pages: vec![(
            1,
            (pos - 1) / KV_BLOCK,
            table(pool, &bytes[..pos]).pop().unwrap().unwrap(),
        )],
    };
    Stored {
        tokens: tokens.to_vec(),
        tables: vec![table(pool, &bytes), Vec::new()],
        checkpoints: ends.iter().map(checkpoint).collect(),
        by_checkpoint: !ends.is_empty(),
    }
}

fn key(salt: usize) -> PrefixKey {
    PrefixKey {
        model: 1,
        device: "scalar".into(),
        arithmetic: 1,
        adapters: 0,
        policy: KvPolicy::default(),
        ropes: 2,
        exact: false,
        salt: salt.to_string(),
    }
}

impl PrefixTree {
    /// Counts, leaves, ranges and links are consistent with the nodes.
    fn check(&self) {
        let mut held = PinnedPages::default();
        let mut leaves = BTreeSet::new();
        for (id, node) in self
            .nodes
            .iter()
            .enumerate()
            .filter_map(|(id, node)| Some((id, node.as_ref()?)))
        {
            node.pages_from(node.start).for_each(|page| held.add(page));
            match node.parent {
                None => {
                    assert!(self.roots.values().any(|&root| root == id) && node.tokens.is_empty());
                    assert!(!node.children.is_empty());
                }
                Some(parent) => {
                    assert_eq!(
                        (self.node(parent).end(), node.tokens.is_empty()),
                        (node.start, false)
                    );
                    assert_eq!(self.node(parent).children.get(&node.tokens[0]), Some(&id));
                    assert!(self.node(parent).last_used >= node.last_used);
                    if node.children.is_empty() {
                        leaves.insert((node.last_used, id));
                    }
                }
            }
            assert!(
                node.tables
                    .iter()
                    .all(|table| table.len() <= node.pages_to(node.end()))
            );
            assert!(node.checkpoints.is_sorted_by(|a, b| a.pos < b.pos));
            assert!(
                node.checkpoints
                    .iter()
                    .all(|c| node.start < c.pos && c.pos <= node.end())
            );
        }
        assert_eq!(
            (&held.counts, held.bytes),
            (&self.held.counts, self.held.bytes)
        );
        assert_eq!(leaves, self.leaves);
        assert_eq!(
            self.nodes.iter().filter(|node| node.is_none()).count(),
            self.free.len()
        );
        assert!(self.held.bytes <= self.budget);
    }
}

/// Tokens that often share a prefix with others: one of three runs, changed from a random
/// position on.
fn text(random: &mut impl FnMut(usize) -> usize) -> Vec<CachedToken> {
    let (run, n) = (random(3), random(400) + 1);
    let (from, change) = (random(2 * n), random(3));
    let token = |i: usize| {
        let token = (i * (run + 1)) % 17 + if i >= from { change } else { 0 };
        CachedToken {
            token: token as u32,
            generated: i % 100 > 80,
            ..CachedToken::default()
        }
    };
    (0..n).map(token).collect()
}

fn operate(budget: u64, by_checkpoint: bool, n_steps: usize) {
    let pool = KvPool::default();
    pool.set_prefix_budget(budget);
    let mut state = 5u32;
    let mut random = |n: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % n
    };
    let (mut all, mut in_use, mut n_found) = (vec![Vec::new(); 2], Vec::new(), 0);
    for step in 0..n_steps {
        let (salt, tokens) = (random(2), text(&mut random));
        match random(4) {
            0 => {
                let ends = [tokens.len() / 2, tokens.len()];
                let ends = if by_checkpoint {
                    &ends[usize::from(ends[0] == 0)..]
                } else {
                    &[]
                };
                let stored = stored(&pool, &tokens, ends);
                pool.prefix_tree().insert(key(salt), stored);
                all[salt].push(tokens);
            }
            1 if budget < u64::MAX && random(3) == 0 => drop(pool.prefix_tree().evict(false)),
            2 if !in_use.is_empty() => drop(in_use.swap_remove(random(in_use.len()))),
            _ => {
                let any = random(2) == 0;
                let equal =
                    |(a, b): &(&CachedToken, &CachedToken)| a.token == b.token && (any || a == b);
                let same =
                    |other: &Vec<CachedToken>| other.iter().zip(&tokens).take_while(equal).count();
                let longest = all[salt].iter().map(same).max().unwrap_or(0);
                let found = pool.prefix_tree().find(&key(salt), &tokens, 1, any);
                let n = found.as_ref().map_or(0, |found| found.tokens.len());
                // Everything that was stored is found while nothing is dropped.
                assert!(
                    n == longest || n < longest && (by_checkpoint || budget < u64::MAX),
                    "{n} of {longest}"
                );
                let Some(found) = found else { continue };
                assert_eq!(
                    found.tokens.iter().zip(&tokens).take_while(equal).count(),
                    n
                );
                let expected = bytes(&found.tokens);
                for (rows, page) in expected.chunks(KV_BLOCK).zip(&found.tables[0]) {
                    assert_eq!(
                        page.as_ref().unwrap().values::<u8>()[..rows.len()],
                        *rows,
                        "step {step}"
                    );
                }
                assert_eq!(found.checkpoint.is_some(), by_checkpoint);
                if let Some(Checkpoint { pos, pages, .. }) = &found.checkpoint {
                    assert_eq!((*pos, pages[0].1), (n, (n - 1) / KV_BLOCK));
                    let rows = &expected[pages[0].1 * KV_BLOCK..];
                    assert_eq!(
                        pages[0].2.values::<u8>()[..rows.len()],
                        *rows,
                        "step {step}"
                    );
                }
                n_found += 1;
                in_use.push(found);
            }
        }
        pool.prefix_tree().check();
    }
    assert!(
        n_found > n_steps / 10,
        "{n_found} of {n_steps} found something"
    );
    let held: HashSet<_> = in_use
        .iter()
        .flat_map(|p: &Prefix| {
            p.tables[0]
                .iter()
                .flatten()
                .chain(p.checkpoint.iter().flat_map(Checkpoint::pages))
        })
        .map(Arc::as_ptr)
        .collect();
    // Pages in use stay in the pool, and no others.
    pool.clear_prefixes();
    assert_eq!(pool.stats().n_pages, held.len());
    drop(in_use);
    assert_eq!((pool.stats().used, pool.stats().n_pages), (0, 0));
}

#[test]
fn random_operations_against_a_list() {
    let n = if cfg!(miri) { 20 } else { 3000 };
    for by_checkpoint in [false, true] {
        operate(u64::MAX, by_checkpoint, n);
        operate(60 * PAGE, by_checkpoint, n);
    }
}

/// The limits: 75 ns per token, 1 ms among 10,000 prefixes.
#[test]
fn lookups_take_little() {
    let pool = KvPool::default();
    let texts: Vec<Vec<_>> = (0..if cfg!(miri) { 10 } else { 10_000 })
        .map(|i| {
            (0..100)
                .map(|j| CachedToken {
                    token: if j < 50 { j } else { i * j },
                    ..CachedToken::default()
                })
                .collect()
        })
        .collect();
    for text in &texts {
        let stored = stored(&pool, text, &[]);
        pool.prefix_tree().insert(key(0), stored);
    }
    let long = CachedToken {
        token: 3,
        ..CachedToken::default()
    };
    let long = vec![long; 100_000];
    let stored = stored(&pool, &long, &[]);
    pool.prefix_tree().insert(key(1), stored);
    let time = |salt, text: &[CachedToken]| {
        let once = || {
            let start = std::time::Instant::now();
            let found = pool.prefix_tree().find(&key(salt), text, 1, true);
            let elapsed = start.elapsed();
            assert_eq!(found.unwrap().tokens.len(), text.len());
            elapsed
        };
        (0..5).map(|_| once()).min().unwrap()
    };
    let (of_many, of_long) = (time(0, &texts[texts.len() / 2]), time(1, &long));
    eprintln!(
        "among {} prefixes {of_many:?}; of 100,000 tokens {of_long:?}",
        texts.len()
    );
    if !cfg!(miri) {
        assert!(of_many.as_micros() < 1000 && of_long.as_nanos() < 75 * 100_000);
    }
}
