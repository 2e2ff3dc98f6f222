//! Topics: texts sorted, as they come, by which tokens follow which, and an adapter of inner layers for each.

use crate::cache::{SEED, mix};
use crate::lora::Adapter;
use std::sync::Arc;

/// Most topics: for a further one, the two that are most alike become one.
pub(crate) const MAX_TOPICS: usize = 8;
/// Kinds of pairs that are told apart: pairs are sorted into them by a hash.
pub(crate) const KINDS: u32 = 1 << 16;
/// Pairs of ordinary text that each topic begins with.
const PRIOR: f64 = 2000.0;
/// By how many nats a text must be likelier in a new topic than in a known one to begin it.
const NEW: f64 = 14.0;

/// How often each kind of pair of adjacent tokens was met, in order of kinds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Counts {
    pub(crate) each: Vec<(u32, u32)>,
    pub(crate) total: u64,
}

impl Counts {
    pub(crate) fn of(tokens: &[u32]) -> Counts {
        let kind = |pair: &[u32]| {
            let hash = mix(mix(SEED, &pair[0].to_le_bytes()), &pair[1].to_le_bytes());
            (hash >> 32) as u32 % KINDS
        };
        let mut kinds: Vec<u32> = tokens.windows(2).map(kind).collect();
        kinds.sort_unstable();
        let each = kinds.chunk_by(|a, b| a == b).map(|run| (run[0], run.len() as u32)).collect();
        Counts { each, total: kinds.len() as u64 }
    }

    pub(crate) fn add(&mut self, other: &Counts) {
        let mut all = [&self.each[..], &other.each].concat();
        all.sort_by_key(|(kind, _)| *kind);
        let same = all.chunk_by(|a, b| a.0 == b.0);
        self.each = same.map(|run| (run[0].0, run.iter().fold(0, |n: u32, (_, m)| n.saturating_add(*m)))).collect();
        self.total = self.total.saturating_add(other.total);
    }

    fn get(&self, kind: u32) -> f64 {
        self.each.binary_search_by_key(&kind, |(kind, _)| *kind).map_or(0.0, |at| f64::from(self.each[at].1))
    }
}

/// `ln Γ(x)` for `x > 0`, by Stirling's series.
fn ln_gamma(mut x: f64) -> f64 {
    let mut below = 0.0;
    while x < 8.0 {
        below += x.ln();
        x += 1.0;
    }
    let series = (1.0 / 12.0 - (1.0 / 360.0 - 1.0 / (1260.0 * x * x)) / (x * x)) / x;
    (x - 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + series - below
}

/// Texts with the same pairs of tokens, and what was learnt of them in inner layers.
#[derive(Clone, Debug)]
pub(crate) struct Topic {
    /// Its number, which no other topic gets.
    pub(crate) id: u32,
    pub(crate) counts: Counts,
    pub(crate) n_requests: u64,
    pub(crate) trained: Trained,
}

/// What is known of a topic.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TopicStatus {
    /// Its number, which no other topic of the folder gets.
    pub id: u32,
    /// Texts that were sorted into it, and their tokens.
    pub n_requests: u64,
    /// Of them, tokens.
    pub n_tokens: u64,
    /// Whether it has an adapter of inner layers.
    pub has_adapter: bool,
    /// Mean divergence from the model on control text of its adapter alone, in nats.
    pub divergence: f64,
}

/// An adapter of inner layers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trained {
    pub(crate) adapter: Option<Arc<Adapter>>,
    /// Mean `KL(base ‖ adapted)` of the adapter alone on control text, in nats.
    pub(crate) divergence: f64,
}

/// All topics; see the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Topics {
    pub(crate) all: Vec<Topic>,
    /// Number of the next topic.
    pub(crate) next: u32,
}

