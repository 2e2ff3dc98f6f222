//! Adapters from outside: what they compute, what they cost nothing, which files are refused.

use crate::run::{OnLevel, Pass, session_on};
use crate::tiny::{N_EMBD, TOKENS, Tiny};
use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::gguf::GgufError;
use ruvllm::gguf::{Gguf, Value, Writer};
use ruvllm::lora::AdapterError;
use ruvllm::lora::TargetModule;
use ruvllm::lora::{Adapter, Term};
use ruvllm::quant::DType;
use ruvllm::{Engine, KvType, Model, Session, SessionOptions};
use std::sync::Arc;

/// Models compute with F32 weights here, so a change of the weights and the same change by an
/// adapter differ by roundings alone: of sums of about a hundred products of size 1, some dozens
/// deep, in logits of size 1 to 10. That is 10⁻⁵ and less.
const TOLERANCE: f32 = 1e-4;

fn session(model: &Model) -> Session {
    let options = SessionOptions {
        n_ctx: Some(64),
        kv_type: KvType::F32,
        ..Default::default()
    };
    session_on(model, 2, &options)
}

/// Logits behind every token, of one prefill.
fn prefilled(session: &mut Session) -> Vec<f32> {
    let mut all = Vec::new();
    session.clear();
    session
        .hooks()
        .prefill_each(&TOKENS, 0, |_, logits| all.extend_from_slice(logits))
        .unwrap();
    all
}

/// The same, token by token.
fn decoded(session: &mut Session) -> Vec<f32> {
    session.clear();
    TOKENS
        .iter()
        .flat_map(|&token| session.decoded(token))
        .collect()
}

/// The same, of a model whose weights are F32, where both ways must agree.
fn logits(session: &mut Session) -> Vec<f32> {
    let all = prefilled(session);
    assert_close(&all, &decoded(session), TOLERANCE);
    all
}

#[track_caller]
fn assert_close(a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len());
    let worst = a
        .iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |m: f32, d| if d.is_nan() { d } else { m.max(d) });
    assert!(worst <= tolerance, "off by {worst}");
}

fn differ(a: &[f32], b: &[f32]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// An adapter of `rank` with something in its `B`.
fn adapter(
    model: &Model,
    rank: usize,
    seed: u64,
    targets: impl Fn(&TargetModule) -> bool,
) -> Adapter {
    let mut adapter = Adapter::zeros(model, rank, seed, targets).unwrap();
    let mut state = seed;
    for (_, term) in adapter.terms_mut() {
        for b in term.parts_mut().1 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            *b = ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.3;
        }
    }
    adapter.set_alpha(2.0 * rank as f32).unwrap();
    adapter
}

/// The model with `W + scale·alpha/rank·B·A` in its file, computed here in the plainest way.
fn dense(tiny: Tiny, adapters: &[(&Adapter, f32)]) -> Model {
    let mut parts = tiny.parts(DType::F32);
    if !parts.has_tensor("output.weight") {
        parts.copy_tensor("token_embd.weight", "output.weight");
    }
    for (adapter, scale) in adapters {
        for (i, term) in adapter.terms() {
            let TargetModule {
                tensor,
                expert,
                n_in,
                n_out,
                ..
            } = &adapter.sites()[i];
            let delta = |row: usize, col: usize| {
                let terms = (0..term.rank()).map(|j| {
                    f64::from(term.b()[j * n_out + row]) * f64::from(term.a()[j * n_in + col])
                });
                f64::from(*scale) * f64::from(adapter.alpha()) / term.rank() as f64
                    * terms.sum::<f64>()
            };
            parts.edit(tensor, |w| {
                for row in 0..*n_out {
                    for col in 0..*n_in {
                        // The embedding table has its inputs in rows.
                        let at = match &**tensor {
                            "token_embd.weight" => col * n_out + row,
                            _ => (expert.unwrap_or(0) * n_out + row) * n_in + col,
                        };
                        w[at] = (f64::from(w[at]) + delta(row, col)) as f32;
                    }
                }
            });
        }
    }
    Model::from_gguf(parts.gguf()).unwrap()
}

fn adapted(model: &Model, adapters: &[(&Adapter, f32)]) -> Session {
    let mut session = session(model);
    for &(adapter, scale) in adapters {
        session
            .adapters()
            .attach(Arc::new(adapter.clone()), scale)
            .unwrap();
    }
    session
}

fn with(model: &Model, adapters: &[(&Adapter, f32)]) -> Vec<f32> {
    logits(&mut adapted(model, adapters))
}

#[test]
fn every_matrix_of_every_shape_changes_as_its_weights_would() {
    for tiny in Tiny::SHAPES {
        let model = tiny.model(DType::F32);
        let base = logits(&mut session(&model));
        let mut tensors: Vec<&str> = model.sites().iter().map(|s| &*s.tensor).collect();
        tensors.dedup();
        for (i, tensor) in tensors.iter().enumerate() {
            let adapter = adapter(&model, 1 + i % 3, i as u64, |site| &*site.tensor == *tensor);
            let adapted = with(&model, &[(&adapter, 0.7)]);
            eprintln!("{tiny:?} {tensor}: {}", differ(&adapted, &base));
            assert!(
                differ(&adapted, &base) > 1e-2,
                "{tiny:?} {tensor}: nothing has changed"
            );
            assert_close(
                &adapted,
                &logits(&mut session(&dense(tiny, &[(&adapter, 0.7)]))),
                TOLERANCE,
            );
        }
    }
}

