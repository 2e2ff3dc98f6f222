//! Sequences of models with recurrent layers: wherever they go back to, whatever they are saved as
//! and whoever goes on with what they left, the bits are those of a sequence that never was
//! anywhere else.

use crate::invariance::{Shape, model};
use crate::run::{Pass, engine, open};
use crate::speculate::{Oracle, Scatter};
use crate::tiny::N_VOCAB;
use ruvllm::Model;
use ruvllm::compute::TokenKind;
use ruvllm::decode::{DraftStats, Speculation};
use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::gguf::{Array, Gguf, Writer};
use ruvllm::lora::{Adapter, Gradients};
use ruvllm::model::OpenOptions;
use ruvllm::quant::DType;
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
use ruvllm::session::GradientError;
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Sampler, SamplerOptions, Session, SessionError};
use std::sync::Arc;

pub(crate) fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 31 + seed * 7 + i * i % 11) % N_VOCAB) as u32)
        .collect()
}

fn options() -> SessionOptions {
    SessionOptions {
        n_ctx: Some(512),
        n_batch: 100,
        ..Default::default()
    }
}

fn session(model: &Model) -> Session {
    engine(model, 2).session_with(&options()).unwrap()
}

const N_PROMPT: usize = 230;

/// A prompt, then generated tokens.
fn text(model: &Model) -> (Session, Vec<(u32, TokenKind)>) {
    let mut session = session(model);
    session.prefill(&tokens(N_PROMPT, 1)).unwrap();
    let generated = tokens(20, 2);
    generated
        .iter()
        .for_each(|&token| session.decode(token).unwrap());
    let prompt = tokens(N_PROMPT, 1)
        .into_iter()
        .map(|token| (token, TokenKind::Prompt));
    (
        session,
        prompt
            .chain(
                generated
                    .into_iter()
                    .map(|token| (token, TokenKind::Generated)),
            )
            .collect(),
    )
}

/// A session that holds the first `n` of `text` and was never anywhere else.
fn fresh(model: &Model, text: &[(u32, TokenKind)], n: usize) -> Session {
    let mut session = session(model);
    let prompt: Vec<u32> = text[..n.min(N_PROMPT)]
        .iter()
        .map(|(token, _)| *token)
        .collect();
    if n > 0 {
        session.prefill(&prompt).unwrap();
    }
    text[..n]
        .iter()
        .skip(N_PROMPT)
        .for_each(|(token, _)| session.decode(*token).unwrap());
    session
}

#[test]
fn rewinds_forks_and_files_change_no_bit() {
    for shape in Shape::RECURRENT {
        let model = model(shape, DType::Q8_0);
        let (whole, text) = text(&model);
        // Inside the last pass; some tokens back; inside the prompt's last pass and farther back;
        // page borders.
        for n in [
            250, 249, 248, 240, 231, 230, 229, 215, 192, 190, 128, 100, 64, 7, 1, 0,
        ] {
            let what = format!("{shape:?} {n}");
            let mut expected = fresh(&model, &text, n);
            let expected = (
                expected.decoded(5),
                expected.prefilled(&tokens(70, 4)),
                expected.decoded(6),
            );
            let go_on = |mut session: Session| {
                let first = session.decoded(5);
                // Back and forth: what was computed meanwhile leaves nothing.
                session.prefill(&tokens(3, 9)).unwrap();
                session.rewind(n + 1).unwrap();
                (first, session.prefilled(&tokens(70, 4)), session.decoded(6))
            };
            let mut session = whole.fork().unwrap();
            session.rewind(n).unwrap();
            let fork = session.fork().unwrap();
            let mut loaded = self::session(&model);
            loaded
                .cache()
                .load_bytes(session.state().to_bytes().unwrap())
                .unwrap();
            assert_eq!(loaded.tokens(), session.tokens(), "{what}");
            for session in [session, fork, loaded] {
                assert!(go_on(session) == expected, "{what}");
            }
        }
    }
}

