//! Random trees of prompts through the prefix cache: whatever was forked, rewound, unloaded,
//! evicted or computed with adapters before, a sequence has the bits of a cold run.

use crate::common::{cases, emulated};
use crate::prefix::{cold, forgetful, plain};
use crate::run::engine;
use crate::tiny::{N_VOCAB, Tiny};
use proptest::prelude::*;
use proptest::sample::Index;
use ruvllm::Model;
use ruvllm::engine::EngineOptions;
use ruvllm::kv::KvError;
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Session, SessionError};
use std::num::NonZeroUsize;
use std::sync::Arc;

/// A path from the root of the tree of prompts: at each node, one of three texts follows.
type Path = Vec<(u8, usize)>;

/// What is done to the sessions of an engine.
#[derive(Clone, Debug)]
enum Step {
    /// A session without an adapter, or with one of two, begins with a prompt.
    Begin(usize, Path),
    /// It goes on with a prompt, or with so many generated tokens.
    Prompt(Index, Path),
    Generate(Index, usize),
    Fork(Index),
    /// It forgets so many of its last tokens.
    Rewind(Index, usize),
    /// Its pages go to the cache, to come back or be computed again.
    Unload(Index),
    /// It ends, and leaves its pages to the cache.
    End(Index),
    /// The cache may hold so many KiB.
    Budget(u64),
}

fn path() -> impl Strategy<Value = Path> {
    prop::collection::vec((0..3u8, 1..90usize), 1..4)
}

fn step() -> impl Strategy<Value = Step> {
    let of = any::<Index>;
    prop_oneof![
        4 => (0..3usize, path()).prop_map(|(adapter, path)| Step::Begin(adapter, path)),
        2 => (of(), path()).prop_map(|(i, path)| Step::Prompt(i, path)),
        2 => (of(), 1..80usize).prop_map(|(i, n)| Step::Generate(i, n)),
        1 => of().prop_map(Step::Fork),
        1 => (of(), 1..150usize).prop_map(|(i, n)| Step::Rewind(i, n)),
        1 => of().prop_map(Step::Unload),
        3 => of().prop_map(Step::End),
        1 => (0..200u64).prop_map(Step::Budget),
    ]
}

/// The tokens along a path. A text is longer or shorter, but always begins alike.
fn tokens(path: &Path, seed: usize) -> Vec<u32> {
    let mut seed = seed;
    let mut tokens = Vec::new();
    for &(branch, n) in path {
        seed = seed * 3 + usize::from(branch) + 1;
        tokens.extend((0..n).map(|i| ((i * 31 + seed * 7 + i * i % 11) % N_VOCAB) as u32));
    }
    tokens
}

fn adapters(model: &Model) -> Vec<Option<Arc<Adapter>>> {
    let adapter = |scale: f32| {
        let mut adapter = Adapter::zeros(model, 2, 1, |_| true).unwrap();
        adapter.terms_mut().for_each(|(i, term)| {
            let (a, b) = term.parts_mut();
            let values = a.iter_mut().chain(b).enumerate();
            values.for_each(|(j, x)| *x = ((i + j) % 7) as f32 * scale - 0.03);
        });
        Some(Arc::new(adapter))
    };
    vec![None, adapter(0.01), adapter(0.02)]
}

/// A session, and what it was given: each token, and whether it was generated.
struct Text {
    session: Session,
    adapter: usize,
    tokens: Vec<(u32, bool)>,
}

struct House {
    options: SessionOptions,
    engine: Engine,
    /// Without a cache.
    cold: Engine,
    /// Empty sessions, of which others are forks, with each adapter.
    empty: Vec<Session>,
    adapters: Vec<Option<Arc<Adapter>>>,
    texts: Vec<Text>,
}

impl House {
    fn new(model: &Model, options: SessionOptions, n_pages: Option<u64>) -> House {
        let page = {
            let mut session = engine(model, 1).session_with(&cold(&options)).unwrap();
            session.prefill(&[1]).unwrap();
            session.engine().pool().stats().used
        };
        let engine_options = EngineOptions {
            n_threads: NonZeroUsize::new(2),
            kv_budget: n_pages.map(|n| n * page),
            ..Default::default()
        };
        let engine = Engine::new(model, &engine_options).unwrap();
        let adapters = adapters(model);
        let empty = adapters.iter().map(|adapter| {
            let mut session = engine.session_with(&options).unwrap();
            if let Some(adapter) = adapter {
                session.adapters().attach(Arc::clone(adapter), 1.0).unwrap();
            }
            session
        });
        House {
            empty: empty.collect(),
            cold: crate::run::engine(model, 1),
            engine,
            options,
            adapters,
            texts: Vec::new(),
        }
    }