#[test]
fn all_matrices_at_once_and_several_adapters() {
    for tiny in Tiny::SHAPES {
        let model = tiny.model(DType::F32);
        let small = adapter(&model, 2, 1, |_| true);
        let large = adapter(&model, 5, 2, |site| !site.part().starts_with("attn_q"));
        for adapters in [
            &[(&small, 0.4)][..],
            &[(&small, 0.3), (&large, -0.2)],
            &[(&large, 0.1), (&large, 0.1)],
        ] {
            assert_close(
                &with(&model, adapters),
                &logits(&mut session(&dense(tiny, adapters))),
                TOLERANCE,
            );
        }
    }
}

#[test]
fn adapters_that_add_nothing_change_no_bit() {
    for tiny in Tiny::SHAPES {
        for dtype in [DType::F32, DType::Q8_0] {
            let model = tiny.model(dtype);
            let bits = |session: &mut Session| {
                let all = [prefilled(session), decoded(session)].concat();
                all.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let mut session = session(&model);
            let base = bits(&mut session);
            let zeros = session
                .adapters()
                .attach(
                    Arc::new(Adapter::zeros(&model, 4, 3, |_| true).unwrap()),
                    1.0,
                )
                .unwrap();
            assert_eq!(bits(&mut session), base);
            let other = session
                .adapters()
                .attach(Arc::new(adapter(&model, 3, 4, |_| true)), 0.0)
                .unwrap();
            assert_eq!(bits(&mut session), base);
            session.adapters().set_scale(other, 0.5).unwrap();
            assert_ne!(bits(&mut session), base);
            session.adapters().detach(other).unwrap();
            session.adapters().detach(zeros).unwrap();
            assert_eq!(bits(&mut session), base);
        }
    }
}

#[test]
fn sessions_have_adapters_of_their_own() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let adapters = [1, 2].map(|seed| adapter(&model, 2, seed, |_| true));
    let expected = [&[][..], &[(&adapters[0], 0.5)], &[(&adapters[1], 0.5)]]
        .map(|a| decoded(&mut adapted(&model, a)));
    let mut sessions = [(); 3].map(|()| session(&model));
    for (session, adapter) in sessions[1..].iter_mut().zip(&adapters) {
        session
            .adapters()
            .attach(Arc::new(adapter.clone()), 0.5)
            .unwrap();
    }
    // Token by token in turns.
    let mut found = [const { Vec::new() }; 3];
    for &token in &TOKENS {
        for (session, found) in sessions.iter_mut().zip(&mut found) {
            found.extend_from_slice(&session.decoded(token));
        }
    }
    assert_eq!(found, expected);
    assert!(differ(&expected[1], &expected[2]) > 0.1);
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for tiny in Tiny::SHAPES {
        let model = tiny.model(DType::Q8_0);
        let adapter = Arc::new(adapter(&model, 3, 5, |_| true));
        let all = [1, 2, 5].map(|n_threads| {
            let mut session = session_on(&model, n_threads, &SessionOptions::default());
            session
                .adapters()
                .attach(Arc::clone(&adapter), 0.5)
                .unwrap();
            let mut all = Vec::new();
            session
                .hooks()
                .prefill_each(&TOKENS, 0, |_, logits| {
                    all.extend(logits.iter().map(|x| x.to_bits()))
                })
                .unwrap();
            all.extend(session.decoded(3).iter().map(|x| x.to_bits()));
            all
        });
        assert_eq!(all[0], all[1]);
        assert_eq!(all[0], all[2]);
    }
}

#[test]
fn every_level_computes_the_same() {
    for arch in ruvllm::arch::Arch::available() {
        let model = Tiny::Phi3.model(DType::F32).on(arch);
        let adapter = adapter(&model, 3, 6, |_| true);
        let expected = logits(&mut session(&dense(Tiny::Phi3, &[(&adapter, 0.3)])));
        assert_close(&with(&model, &[(&adapter, 0.3)]), &expected, TOLERANCE);
    }
}

