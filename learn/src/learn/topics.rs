//! Topics: texts sorted, as they come, by how often they use each token, and an adapter of inner
//! layers for each.

use ruvllm::lora::Adapter;
use std::sync::Arc;

/// Most topics: for a further one, the two that are most alike become one.
pub(crate) const MAX_TOPICS: usize = 8;
/// Tokens of ordinary text that each topic begins with.
const PRIOR: f64 = 300.0;
/// Tokens that tell what a topic is about.
const WORDS: usize = 16;
/// By how many nats a text's tokens must be likelier in a new topic than in a known one to begin
/// it.
const NEW: f64 = 14.0;

/// How often each token was met, in order of tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Counts {
    pub(crate) each: Vec<(u32, u32)>,
    pub(crate) total: u64,
}

impl Counts {
    pub(crate) fn of(tokens: &[u32]) -> Counts {
        let mut sorted = tokens.to_vec();
        sorted.sort_unstable();
        let each = sorted
            .chunk_by(|a, b| a == b)
            .map(|run| (run[0], run.len() as u32))
            .collect();
        Counts {
            each,
            total: tokens.len() as u64,
        }
    }

    pub(crate) fn add(&mut self, other: &Counts) {
        let mut all = [&self.each[..], &other.each].concat();
        all.sort_by_key(|(token, _)| *token);
        let same = all.chunk_by(|a, b| a.0 == b.0);
        self.each = same
            .map(|run| {
                (
                    run[0].0,
                    run.iter().fold(0, |n: u32, (_, m)| n.saturating_add(*m)),
                )
            })
            .collect();
        self.total = self.total.saturating_add(other.total);
    }

    fn get(&self, token: u32) -> f64 {
        self.each
            .binary_search_by_key(&token, |(token, _)| *token)
            .map_or(0.0, |at| f64::from(self.each[at].1))
    }

    /// By how many nats both are likelier as texts of two topics than of one.
    fn distance(&self, other: &Counts) -> f64 {
        let (n, m) = (self.total as f64, other.total as f64);
        // `Σ x·ln x` of the parts, less that of the whole.
        let excess = |x: f64, y: f64| x * (x / (x + y)).ln() + y * (y / (x + y)).ln();
        let both = self
            .each
            .iter()
            .map(|(token, x)| (f64::from(*x), other.get(*token)))
            .filter(|(_, y)| *y > 0.0);
        both.map(|(x, y)| excess(x, y)).sum::<f64>()
            - if n > 0.0 && m > 0.0 {
                excess(n, m)
            } else {
                0.0
            }
    }
}