/// What a sequence leaves is found by others up to its checkpoints, and is the same as if it had
/// been computed.
#[test]
fn prefixes_are_reused_from_checkpoints_on() {
    for shape in Shape::RECURRENT {
        let model = model(shape, DType::Q8_0);
        let engine = engine(&model, 2);
        let cached = SessionOptions {
            prefix: CacheMode::On.into(),
            ..options()
        };
        engine
            .session_with(&cached)
            .unwrap()
            .prefill(&tokens(230, 1))
            .unwrap();
        for (same, n_reused) in [(230, 230), (229, 192), (150, 128), (60, 0)] {
            let mut prompt = tokens(230, 1)[..same].to_vec();
            prompt.extend([3, 4, 5]);
            let mut cold = engine.session_with(&options()).unwrap();
            let mut warm = engine
                .session_with(&SessionOptions {
                    prefix: CacheMode::ReadOnly.into(),
                    ..options()
                })
                .unwrap();
            assert!(
                warm.prefilled(&prompt) == cold.prefilled(&prompt),
                "{shape:?} {same}"
            );
            assert_eq!(
                warm.sequence().cached_tokens().total(),
                n_reused,
                "{shape:?} {same}"
            );
            assert!(warm.decoded(7) == cold.decoded(7), "{shape:?} {same}");
            warm.rewind(same / 2).unwrap();
            cold.rewind(same / 2).unwrap();
            assert!(warm.decoded(7) == cold.decoded(7), "{shape:?} {same}");
        }
    }
}

#[test]
fn what_recurrent_layers_cannot_do_is_refused_by_name() {
    for (shape, name) in [
        (Shape::ShortConv, "short convolutions"),
        (Shape::Mamba, "state spaces"),
        (Shape::Beside, "state spaces"),
        (Shape::Delta, "delta rules"),
        (Shape::Rwkv, "RWKV"),
    ] {
        let model = model(shape, DType::F32);
        let adapter = Adapter::zeros(&model, 2, 1, |site| {
            ["ffn_up", "channel_mix_key"].contains(&site.part())
        })
        .unwrap();
        let adapter = Arc::new(adapter);
        let mut session = session(&model);
        let id = session
            .adapters()
            .attach(Arc::clone(&adapter), 1.0)
            .unwrap();
        let refused = session.training().nll_gradient(
            id,
            &[1, 2],
            &[2, 3],
            &[1.0; 2],
            &mut Gradients::zeros(&adapter),
        );
        assert!(
            matches!(refused, Err(GradientError::Session(SessionError::NoGradient { what })) if what == name),
            "{shape:?}"
        );
        let shifting = SessionOptions {
            context_shift: Some(0),
            ..options()
        };
        let refused = engine(&model, 1).session_with(&shifting);
        assert!(
            matches!(refused, Err(SessionError::NoShift { what }) if what == name),
            "{shape:?}"
        );
    }
}

/// Rows of a pass that are taken back, as drafts are, leave nothing in the state: they are computed
/// with the arithmetic of generated tokens (`exact`), some at a time, of which one stays.
#[test]
fn rejected_rows_leave_nothing() {
    for shape in Shape::RECURRENT {
        let model = model(shape, DType::Q8_0);
        let options = SessionOptions {
            exact: true,
            ..options()
        };
        let [mut drafted, mut plain] =
            [(); 2].map(|()| engine(&model, 2).session_with(&options).unwrap());
        let text = tokens(200, 1);
        [&mut drafted, &mut plain]
            .into_iter()
            .for_each(|session| session.prefill(&text[..100]).unwrap());
        for (i, &token) in text[100..170].iter().enumerate() {
            let mut rows = text[100 + i..][..1 + i % 3].to_vec();
            rows.extend(tokens(i % 7, 5));
            let mut first = Vec::new();
            let each = |row: usize, logits: &[f32]| {
                if row == 0 {
                    first.extend_from_slice(logits)
                }
            };
            drafted.hooks().prefill_each(&rows, 0, each).unwrap();
            drafted.rewind(101 + i).unwrap();
            plain.decode(token).unwrap();
            assert!(first == plain.logits(), "{shape:?} {i}");
        }
    }
}

/// The same file with a token for each row of its embedding table.
pub(crate) fn with_tokens(model: &Model) -> Model {
    let gguf = model.gguf();
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata().iter() {
        writer.metadata(key, value.clone());
    }
    let letters = (b'!'..)
        .take(N_VOCAB - 3)
        .map(|letter| char::from(letter).to_string());
    let tokens = ["<unk>", "<s>", "</s>"]
        .into_iter()
        .map(str::to_owned)
        .chain(letters);
    writer.metadata("tokenizer.ggml.model", "llama");
    writer.metadata("tokenizer.ggml.tokens", Array::Strings(tokens.collect()));
    writer.metadata("tokenizer.ggml.scores", vec![0.0f32; N_VOCAB]);
    let kinds = (0..N_VOCAB)
        .map(|i| [2, 3, 3, 1][i.min(3)])
        .collect::<Vec<i32>>();
    writer.metadata("tokenizer.ggml.token_type", kinds);
    for tensor in gguf.tensors() {
        writer.tensor(&*tensor.name, &tensor.dims, tensor.dtype, gguf.data(tensor));
    }
    open(Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()).unwrap()
}