#[test]
fn a_change_keeps_the_text_and_is_a_generation_of_its_own() {
    let model = Tiny::Llama.model(DType::F32);
    let adapter = Arc::new(adapter(&model, 1, 1, |_| true));
    let mut session = session(&model);
    let mut generations = vec![session.sequence().adapter_generation()];
    assert_eq!(generations, [0]);
    let fill = |session: &mut Session| {
        session.clear();
        session.prefill(&TOKENS).unwrap();
    };
    fill(&mut session);
    let id = session
        .adapters()
        .attach(Arc::clone(&adapter), 0.5)
        .unwrap();
    assert_eq!((session.tokens(), session.logits()), (&TOKENS[..], &[][..]));
    generations.push(session.sequence().adapter_generation());
    fill(&mut session);
    session.adapters().set_scale(id, 0.25).unwrap();
    assert_eq!((session.tokens(), session.logits()), (&TOKENS[..], &[][..]));
    generations.push(session.sequence().adapter_generation());
    let other = session
        .adapters()
        .attach(Arc::clone(&adapter), 1.0)
        .unwrap();
    generations.push(session.sequence().adapter_generation());
    assert_eq!(
        session
            .sequence()
            .adapters()
            .map(|(id, _, scale)| (id, scale))
            .collect::<Vec<_>>(),
        [(id, 0.25), (other, 1.0)]
    );

    fill(&mut session);
    let mut fork = session.fork().unwrap();
    assert_eq!(
        fork.sequence().adapter_generation(),
        session.sequence().adapter_generation()
    );
    assert_eq!(fork.decoded(3), session.decoded(3));
    assert_eq!(fork.adapters().detach(other).unwrap(), adapter);
    assert_eq!(session.position(), TOKENS.len() + 1);
    generations.push(fork.sequence().adapter_generation());
    generations.push({
        let mut stranger = model.session().unwrap();
        stranger
            .adapters()
            .attach(Arc::clone(&adapter), 0.5)
            .unwrap();
        stranger.sequence().adapter_generation()
    });
    generations.sort_unstable();
    generations.dedup();
    assert_eq!(generations.len(), 6);

    session.adapters().detach(id).unwrap();
    session.adapters().detach(other).unwrap();
    assert_eq!(
        (session.position(), session.sequence().adapter_generation()),
        (TOKENS.len() + 1, 0)
    );
    assert!(matches!(
        session.adapters().detach(other),
        Err(AdapterError::NotAttached)
    ));
    assert!(matches!(
        session.adapters().set_scale(id, 1.0),
        Err(AdapterError::NotAttached)
    ));
    fill(&mut session);
    assert!(matches!(
        session.adapters().attach(adapter, f32::NAN),
        Err(AdapterError::Scale { .. })
    ));
    assert_eq!(session.position(), TOKENS.len());
}

/// After adapters were attached, scaled and detached a text goes on as if they had been so from its
/// start: its prompt was computed as a prompt, what was generated as that.
#[test]
fn a_text_goes_on_as_if_its_adapters_had_been_there() {
    for tiny in Tiny::SHAPES {
        let model = tiny.model(DType::Q8_0);
        let [one, two] = [1, 2].map(|seed| Arc::new(adapter(&model, 2, seed, |_| true)));
        for cache in [CacheMode::Off, CacheMode::On] {
            let options = SessionOptions {
                n_ctx: Some(256),
                prefix: cache.into(),
                ..Default::default()
            };
            let engine = Engine::new(&model, &EngineOptions::default()).unwrap();
            let begun = |adapters: &[(&Arc<Adapter>, f32)]| {
                let mut session = engine.session_with(&options).unwrap();
                for &(adapter, scale) in adapters {
                    session
                        .adapters()
                        .attach(Arc::clone(adapter), scale)
                        .unwrap();
                }
                session.prefill(&TOKENS.repeat(8)).unwrap();
                session.decode(3).unwrap();
                session.decode(5).unwrap();
                session
            };
            let mut session = begun(&[]);
            let mut fork = session.fork().unwrap();
            let id = session.adapters().attach(Arc::clone(&one), 0.5).unwrap();
            let mut scaled = session.fork().unwrap();
            assert_eq!(session.decoded(7), begun(&[(&one, 0.5)]).decoded(7));
            scaled.adapters().set_scale(id, -0.5).unwrap();
            scaled.adapters().attach(Arc::clone(&two), 1.0).unwrap();
            let expected = begun(&[(&one, -0.5), (&two, 1.0)]).decoded(7);
            assert_eq!(scaled.decoded(7), expected);
            assert_ne!(expected, fork.decoded(7));
            assert_eq!(fork.decoded(9), {
                let mut plain = begun(&[]);
                plain.decode(7).unwrap();
                plain.decoded(9)
            });
            // What was computed without it is in the cache.
            let hits = engine.pool().prefixes().hits;
            session.adapters().detach(id).unwrap();
            assert_eq!(session.decoded(9), fork.logits());
            if cache == CacheMode::On && model.memory_limit().is_none() {
                assert!(engine.pool().prefixes().hits > hits);
            }
        }
    }
}

/// What changes behind the last norm alone costs nothing: keys and values stay.
#[test]
fn a_change_of_the_head_computes_nothing_again() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let of_head = Arc::new(adapter(&model, 2, 1, |site| site.part() == "output"));
    let inner = Arc::new(adapter(&model, 2, 1, |site| site.part() != "output"));
    for (adapter, is_of_head) in [(&of_head, true), (&inner, false)] {
        let mut session = session(&model);
        session.prefill(&TOKENS).unwrap();
        let id = session.adapters().attach(Arc::clone(adapter), 0.5).unwrap();
        for change in 0..3 {
            let before = session.engine().turns().begun;
            let found = session.decoded(change);
            let n_passes = session.engine().turns().begun - before;
            assert_eq!(n_passes == 1, is_of_head, "{n_passes}");
            let mut fresh = self::session(&model);
            if change < 2 {
                fresh
                    .adapters()
                    .attach(Arc::clone(adapter), [0.5, 0.25][change as usize])
                    .unwrap();
            }
            fresh.prefill(&TOKENS).unwrap();
            (0..change).for_each(|token| fresh.decode(token).unwrap());
            assert_eq!(found, fresh.decoded(change));
            match change {
                0 => session.adapters().set_scale(id, 0.25).unwrap(),
                1 => drop(session.adapters().detach(id).unwrap()),
                _ => {}
            }
        }
    }
}