/// Texts that use the same tokens, and what was learnt of them in inner layers.
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
    /// Tokens that it uses more than ordinary text and other topics do, the most telling first.
    pub words: Vec<u32>,
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
        self.get(id)
            .map(|topic| topic.trained.clone())
            .unwrap_or_default()
    }

    /// `ln p` of a text's tokens in each topic, and in a new one: draws from a Pólya urn, in which
    /// each token that was drawn becomes likelier. What is in the urn first is `ordinary` text
    /// and that of all topics, as if there were [`PRIOR`] tokens of it, and the topic's own. So
    /// tokens of rare kinds, once met, tell much, and ordinary ones little.
    fn likelihoods(&self, text: &Counts, ordinary: &Counts, n_vocab: usize) -> (Vec<f64>, f64) {
        let all = || self.all.iter().map(|topic| &topic.counts).chain([ordinary]);
        let n = n_vocab as f64 + all().map(|counts| counts.total as f64).sum::<f64>();
        let of = |token: u32| 1.0 + all().map(|counts| counts.get(token)).sum::<f64>();
        let first: Vec<(u32, u32, f64)> = text
            .each
            .iter()
            .map(|&(t, k)| (t, k, PRIOR * of(t) / n))
            .collect();
        let likelihood = |own: &Counts| {
            let drawn = first.iter().map(|&(token, k, prior)| {
                let begin = prior + own.get(token);
                (0..k).map(|i| (begin + f64::from(i)).ln()).sum::<f64>()
            });
            let urn = PRIOR + own.total as f64;
            drawn.sum::<f64>() - (0..text.total).map(|i| (urn + i as f64).ln()).sum::<f64>()
        };
        (
            self.all
                .iter()
                .map(|topic| likelihood(&topic.counts))
                .collect(),
            likelihood(&Counts::default()),
        )
    }

    /// Replaces what was learnt of a topic, if it is known.
    pub(crate) fn set_trained(&mut self, id: u32, trained: Trained) {
        if let Some(topic) = self.get_mut(id) {
            topic.trained = trained;
        }
    }

    /// What is known of each topic.
    pub(crate) fn status(&self, ordinary: &Counts) -> Vec<TopicStatus> {
        let all = || self.all.iter().map(|topic| &topic.counts).chain([ordinary]);
        let total: f64 = all().map(|counts| counts.total as f64).sum();
        let status = |topic: &Topic| {
            let n = topic.counts.total as f64;
            // How many nats it explains that the token is the topic's.
            let told = |&(token, count): &(u32, u32)| {
                let count = f64::from(count);
                let expected = n * all().map(|counts| counts.get(token)).sum::<f64>() / total;
                (count * (count / expected).ln(), token)
            };
            let mut words: Vec<(f64, u32)> = topic.counts.each.iter().map(told).collect();
            words.sort_by(|a, b| b.0.total_cmp(&a.0));
            TopicStatus {
                id: topic.id,
                n_requests: topic.n_requests,
                n_tokens: topic.counts.total,
                has_adapter: topic.trained.adapter.is_some(),
                divergence: topic.trained.divergence,
                words: words
                    .into_iter()
                    .take(WORDS)
                    .map(|(_, token)| token)
                    .collect(),
            }
        };
        self.all.iter().map(status).collect()
    }

    /// The topic whose text a text is likelier to be than of none.
    pub(crate) fn nearest(&self, text: &Counts, ordinary: &Counts, n_vocab: usize) -> Option<u32> {
        let (each, none) = self.likelihoods(text, ordinary, n_vocab);
        let (topic, likelihood) = self
            .all
            .iter()
            .zip(each)
            .max_by(|a, b| a.1.total_cmp(&b.1))?;
        (likelihood > none).then_some(topic.id)
    }

    /// The topic that a text belongs to, which may be a new one.
    pub(crate) fn sort(&mut self, text: &Counts, ordinary: &Counts, n_vocab: usize) -> u32 {
        let (each, new) = self.likelihoods(text, ordinary, n_vocab);
        match self.all.iter().zip(each).max_by(|a, b| a.1.total_cmp(&b.1)) {
            Some((topic, likelihood)) if likelihood + NEW >= new => topic.id,
            _ => {
                if self.all.len() >= MAX_TOPICS {
                    self.merge();
                }
                let id = self.next;
                self.next += 1;
                let (counts, trained) = Default::default();
                self.all.push(Topic {
                    id,
                    counts,
                    n_requests: 0,
                    trained,
                });
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
    fn merge(&mut self) {
        let pairs = (0..self.all.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
        let distance = |&(i, j): &(usize, usize)| self.all[i].counts.distance(&self.all[j].counts);
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
    use crate::learn::topics::*;

    /// Tokens of a kind by chance, every fourth an ordinary one.
    fn text(kind: u32, seed: u32) -> Counts {
        let mut state = u64::from(seed) << 8 | u64::from(kind);
        let tokens = (0..128).map(|i| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let x = (state >> 40) as u32;
            if i % 4 == 0 {
                x % 50
            } else {
                50 + 40 * kind + x % 40
            }
        });
        Counts::of(&tokens.collect::<Vec<_>>())
    }

    const N_VOCAB: usize = 1000;

    #[test]
    fn texts_of_a_kind_share_a_topic() {
        let ordinary = Counts::of(&(0..5000).map(|i| i % 50).collect::<Vec<_>>());
        let mut topics = Topics::default();
        for seed in 0..20 {
            for kind in 0..3 {
                let text = text(kind, seed);
                let id = topics.sort(&text, &ordinary, N_VOCAB);
                assert_eq!(id, kind, "{seed}");
                topics.add(id, &text);
            }
        }
        assert_eq!(topics.all.len(), 3);
        assert_eq!(topics.nearest(&text(1, 99), &ordinary, N_VOCAB), Some(1));
        // Of none of them.
        assert_eq!(topics.nearest(&ordinary, &ordinary, N_VOCAB), None);
        assert_eq!(topics.nearest(&text(7, 99), &ordinary, N_VOCAB), None);
    }

    /// The number of topics is bounded; what was met stays counted.
    #[test]
    fn topics_are_bounded() {
        let mut topics = Topics::default();
        for kind in 0..20 {
            for seed in 0..3 {
                let text = text(kind, seed);
                let id = topics.sort(&text, &Counts::default(), N_VOCAB);
                topics.add(id, &text);
                assert!(topics.all.len() <= MAX_TOPICS);
            }
        }
        assert_eq!(
            topics.all.iter().map(|topic| topic.n_requests).sum::<u64>(),
            60
        );
        assert_eq!(
            topics
                .all
                .iter()
                .map(|topic| topic.counts.total)
                .sum::<u64>(),
            60 * 128
        );
        let mut ids: Vec<u32> = topics.all.iter().map(|topic| topic.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() == topics.all.len() && ids.iter().all(|id| *id < topics.next));
    }
}