    /// Logits of a session that has never seen a cache.
    fn expected(&self, text: &Text) -> Vec<f32> {
        let mut session = self.cold.session_with(&cold(&self.options)).unwrap();
        if let Some(adapter) = &self.adapters[text.adapter] {
            session.adapters().attach(Arc::clone(adapter), 1.0).unwrap();
        }
        for run in text.tokens.chunk_by(|a, b| a.1 == b.1) {
            let tokens: Vec<u32> = run.iter().map(|(token, _)| *token).collect();
            if run[0].1 {
                tokens
                    .iter()
                    .for_each(|&token| session.decode(token).unwrap());
            } else {
                session.prefill(&tokens).unwrap();
            }
        }
        session.logits().to_vec()
    }

    /// Appends to text `i`; one that finds no room ends.
    fn append(&mut self, i: usize, tokens: &[u32], generated: bool) -> Result<(), TestCaseError> {
        let n_ctx = self.texts[i].session.sequence().n_ctx();
        for run in tokens.chunks(if generated { 1 } else { tokens.len() }) {
            let text = &mut self.texts[i];
            if text.tokens.len() + run.len() > n_ctx {
                return Ok(());
            }
            let outcome = match generated {
                true => text.session.decode(run[0]),
                false => text.session.prefill(run),
            };
            match outcome {
                Ok(()) => text
                    .tokens
                    .extend(run.iter().map(|&token| (token, generated))),
                Err(SessionError::Kv(KvError::PoolFull { .. })) => {
                    self.texts.swap_remove(i);
                    return Ok(());
                }
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            }
        }
        let text = &self.texts[i];
        prop_assert_eq!(text.session.logits(), &self.expected(text)[..]);
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        let n = self.texts.len();
        match step {
            Step::Begin(adapter, path) => {
                self.texts.push(Text {
                    session: self.empty[*adapter].fork().unwrap(),
                    adapter: *adapter,
                    tokens: Vec::new(),
                });
                self.append(n, &tokens(path, 0), false)?;
            }
            Step::Budget(kib) => self.engine.pool().set_prefix_budget(kib << 10),
            _ if n == 0 => {}
            Step::Prompt(i, path) => self.append(i.index(n), &tokens(path, 5), false)?,
            Step::Generate(i, count) => {
                let path = vec![(1, *count)];
                self.append(i.index(n), &tokens(&path, 9), true)?;
            }
            Step::Fork(i) => {
                let Text {
                    session,
                    adapter,
                    tokens,
                } = &self.texts[i.index(n)];
                let fork = Text {
                    session: session.fork().unwrap(),
                    adapter: *adapter,
                    tokens: tokens.clone(),
                };
                self.texts.push(fork);
            }
            Step::Rewind(i, count) => {
                let text = &mut self.texts[i.index(n)];
                let left = text.tokens.len().saturating_sub(*count).max(1);
                text.session.rewind(left).unwrap();
                text.tokens.truncate(left);
            }
            Step::Unload(i) => self.texts[i.index(n)].session.cache().unload(),
            Step::End(i) => drop(self.texts.swap_remove(i.index(n))),
        }
        Ok(())
    }
}

/// Plain pages, windows, precision by age and recurrent layers, with room for all and with little.
#[test]
fn random_trees_of_prompts_have_the_bits_of_cold_runs() {
    let plain = ("plain".to_owned(), Tiny::Llama.model(DType::Q8_0), plain());
    let models: Vec<_> = std::iter::once(plain).chain(forgetful()).collect();
    let steps = prop::collection::vec(step(), 1..30);
    let runner = &mut proptest::test_runner::TestRunner::new(cases(60));
    let n_reused = std::cell::Cell::new(0);
    let strategy = (0..models.len(), prop::option::of(12..40u64), steps);
    let outcome = runner.run(&strategy, |(model, n_pages, steps)| {
        let (_, model, options) = &models[model];
        let options = SessionOptions {
            n_ctx: Some(600),
            ..options.clone()
        };
        let mut house = House::new(model, options, n_pages);
        for step in &steps {
            house.step(step)?;
        }
        n_reused.set(n_reused.get() + house.engine.pool().prefixes().tokens_reused);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let n_reused = n_reused.get();
    // Sixty random trees reuse 700 to 1,600 tokens; hardly any would mean that nothing was tested.
    assert!(
        emulated() || n_reused > 250,
        "only {n_reused} tokens came from the cache"
    );
}