#[test]
fn adapters_of_other_models_are_refused() {
    let llama = Tiny::Llama.model(DType::F32);
    let fits = Arc::new(adapter(&llama, 1, 1, |_| true));
    // The same matrices in another file.
    session(&Tiny::Llama.model(DType::Q8_0))
        .adapters()
        .attach(Arc::clone(&fits), 1.0)
        .unwrap();
    let refused = |model: &Model| {
        session(model)
            .adapters()
            .attach(Arc::clone(&fits), 1.0)
            .unwrap_err()
    };
    assert!(matches!(
        refused(&Tiny::Phi3.model(DType::F32)),
        AdapterError::Architecture { .. }
    ));
    let mut parts = Tiny::Llama.parts(DType::F32);
    parts.set("llama.block_count", 1u32);
    for tensor in fits.sites().iter().filter(|s| s.layer() == Some(1)) {
        parts.remove_tensor(&tensor.tensor);
        parts.remove_tensor(&tensor.tensor.replace("weight", "bias"));
    }
    for norm in ["attn_norm", "ffn_norm"] {
        parts.remove_tensor(&format!("blk.1.{norm}.weight"));
    }
    let shorter = Model::from_gguf(parts.gguf()).unwrap();
    let Err(AdapterError::OtherModel { tensor }) =
        session(&shorter).adapters().attach(Arc::clone(&fits), 1.0)
    else {
        panic!()
    };
    assert!(tensor.starts_with("blk.1."), "{tensor}");
    let back = Arc::new(adapter(&shorter, 1, 1, |_| true));
    let Err(AdapterError::OtherModel { tensor }) = session(&llama).adapters().attach(back, 1.0)
    else {
        panic!()
    };
    assert!(tensor.starts_with("blk.1."), "{tensor}");
}

#[test]
fn ranks_are_bounded_and_something_must_be_chosen() {
    let model = Tiny::Llama.model(DType::F32);
    let zeros = |rank, part: &str| Adapter::zeros(&model, rank, 1, |site| site.part() == part);
    assert!(matches!(
        zeros(0, "attn_q"),
        Err(AdapterError::Rank { rank: 0, .. })
    ));
    assert!(zeros(N_EMBD, "attn_q").is_ok());
    assert!(matches!(
        zeros(N_EMBD + 1, "attn_q"),
        Err(AdapterError::Rank { max: N_EMBD, .. })
    ));
    assert!(matches!(zeros(1, "attn_x"), Err(AdapterError::Empty)));
    let mut fits = zeros(1, "attn_q").unwrap();
    assert!(matches!(
        fits.set_alpha(f32::INFINITY),
        Err(AdapterError::Alpha { .. })
    ));
    assert_eq!(fits.alpha(), 1.0);
    let half = Adapter::zeros(&model, 2, 1, |site| site.layer() == Some(1)).unwrap();
    assert!(
        half.terms()
            .all(|(i, _)| half.sites()[i].tensor.starts_with("blk.1."))
    );
    assert_eq!(half.terms().count(), 7);
}