impl Topics {
    pub(crate) fn get(&self, id: u32) -> Option<&Topic> {
        self.all.iter().find(|topic| topic.id == id)
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> Option<&mut Topic> {
        self.all.iter_mut().find(|topic| topic.id == id)
    }

    pub(crate) fn ids(&self) -> Vec<u32> {
        self.all.iter().map(|topic| topic.id).collect()
    }

    /// What was learnt of a topic; nothing of an unknown one.
    pub(crate) fn trained(&self, id: u32) -> Trained {
        self.get(id).map(|topic| topic.trained.clone()).unwrap_or_default()
    }

    /// What each topic begins with of a kind: its part of `ordinary` text and that of all topics.
    fn prior(&self, kind: u32, ordinary: &Counts) -> f64 {
        let all = || self.all.iter().map(|topic| &topic.counts).chain([ordinary]);
        let n = f64::from(KINDS) + all().map(|counts| counts.total as f64).sum::<f64>();
        PRIOR * (1.0 + all().map(|counts| counts.get(kind)).sum::<f64>()) / n
    }

    /// `ln p` of a text's pairs in each topic, and in a new one: draws from a Pólya urn, in which what was drawn becomes
    /// likelier. So rare pairs, once met, tell much, and ordinary ones little.
    fn likelihoods(&self, text: &Counts, ordinary: &Counts) -> (Vec<f64>, f64) {
        let first: Vec<(u32, u32, f64)> = text.each.iter().map(|&(k, n)| (k, n, self.prior(k, ordinary))).collect();
        let likelihood = |own: &Counts| {
            let drawn = first.iter().map(|&(kind, n, prior)| {
                let begin = prior + own.get(kind);
                (0..n).map(|i| (begin + f64::from(i)).ln()).sum::<f64>()
            });
            let urn = PRIOR + own.total as f64;
            drawn.sum::<f64>() - (0..text.total).map(|i| (urn + i as f64).ln()).sum::<f64>()
        };
        (self.all.iter().map(|topic| likelihood(&topic.counts)).collect(), likelihood(&Counts::default()))
    }

    /// By how many nats the texts of two topics are likelier as texts of two than of one.
    fn distance(&self, one: &Counts, other: &Counts, ordinary: &Counts) -> f64 {
        // Kinds that one of them has alone are as likely in either case.
        let both = one.each.iter().map(|&(kind, n)| (kind, f64::from(n), other.get(kind))).filter(|(.., m)| *m > 0.0);
        let nearer = both.map(|(kind, n, m)| {
            let prior = self.prior(kind, ordinary);
            ln_gamma(prior + n + m) + ln_gamma(prior) - ln_gamma(prior + n) - ln_gamma(prior + m)
        });
        let (n, m) = (one.total as f64, other.total as f64);
        let urns = ln_gamma(PRIOR + n + m) + ln_gamma(PRIOR) - ln_gamma(PRIOR + n) - ln_gamma(PRIOR + m);
        urns - nearer.sum::<f64>()
    }

    /// Replaces what was learnt of a topic, if it is known.
    pub(crate) fn set_trained(&mut self, id: u32, trained: Trained) {
        if let Some(topic) = self.get_mut(id) {
            topic.trained = trained;
        }
    }

    /// What is known of each topic.
    pub(crate) fn status(&self) -> Vec<TopicStatus> {
        let status = |topic: &Topic| TopicStatus {
            id: topic.id,
            n_requests: topic.n_requests,
            n_tokens: topic.counts.total + topic.n_requests,
            has_adapter: topic.trained.adapter.is_some(),
            divergence: topic.trained.divergence,
        };
        self.all.iter().map(status).collect()
    }

    /// The topic whose text a text is likelier to be than of none.
    pub(crate) fn nearest(&self, text: &Counts, ordinary: &Counts) -> Option<u32> {
        let (each, none) = self.likelihoods(text, ordinary);
        let (topic, likelihood) = self.all.iter().zip(each).max_by(|a, b| a.1.total_cmp(&b.1))?;
        (likelihood > none).then_some(topic.id)
    }

    /// The topic that a text belongs to, which may be a new one.
    pub(crate) fn sort(&mut self, text: &Counts, ordinary: &Counts) -> u32 {
        let (each, new) = self.likelihoods(text, ordinary);
        match self.all.iter().zip(each).max_by(|a, b| a.1.total_cmp(&b.1)) {
            Some((topic, likelihood)) if likelihood + NEW >= new => topic.id,
            _ => {
                if self.all.len() >= MAX_TOPICS {
                    self.merge(ordinary);
                }
                let id = self.next;
                self.next += 1;
                let (counts, trained) = Default::default();
                self.all.push(Topic { id, counts, n_requests: 0, trained });
                id
            }
        }
    }

    /// Adds a text to a topic.
    pub(crate) fn add(&mut self, id: u32, text: &Counts) {
        if let Some(topic) = self.get_mut(id) {
            topic.counts.add(text);
            topic.n_requests += 1;
        }
    }

    /// Makes one of the two topics that are most alike, with what was learnt of the larger one.
    fn merge(&mut self, ordinary: &Counts) {
        let pairs = (0..self.all.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
        let distance = |&(i, j): &(usize, usize)| self.distance(&self.all[i].counts, &self.all[j].counts, ordinary);
        if let Some((i, j)) = pairs.min_by(|a, b| distance(a).total_cmp(&distance(b))) {
            let other = self.all.remove(i);
            let topic = &mut self.all[j];
            if other.counts.total > topic.counts.total {
                (topic.id, topic.trained) = (other.id, other.trained);
            }
            topic.counts.add(&other.counts);
            topic.n_requests += other.n_requests;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of a kind by chance, every fourth an ordinary one.
    fn text(kind: u32, seed: u32) -> Counts {
        let mut state = u64::from(seed) << 8 | u64::from(kind);
        let tokens = (0..128).map(|i| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let x = (state >> 40) as u32;
            if i % 4 == 0 { x % 50 } else { 50 + 8 * kind + x % 8 }
        });
        Counts::of(&tokens.collect::<Vec<_>>())
    }

    #[test]
    fn texts_of_a_kind_share_a_topic() {
        let ordinary = Counts::of(&(0..5000).map(|i| i % 50).collect::<Vec<_>>());
        let mut topics = Topics::default();
        for seed in 0..20 {
            for kind in 0..3 {
                let text = text(kind, seed);
                let id = topics.sort(&text, &ordinary);
                assert_eq!(id, kind, "{seed}");
                topics.add(id, &text);
            }
        }
        assert_eq!(topics.all.len(), 3);
        assert_eq!(topics.nearest(&text(1, 99), &ordinary), Some(1));
        // Of none of them.
        assert_eq!(topics.nearest(&ordinary, &ordinary), None);
        assert_eq!(topics.nearest(&text(7, 99), &ordinary), None);
    }

    /// The number of topics is bounded; what was met stays counted.
    #[test]
    fn topics_are_bounded() {
        let mut topics = Topics::default();
        for kind in 0..20 {
            for seed in 0..3 {
                let text = text(kind, seed);
                let id = topics.sort(&text, &Counts::default());
                topics.add(id, &text);
                assert!(topics.all.len() <= MAX_TOPICS);
            }
        }
        assert_eq!(topics.all.iter().map(|topic| topic.n_requests).sum::<u64>(), 60);
        assert_eq!(topics.all.iter().map(|topic| topic.counts.total).sum::<u64>(), 60 * 127);
        let mut ids: Vec<u32> = topics.all.iter().map(|topic| topic.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() == topics.all.len() && ids.iter().all(|id| *id < topics.next));
    }
}