/// Right and wrong drafts change no token, of a session alone and of requests side by side, on a
/// pool with room for all and on one where some lose their pages.
#[test]
fn drafts_change_no_text() {
    for shape in Shape::RECURRENT {
        let model = with_tokens(&model(shape, DType::Q8_0));
        let prompts: Vec<Vec<u32>> = (0..4).map(|i| tokens(3 + 37 * i, i)).collect();
        let sampler = |i: usize| {
            Sampler::new(SamplerOptions {
                temperature: 0.8,
                seed: Some(i as u64),
                ..Default::default()
            })
            .unwrap()
        };
        let n = 90;
        let alone = |i: usize, speculation: Option<Speculation>| {
            let mut generation = session(&model)
                .into_generation(&prompts[i], sampler(i))
                .max_tokens(n);
            if let Some(speculation) = speculation {
                generation = generation.speculate(speculation);
            }
            generation.by_ref().for_each(|piece| drop(piece.unwrap()));
            (
                generation.tokens().to_vec(),
                generation.finish().unwrap().drafts,
            )
        };
        let texts: Vec<Vec<u32>> = (0..prompts.len()).map(|i| alone(i, None).0).collect();
        let speculation = |i: usize| {
            let text = [&prompts[i][..], &texts[i]].concat();
            match i % 3 {
                0 => Speculation::by(Oracle::new(text, 300)).fixed_length(15),
                1 => Speculation::default().fixed_length(4),
                _ => Speculation::by(Oracle::new(text, 100)).and(Scatter(3)),
            }
        };
        let mut drafts = DraftStats::default();
        for i in 0..prompts.len() {
            let (text, of_text) = alone(i, Some(speculation(i)));
            assert_eq!(text, texts[i], "{shape:?} {i}");
            // A text may end at its first token.
            if i % 3 == 0 {
                drafts.n_accepted += of_text.n_accepted;
                drafts.n_drafted += of_text.n_drafted;
            }
        }
        assert!(
            drafts.n_accepted > 0 && drafts.n_accepted < drafts.n_drafted,
            "{shape:?}: {drafts:?}"
        );
        let side_by_side = |kv_budget: Option<u64>| {
            let engine = Engine::new(
                &model,
                &EngineOptions {
                    kv_budget,
                    ..Default::default()
                },
            )
            .unwrap();
            let options = ScheduleOptions {
                session: options(),
                n_pieces: 1000,
                ..Default::default()
            };
            let mut schedule = Schedule::new(&engine, &options).unwrap();
            let request = |i: usize| Request::new(prompts[i].clone(), sampler(i)).max_tokens(n);
            let streams = (0..prompts.len()).map(|i| {
                schedule
                    .submit(request(i).speculate(speculation(i)))
                    .unwrap()
            });
            let streams: Vec<_> = streams.collect();
            let mut most = 0;
            while schedule.step() {
                most = most.max(engine.pool().stats().used);
            }
            for (i, stream) in streams.into_iter().enumerate() {
                let tokens: Vec<u32> = stream.map(|piece| piece.unwrap().token).collect();
                assert_eq!(tokens, texts[i], "{shape:?} {i} {kv_budget:?}");
            }
            most
        };
        let most = side_by_side(None);
        side_by_side(Some(most * 2 / 3));
    }
}

/// What a file says of its recurrences is judged when it is opened.
#[test]
fn sizes_that_make_no_sense_are_refused() {
    let model = model(Shape::Beside, DType::F32);
    let gguf = model.gguf();
    for (key, value, expected) in [
        ("falcon-h1.ssm.conv_kernel", 1u32, "2 to 64"),
        ("falcon-h1.ssm.conv_kernel", 1 << 20, "2 to 64"),
        ("falcon-h1.ssm.time_step_rank", 0, "1 to 4096"),
        ("falcon-h1.ssm.time_step_rank", 7, "no multiple of"),
        ("falcon-h1.ssm.group_count", 3, "no multiple of"),
        ("falcon-h1.ssm.state_size", 0, "1 to 4096"),
    ] {
        let refused = OpenOptions::new()
            .override_kv(key, value)
            .open_gguf(gguf.clone())
            .unwrap_err()
            .to_string();
        assert!(refused.contains(expected), "{key} {value}: {refused}");
    }
}