#[test]
fn files_hold_what_was_saved() {
    let folder = std::env::temp_dir().join(format!("ruvllm-lora-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("adapter.gguf");
    for tiny in Tiny::SHAPES {
        let model = tiny.model(DType::Q8_0);
        let saved = adapter(&model, 3, 7, |site| site.part() != "attn_output");
        assert_eq!(
            Adapter::from_bytes(saved.to_bytes().unwrap(), &model).unwrap(),
            saved
        );
        saved.save(&path).unwrap(); // over the last one
        assert_eq!(Adapter::open(&path, &model).unwrap(), saved);
    }
    assert_eq!(
        std::fs::read_dir(&folder).unwrap().count(),
        1,
        "temporary files stay behind"
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn experts_that_were_not_chosen_are_saved_as_zeros() {
    let model = Tiny::Qwen3Moe.model(DType::F32);
    let some = adapter(&model, 2, 8, |site| {
        site.part() == "ffn_up_exps" && site.expert == Some(1)
    });
    let read = Adapter::from_bytes(some.to_bytes().unwrap(), &model).unwrap();
    assert_eq!(
        read.terms().filter(|(_, t)| !t.is_zero()).count(),
        some.terms().count()
    );
    assert_eq!(with(&model, &[(&read, 1.0)]), with(&model, &[(&some, 1.0)]));
}

/// An adapter file in pieces: `(name, dims, values)`, and a key that replaces or adds to the usual
/// ones.
struct File {
    metadata: Vec<(&'static str, Option<Value>)>,
    tensors: Vec<(&'static str, Vec<u64>, DType, Vec<f32>)>,
}

const Q: &str = "blk.0.attn_q.weight";
const QA: &str = "blk.0.attn_q.weight.lora_a";
const QB: &str = "blk.0.attn_q.weight.lora_b";

impl File {
    /// Of rank 2, for the queries of a tiny llama's first layer.
    fn sound() -> File {
        File {
            metadata: vec![
                ("general.type", Some("adapter".into())),
                ("general.architecture", Some("llama".into())),
                ("adapter.type", Some("lora".into())),
                ("adapter.lora.alpha", Some(4.0f32.into())),
            ],
            tensors: vec![
                (
                    QA,
                    vec![64, 2],
                    DType::F32,
                    (0..128).map(|i| i as f32 / 64.0).collect(),
                ),
                (
                    QB,
                    vec![2, 64],
                    DType::F32,
                    (0..128).map(|i| 1.0 - i as f32 / 64.0).collect(),
                ),
            ],
        }
    }

    fn set(mut self, key: &'static str, value: Option<Value>) -> File {
        self.metadata.retain(|(k, _)| *k != key);
        self.metadata.push((key, value));
        self
    }

    fn tensor(mut self, name: &'static str, dims: &[u64], dtype: DType) -> File {
        self.tensors.retain(|t| t.0 != name);
        let n = dims.iter().product::<u64>() as usize;
        self.tensors.push((
            name,
            dims.to_vec(),
            dtype,
            (0..n).map(|i| (i % 7) as f32 - 3.0).collect(),
        ));
        self
    }

    fn without(mut self, name: &str) -> File {
        self.tensors.retain(|t| t.0 != name);
        self
    }

    fn bytes(self) -> Vec<u8> {
        let mut writer = Writer::new();
        for (key, value) in self.metadata {
            if let Some(value) = value {
                writer.metadata(key, value);
            }
        }
        for (name, dims, dtype, values) in self.tensors {
            let data = match dtype {
                DType::I32 => values
                    .iter()
                    .flat_map(|&x| (x as i32).to_le_bytes())
                    .collect(),
                DType::F32 => bytemuck::cast_slice(&values).to_vec(),
                _ => {
                    let format = dtype.format().unwrap();
                    let mut data = vec![0; values.len() / format.block_elems * format.block_bytes];
                    format.quantize.unwrap()(&values, None, &mut data);
                    data
                }
            };
            writer.tensor(name, &dims, dtype, data);
        }
        writer.to_bytes().unwrap()
    }

    fn open(self) -> Result<Adapter, AdapterError> {
        Adapter::from_bytes(self.bytes(), &Tiny::Llama.model(DType::F32))
    }
}

#[test]
fn values_lie_where_llama_cpp_puts_them() {
    let adapter = File::sound().open().unwrap();
    let (i, term) = adapter.terms().next().unwrap();
    assert_eq!(
        (
            &*adapter.sites()[i].tensor,
            term.rank(),
            adapter.scale(term)
        ),
        (Q, 2, 2.0)
    );
    // A is stored by rows, B too: two values for each output.
    assert_eq!(term.a()[..3], [0.0, 1.0 / 64.0, 2.0 / 64.0]);
    assert_eq!(term.b()[..3], [1.0, 1.0 - 2.0 / 64.0, 1.0 - 4.0 / 64.0]);
    assert_eq!(term.b()[64], 1.0 - 1.0 / 64.0);
    // Without a strength, B·A counts as it is.
    for alpha in [None, Some(0.0f32.into())] {
        let adapter = File::sound()
            .set("adapter.lora.alpha", alpha)
            .open()
            .unwrap();
        assert_eq!(adapter.scale(adapter.term(i).unwrap()), 1.0);
    }
}

#[test]
fn small_types_are_read() {
    let values = |a: DType, b: DType| {
        let adapter = File::sound()
            .tensor(QA, &[64, 2], a)
            .tensor(QB, &[2, 64], b)
            .open()
            .unwrap();
        let term: &Term = adapter.terms().next().unwrap().1;
        (term.a().to_vec(), term.b().to_vec())
    };
    let exact = values(DType::F32, DType::F32);
    for dtype in [DType::F16, DType::BF16] {
        assert_eq!(values(dtype, dtype), exact); // small integers
    }
    let (a, b) = values(DType::Q8_0, DType::F16);
    assert_close(&a, &exact.0, 0.02);
    assert_eq!(b, exact.1);
}

/// Values of F16 files stay in 16 bits: they take half of the memory and compute the same, bit by
/// bit; what is changed is expanded.
#[test]
fn half_precision_stays_as_it_is() {
    let file = File::sound()
        .tensor(QA, &[64, 2], DType::F16)
        .tensor(QB, &[2, 64], DType::F16)
        .open()
        .unwrap();
    assert_eq!(2 * file.bytes(), File::sound().open().unwrap().bytes());
    let model = Tiny::Llama.model(DType::F32);
    for adapter in [
        adapter(&model, 3, 7, |_| true),
        adapter(&model, 1, 8, |site| !site.is_embedding()),
    ] {
        let half = adapter.to_f16().unwrap();
        let mut expanded = half.clone();
        for (_, term) in expanded.terms_mut() {
            term.parts_mut();
        }
        assert!(half == expanded && half != adapter && expanded.bytes() == adapter.bytes());
        assert!(half.bytes() < adapter.bytes() * 2 / 3);
        let of = |adapter: &Adapter| {
            let mut session = session(&model);
            session
                .adapters()
                .attach(Arc::new(adapter.clone()), 0.7)
                .unwrap();
            (prefilled(&mut session), decoded(&mut session))
        };
        assert_eq!(of(&half), of(&expanded));
    }
    let mut large = adapter(&model, 2, 9, |_| true);
    large
        .terms_mut()
        .for_each(|(_, term)| term.parts_mut().1.fill(1e5));
    assert!(matches!(
        large.to_f16(),
        Err(AdapterError::NotFinite { .. })
    ));
}

#[test]
fn what_cannot_be_used_is_named() {
    let error = |file: File| file.open().unwrap_err();
    let text = |file: File| error(file).to_string();
    for (key, wrong) in [("general.type", "model"), ("adapter.type", "vera")] {
        for value in [None, Some(wrong.into())] {
            assert!(
                matches!(error(File::sound().set(key, value)), AdapterError::NotAnAdapter { key: k, .. } if k == key)
            );
        }
    }
    let e = error(File::sound().set("general.architecture", Some("qwen2".into())));
    assert!(matches!(e, AdapterError::Architecture { .. }));
    assert!(matches!(
        error(File::sound().set("general.architecture", None)),
        AdapterError::Gguf(_)
    ));
    let tokens = Value::Array(ruvllm::gguf::Array::U32(vec![1, 2]));
    assert!(
        text(File::sound().set("adapter.alora.invocation_tokens", Some(tokens))).contains("alora")
    );
    for alpha in [f32::NAN, f32::INFINITY] {
        assert!(matches!(
            error(File::sound().set("adapter.lora.alpha", Some(alpha.into()))),
            AdapterError::Alpha { .. }
        ));
    }
    assert!(matches!(
        error(File::sound().set("adapter.lora.alpha", Some("4".into()))),
        AdapterError::Gguf(_)
    ));
    assert!(matches!(
        error(File::sound().without(QA).without(QB)),
        AdapterError::Empty | AdapterError::Gguf(_)
    ));
    for (half, other) in [(QA, QB), (QB, QA)] {
        assert!(
            matches!(error(File::sound().without(half)), AdapterError::Unpaired { missing } if missing == half),
            "{other}"
        );
    }
    // Neither a pair nor known.
    for name in [
        "blk.0.attn_norm.weight",
        "blk.0.attn_q.weight",
        "blk.0.attn_q.weight.lora_c",
    ] {
        let e = error(File::sound().tensor(name, &[64], DType::F32));
        assert!(matches!(e, AdapterError::UnknownTensor { name: n } if n == name));
    }
    for name in [
        "blk.2.attn_q.weight.lora_a",
        "blk.0.attn_norm.weight.lora_a",
        "blk.0.attn_q.lora_b",
    ] {
        let e = error(File::sound().tensor(name, &[64, 2], DType::F32));
        assert!(matches!(e, AdapterError::NoSuchMatrix { tensor } if name.starts_with(&tensor)));
    }
    // Shapes: the wrong input, the wrong output, ranks that differ, a B that is not turned.
    for (name, dims) in [
        (QA, &[32, 2][..]),
        (QA, &[64, 3]),
        (QA, &[2, 64]),
        (QA, &[64, 2, 2]),
        (QA, &[128]),
        (QB, &[2, 32]),
        (QB, &[3, 64]),
        (QB, &[64, 2]),
        (QB, &[2, 64, 2]),
    ] {
        let e = error(File::sound().tensor(name, dims, DType::F32));
        let AdapterError::Shape { name: n, .. } = &e else {
            panic!("{name} {dims:?}: {e}")
        };
        assert!(
            n == name || dims == [3, 64] || dims == [64, 2],
            "{name} {dims:?}: {e}"
        );
    }
    let e = error(File::sound().tensor(QA, &[64, 65], DType::F32).tensor(
        QB,
        &[65, 64],
        DType::F32,
    ));
    assert!(matches!(
        e,
        AdapterError::Rank {
            rank: 65,
            max: 64,
            ..
        }
    ));
    assert!(
        File::sound()
            .tensor(QA, &[64, 64], DType::F32)
            .tensor(QB, &[64, 64], DType::F32)
            .open()
            .is_ok()
    );
    assert!(matches!(
        error(File::sound().tensor(QA, &[64, 2], DType::I32)),
        AdapterError::TensorType { .. }
    ));
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut file = File::sound();
        file.tensors[1].3[5] = value;
        assert!(
            matches!(error(file), AdapterError::NotFinite { index: 5, name, .. } if name == QB)
        );
    }
    // A model is no adapter, and the other way round.
    let llama = Tiny::Llama.model(DType::F32);
    let bytes = Tiny::Llama.parts(DType::F32).bytes();
    assert!(matches!(
        Adapter::from_bytes(bytes, &llama),
        Err(AdapterError::NotAnAdapter { .. })
    ));
    let bytes = File::sound().bytes();
    assert!(Model::from_gguf(Gguf::from_bytes(bytes).unwrap()).is_err());
}

#[test]
fn damaged_files_are_errors() {
    let model = Tiny::Llama.model(DType::F32);
    let bytes = File::sound().bytes();
    for n in 0..bytes.len() {
        let cut = Adapter::from_bytes(bytes[..n].to_vec(), &model);
        assert!(
            matches!(cut, Err(AdapterError::Gguf(_))),
            "{n} bytes of {}",
            bytes.len()
        );
    }
    // A rank of 0 cannot be written, so it is patched in.
    let at = bytes
        .windows(QB.len())
        .position(|w| w == QB.as_bytes())
        .unwrap()
        + QB.len()
        + 4;
    for rank in [0, u64::MAX, 1 << 62, 3] {
        let mut bytes = bytes.clone();
        assert_eq!(bytes[at..at + 8], 2u64.to_le_bytes());
        bytes[at..at + 8].copy_from_slice(&rank.to_le_bytes());
        assert!(Adapter::from_bytes(bytes, &model).is_err(), "rank {rank}");
    }
    let header = bytes.len() - 2 * 128 * 4;
    for i in 0..header {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[i] ^= flip;
            // It may still be one: of another strength, say. It must not panic.
            let _ = Adapter::from_bytes(bytes, &model);
        }
    }
    let missing = Adapter::open("/no/such/adapter.gguf", &model);
    assert!(matches!(
        missing,
        Err(AdapterError::Gguf(GgufError::Io { .. }))
    ));
}

/// `tests/reference_peft.py` makes the files.
#[test]
fn peft_computes_the_same() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/peft");
    let reference = Gguf::open(format!("{folder}/logits.gguf")).unwrap();
    let tokens = reference.metadata().i32s("tokens").unwrap();
    assert_eq!(*tokens, TOKENS.map(|t| t as i32));
    let expected = |name: &str| {
        let tensor = reference.tensor(name).unwrap();
        bytemuck::pod_collect_to_vec::<u8, f32>(reference.data(tensor))
    };
    for arch in ["llama", "qwen2"] {
        let model = Model::open(format!("{folder}/{arch}.gguf")).unwrap();
        let adapter = Adapter::open(format!("{folder}/{arch}-adapter.gguf"), &model).unwrap();
        let base = expected(&format!("{arch}.base"));
        assert_close(&logits(&mut session(&model)), &base, TOLERANCE);
        let expected = expected(&format!("{arch}.adapted"));
        assert!(differ(&base, &expected) > 1.0);
        assert_close(&with(&model, &[(&adapter, 1.0)]), &expected, TOLERANCE);
        // What is read is what would be written.
        let again = Adapter::from_bytes(adapter.to_bytes().unwrap(), &model).unwrap();
        assert_eq!(again, adapter);
    }
}

fn merged(model: &Model, adapters: &[(&Adapter, f32)], dtype: Option<DType>) -> Gguf {
    let adapters: Vec<_> = adapters
        .iter()
        .map(|&(a, scale)| (Arc::new(a.clone()), scale))
        .collect();
    let writer = model.merged(&adapters, dtype, &|_| true).unwrap();
    Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()
}

fn open(gguf: Gguf) -> Model {
    Model::from_gguf(gguf).unwrap()
}

#[test]
fn a_merged_model_computes_what_the_adapter_does() {
    for tiny in Tiny::SHAPES {
        let model = tiny.model(DType::F32);
        let (one, two) = (
            adapter(&model, 3, 1, |_| true),
            adapter(&model, 1, 2, |site| site.part() == "output"),
        );
        for adapters in [
            &[(&one, 0.3)][..],
            &[(&one, 0.2), (&two, 0.5)],
            &[(&two, 0.5)],
        ] {
            let merged = open(merged(&model, adapters, None));
            assert_close(
                &logits(&mut session(&merged)),
                &with(&model, adapters),
                TOLERANCE,
            );
        }
    }
}

#[test]
fn merging_touches_nothing_else() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let adapter = adapter(&model, 2, 1, |site| site.part() == "ffn_down");
    let (before, after) = (model.gguf(), merged(&model, &[(&adapter, 0.5)], None));
    assert_eq!(
        before.metadata().iter().collect::<Vec<_>>(),
        after.metadata().iter().collect::<Vec<_>>()
    );
    assert_eq!(before.tensors().len(), after.tensors().len());
    for (a, b) in before.tensors().iter().zip(after.tensors()) {
        assert_eq!((&a.name, &a.dims, a.dtype), (&b.name, &b.dims, b.dtype));
        assert_eq!(
            before.data(a) == after.data(b),
            !a.name.contains("ffn_down"),
            "{}",
            a.name
        );
    }
    // Quantised again, or in a type without loss.
    let quantised = decoded(&mut session(&open(after)));
    let expected = decoded(&mut adapted(&model, &[(&adapter, 0.5)]));
    assert!(differ(&quantised, &expected) < 0.1);
    let exact = merged(&model, &[(&adapter, 0.5)], Some(DType::F32));
    assert_eq!(
        exact.tensor("blk.0.ffn_down.weight").unwrap().dtype,
        DType::F32
    );
    assert_eq!(
        exact.tensor("blk.0.ffn_up.weight").unwrap().dtype,
        DType::Q8_0
    );
    // 16-bit activations against 32-bit ones.
    assert!(differ(&decoded(&mut session(&open(exact))), &expected) < 2e-3);
}

/// Against the formula on the weights of the files: what is left of a change that is smaller than the
/// steps of a type, and of one that is not.
#[test]
fn what_merging_keeps() {
    let model = Tiny::Llama.model(DType::Q4_0);
    let weights = |gguf: &Gguf| -> Vec<f64> {
        let mut all = Vec::new();
        let changed = gguf.tensors().iter();
        for tensor in changed.filter(|tensor| tensor.name.contains("ffn_down")) {
            // As many rows as are measured.
            assert!(tensor.dims[1] <= 128);
            let data = gguf.data(tensor);
            let mut values = vec![0.0; tensor.dims[0] as usize];
            for row in data.chunks_exact(data.len() / tensor.dims[1] as usize) {
                ruvllm::quant::dequantize_row(tensor.dtype, row, &mut values).unwrap();
                all.extend(values.iter().copied().map(f64::from));
            }
        }
        all
    };
    let adapter = adapter(&model, 2, 1, |site| site.part() == "ffn_down");
    let base = weights(model.gguf());
    let mut kept = Vec::new();
    for scale in [0.02, 0.5] {
        let exact = weights(&merged(&model, &[(&adapter, scale)], Some(DType::F32)));
        let adapters = [(Arc::new(adapter.clone()), scale)];
        for dtype in [None, Some(DType::Q8_0), Some(DType::F32)] {
            let written = weights(&merged(&model, &[(&adapter, scale)], dtype));
            let (mut of_kept, mut of_wanted) = (0.0, 0.0);
            for ((x, y), z) in base.iter().zip(&exact).zip(&written) {
                of_kept += (y - x) * (z - x);
                of_wanted += (y - x) * (y - x);
            }
            let found = model.kept_by_merging(&adapters, dtype).unwrap();
            kept.push((scale, dtype, found));
            // Changes are added in 32 bits here and there.
            assert!((found - of_kept / of_wanted).abs() < 1e-3, "{kept:?}");
        }
    }
    let of = |dtype| kept.iter().filter(move |found| found.1 == dtype);
    assert!(
        of(Some(DType::F32)).all(|found| (found.2 - 1.0).abs() < 1e-3),
        "{kept:?}"
    );
    // Steps of 8 bits are small beside a large change.
    assert!(
        of(Some(DType::Q8_0)).any(|found| found.0 == 0.5 && found.2 > 0.9),
        "{kept:?}"
    );
}

#[test]
fn a_shared_table_is_divided_when_one_side_changes() {
    let model = Tiny::Gemma2.model(DType::Q8_0);
    let table = model
        .gguf()
        .data(model.gguf().tensor("token_embd.weight").unwrap());
    for (part, keeps) in [
        ("output", "token_embd.weight"),
        ("token_embd", "output.weight"),
    ] {
        let adapter = adapter(&model, 2, 1, |site| site.part() == part);
        let merged = merged(&model, &[(&adapter, 0.5)], None);
        assert_eq!(merged.data(merged.tensor(keeps).unwrap()), table);
        assert_ne!(
            merged.data(merged.tensor(&format!("{part}.weight")).unwrap()),
            table
        );
    }
    let other = adapter(&model, 2, 1, |site| site.part() == "attn_q");
    assert!(
        merged(&model, &[(&other, 0.5)], None)
            .tensor("output.weight")
            .is_none()
    );
}

#[test]
fn merging_refuses_what_it_cannot_do() {
    let model = Tiny::Llama.model(DType::F32);
    let fits = Arc::new(adapter(&model, 2, 1, |_| true));
    let try_merge = |adapters: &[(Arc<Adapter>, f32)], dtype| {
        model.merged(adapters, dtype, &|_| true).map(|_| ())
    };
    let refused = |scale, dtype| try_merge(&[(Arc::clone(&fits), scale)], dtype).unwrap_err();
    assert!(matches!(
        refused(f32::NAN, None),
        AdapterError::Scale { .. }
    ));
    assert!(matches!(
        refused(1.0, Some(DType::I32)),
        AdapterError::Quant(_)
    ));
    assert!(matches!(
        refused(1.0, Some(DType::Q4_K)),
        AdapterError::RowLength { n: 64, .. }
    ));
    let other = Tiny::Phi3.model(DType::F32);
    let foreign = Arc::new(adapter(&other, 2, 1, |_| true));
    assert!(try_merge(&[(foreign, 1.0)], None).is_err());
    // A weight that would not be finite, and a call that is ended.
    assert!(matches!(refused(3e38, None), AdapterError::Scale { .. }));
    let mut large = (*fits).clone();
    large
        .terms_mut()
        .for_each(|(_, term)| term.parts_mut().1.fill(1e3));
    let huge = model
        .merged(&[(Arc::new(large), 1e38)], None, &|_| true)
        .unwrap();
    assert!(
        huge.to_bytes()
            .unwrap_err()
            .to_string()
            .contains("token_embd")
    );
    let ended = model.merged(&[(fits, 1.0)], None, &|_| false).unwrap();
    assert!(ended.to_bytes().is_err());
}
