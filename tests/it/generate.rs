//! What a session holds after a generation, however it ended: the prompt and the text that was
//! handed out.

use crate::run::{OnLevel, Pass, session_on};
use crate::schedule::{answer as answered, steps};
use ruvllm::KvType;
use ruvllm::arch::Arch;
use ruvllm::decode::DecodeError;
use ruvllm::engine::EngineOptions;
use ruvllm::sample::MaskError;
use ruvllm::sample::TokenMask;
use ruvllm::scheduler::{Request, Schedule, ScheduleOptions};
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Model, Sampler, SamplerOptions, Session, SessionError, StopReason};

const PROMPT: &str = "Ownership is";
const NEXT: &str = " Borrowing is";

/// Scalar, as there a token's bits do not depend on whether it was computed alone.
fn model() -> Model {
    Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap()
    .on(Arch::scalar())
}

fn session(model: &Model, n_ctx: usize) -> Session {
    let options = SessionOptions {
        n_ctx: Some(n_ctx),
        kv_type: KvType::F32,
        ..Default::default()
    };
    session_on(model, 1, &options)
}

fn greedy() -> Sampler {
    Sampler::new(SamplerOptions {
        temperature: 0.0,
        ..Default::default()
    })
    .unwrap()
}

/// The first `n` tokens of the answer to `tokens`, one decode after the other.
fn answer(model: &Model, tokens: &[u32], n: usize) -> Vec<u32> {
    let (mut session, mut sampler, mut all) = (session(model, 128), greedy(), tokens.to_vec());
    let mut logits = session.prefilled(tokens);
    for _ in 0..n {
        all.push(sampler.sample(&logits, &all).unwrap());
        logits = session.decoded(all[all.len() - 1]);
    }
    all.split_off(tokens.len())
}

fn decoded(model: &Model, tokens: &[u32]) -> String {
    model
        .tokenizer()
        .unwrap()
        .decode_lossy(tokens, false)
        .unwrap()
}

/// A second turn writes what one run over all tokens writes.
#[track_caller]
fn goes_on(model: &Model, mut session: Session) {
    let mut all = session.tokens().to_vec();
    all.extend(model.tokenizer().unwrap().encode(NEXT, false, true));
    let expected = answer(model, &all, 6);
    let mut sampler = greedy();
    let mut generation = session.generate(NEXT, &mut sampler).unwrap().max_tokens(6);
    generation.by_ref().for_each(|piece| drop(piece.unwrap()));
    assert_eq!(generation.tokens(), expected);
    drop(generation);
    all.extend(expected);
    assert_eq!(session.tokens(), all);
}

#[test]
fn a_session_holds_what_was_handed_out() {
    let model = model();
    let prompt = model.tokenizer().unwrap().encode_prompt(PROMPT);
    let answer = answer(&model, &prompt, 8);
    let held = |n: usize| [&prompt[..], &answer[..n]].concat();
    let mut sampler = greedy();

    let mut limited = session(&model, 128);
    limited
        .generate(PROMPT, &mut sampler)
        .unwrap()
        .max_tokens(5)
        .for_each(|piece| drop(piece.unwrap()));
    assert_eq!(limited.tokens(), held(5));
    assert_eq!(limited.fork().unwrap().tokens(), held(5));
    goes_on(&model, limited.fork().unwrap());
    goes_on(&model, limited);

    // Dropped, and rewound to and before the token that waits.
    let mut dropped = session(&model, 128);
    dropped
        .generate(PROMPT, &mut sampler)
        .unwrap()
        .take(3)
        .for_each(|piece| drop(piece.unwrap()));
    let n = dropped.position() - prompt.len();
    assert_eq!(dropped.tokens(), held(n));
    dropped.rewind(prompt.len() + n).unwrap();
    goes_on(&model, dropped.fork().unwrap());
    dropped.rewind(prompt.len() + n - 1).unwrap();
    assert_eq!(dropped.tokens(), held(n - 1));
    goes_on(&model, dropped);

    let mut cancelled = session(&model, 128);
    let cancel = cancelled.cancel_token();
    let mut generation = cancelled.generate(PROMPT, &mut sampler).unwrap();
    generation.next().unwrap().unwrap();
    cancel.cancel();
    assert!(matches!(
        generation.last(),
        Some(Err(DecodeError::Session(SessionError::Cancelled)))
    ));
    let n = cancelled.position() - prompt.len();
    assert!(n > 0 && cancelled.tokens() == held(n));
    assert!(matches!(
        cancelled.prefill(&[1]),
        Err(SessionError::Cancelled)
    ));
    assert_eq!(cancelled.tokens(), held(n));
    cancel.reset();
    goes_on(&model, cancelled);

    let mut full = session(&model, prompt.len() + 4);
    let mut generation = full.generate(PROMPT, &mut sampler).unwrap();
    generation.by_ref().for_each(|piece| drop(piece.unwrap()));
    assert_eq!(
        (
            generation.finish().map(|finish| finish.reason),
            generation.tokens()
        ),
        (Some(StopReason::ContextFull), &answer[..5])
    );
    drop(generation);
    assert_eq!(full.tokens(), held(4));
}

#[test]
fn a_stop_string_is_not_held() {
    let model = model();
    let prompt = model.tokenizer().unwrap().encode_prompt(PROMPT);
    let answer = answer(&model, &prompt, 12);
    let texts: Vec<String> = answer
        .iter()
        .map(|&token| decoded(&model, &[token]))
        .collect();
    let text = texts.concat();
    let mut inside = 0;
    for (from, _) in text.char_indices().skip(1) {
        let Some(stop) = text.get(from..text.len().min(from + 5)) else {
            continue;
        };
        // Where it appears first.
        let at = text.find(stop).unwrap();
        let mut session = session(&model, 128);
        let mut sampler = greedy();
        let mut generation = session
            .generate(PROMPT, &mut sampler)
            .unwrap()
            .stop(["", "\u{1}", stop])
            .max_tokens(20);
        let handed: String = generation
            .by_ref()
            .map(|piece| piece.unwrap().text)
            .collect();
        assert_eq!(generation.finish().unwrap().stop, Some(2));
        assert_eq!(
            (generation.finish().map(|finish| finish.reason), &*handed),
            (Some(StopReason::StopString), &text[..at]),
            "{stop:?}"
        );
        let rest = generation.rest().to_owned();
        drop(generation);
        let n = session.position() - prompt.len();
        assert_eq!(session.tokens(), [&prompt[..], &answer[..n]].concat());
        assert_eq!(texts[..n].concat() + &rest, handed, "{stop:?}");
        assert!(rest.len() < texts[n].len(), "{rest:?} before {stop:?}");
        inside += usize::from(!rest.is_empty());
        if from % 8 == 0 {
            goes_on(&model, session);
        }
    }
    assert!(inside > 0);
}

#[test]
fn what_is_known_of_a_conversation_is_kept() {
    let model = model();
    let mut session = session(&model, 128);
    session.prefill(&[5, 6, 7, 8]).unwrap();
    assert_eq!(
        (session.cache().keep(&[5, 6, 9, 8]), session.tokens()),
        (2, &[5, 6][..])
    );
    assert_eq!(
        (session.cache().keep(&[5, 6]), session.tokens()),
        (1, &[5][..])
    );
    assert_eq!((session.cache().keep(&[]), session.position()), (0, 0));
}

/// Text that is held back when a generation is dropped or fails was handed to nobody: its tokens
/// are taken back.
#[test]
fn what_nobody_was_handed_is_not_held() {
    let model = model();
    let prompt = model.tokenizer().unwrap().encode_prompt(PROMPT);
    let answer = answer(&model, &prompt, 12);
    let text: String = answer
        .iter()
        .map(|&token| decoded(&model, &[token]))
        .collect();
    // Never comes, but its beginning does: everything from there on is held back.
    let stop = format!("{}\u{0}", &text[text.char_indices().nth(3).unwrap().0..]);
    for cancels in [false, true] {
        let (mut session, mut sampler) = (session(&model, 128), greedy());
        let cancel = session.cancel_token();
        let mut generation = session
            .generate(PROMPT, &mut sampler)
            .unwrap()
            .stop([stop.as_str()])
            .max_tokens(12);
        let mut handed = generation.next().unwrap().unwrap().text;
        if cancels {
            cancel.cancel();
            handed.extend(
                generation
                    .by_ref()
                    .map_while(Result::ok)
                    .map(|piece| piece.text),
            );
        }
        drop(generation);
        let n = session.position() - prompt.len();
        assert_eq!(session.tokens(), [&prompt[..], &answer[..n]].concat());
        assert_eq!(
            answer[..n]
                .iter()
                .map(|&token| decoded(&model, &[token]))
                .collect::<String>(),
            handed
        );
        cancel.reset();
        goes_on(&model, session);
    }
}

#[test]
fn a_generation_that_owns_its_session_gives_it_back() {
    let model = model();
    let prompt = model.tokenizer().unwrap().encode_prompt(PROMPT);
    let expected = answer(&model, &prompt, 6);
    let generation = session(&model, 128)
        .into_generation(PROMPT, greedy())
        .max_tokens(6)
        .logprobs(2);
    let mut generation = std::thread::spawn(move || {
        let mut generation = generation;
        let first = generation.next().unwrap().unwrap();
        assert!(first.logprob.unwrap() <= 0.0 && first.top_logprobs.len() == 2);
        // The most probable token was taken.
        assert_eq!(
            (first.token, first.logprob),
            (first.top_logprobs[0].0, Some(first.top_logprobs[0].1))
        );
        generation
    })
    .join()
    .unwrap();
    assert!(generation.finish().is_none());
    generation.by_ref().for_each(|piece| drop(piece.unwrap()));
    let finish = generation.finish().unwrap();
    assert_eq!(
        (finish.reason, finish.n_prompt, finish.n_generated),
        (StopReason::MaxTokens, prompt.len(), 6)
    );
    assert!(
        finish.timings.first_token >= finish.timings.prefill
            && finish.timings.decode > Default::default()
    );
    assert_eq!(generation.tokens(), expected);
    let (session, _) = generation.into_parts();
    assert_eq!(session.tokens(), [&prompt[..], &expected[..]].concat());

    // What `generate` refuses at once comes with the first step.
    let mut refused = session.into_generation(&[], greedy());
    assert!(matches!(
        refused.next(),
        Some(Err(DecodeError::Session(SessionError::NoTokens)))
    ));
    assert!(refused.next().is_none() && refused.finish().is_none());
}

#[cfg(feature = "grammar")]
mod forced {
    use super::*;
    use crate::common::few_or_many;
    use ruvllm::compute::{Cut, OutputHook, OutputRows};
    use ruvllm::grammar::{Grammar, TokenTrie};

    const REGEX: &str = "The owner of the value is (moved|borrowed) and then it is dropped by (the caller|nobody)\\. So it ends\\.";

    fn masked(model: &Model, bias: &[(u32, f32)]) -> Sampler {
        let trie = TokenTrie::new(model.tokenizer().unwrap()).unwrap();
        let mut sampler = Sampler::new(SamplerOptions {
            temperature: 0.0,
            logit_bias: bias.to_vec(),
            ..Default::default()
        })
        .unwrap();
        sampler.set_mask(Some(Box::new(
            Grammar::regex(&trie, REGEX).unwrap().matcher(),
        )));
        sampler
    }

    /// Tokens, their log-probabilities, and how many of them were forced: every token computed
    /// alone.
    fn one_by_one(model: &Model, prompt: &[u32]) -> (Vec<u32>, Vec<f32>, usize) {
        let (tokenizer, mut sampler, mut session) = (
            model.tokenizer().unwrap(),
            masked(model, &[]),
            session(model, 256),
        );
        let (mut logits, mut tokens, mut logprobs, mut n_forced) =
            (session.prefilled(prompt), vec![], vec![], 0);
        loop {
            let forced = sampler.forced(&|text| tokenizer.encode_inside(text));
            let next = match forced.is_empty() {
                true => vec![sampler.clone().sample(&logits, session.tokens()).unwrap()],
                false => forced,
            };
            for &token in &next {
                if tokenizer.is_eog(token) {
                    return (tokens, logprobs, n_forced);
                }
                let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
                logprobs.push((f64::from(logits[token as usize]) - sum.ln()) as f32);
                sampler.mask_mut().unwrap().accept(token).unwrap();
                logits = session.decoded(token);
                tokens.push(token);
            }
            n_forced += if next.len() > 1 { next.len() } else { 0 };
        }
    }

    /// Counts passes, and the rows that they show.
    #[derive(Default)]
    struct Count {
        passes: Vec<usize>,
    }

    impl OutputHook for Count {
        fn rows(&mut self, rows: OutputRows<'_>) {
            self.passes.push(rows.tokens.len() - rows.first);
        }

        fn cut(&mut self, _: Cut) {}

        fn fork(&self) -> Box<dyn OutputHook> {
            Box::new(Count::default())
        }
    }

    #[test]
    fn one_pass_gives_what_single_ones_give() {
        let model = model();
        let prompt = model.tokenizer().unwrap().encode_prompt(PROMPT);
        let (tokens, logprobs, n_forced) = one_by_one(&model, &prompt);
        assert!(
            n_forced > tokens.len() / 2,
            "{n_forced} of {}",
            tokens.len()
        );
        let (mut session, mut sampler) = (session(&model, 256), masked(&model, &[]));
        session.hooks().set(Box::new(Count::default()));
        let mut generation = session.generate(PROMPT, &mut sampler).unwrap().logprobs(1);
        let pieces: Vec<_> = generation.by_ref().map(Result::unwrap).collect();
        assert_eq!(
            generation.finish().unwrap().reason,
            StopReason::EndOfGeneration
        );
        assert_eq!(generation.tokens(), tokens);
        drop(generation);
        assert_eq!(session.tokens(), [&prompt[..], &tokens].concat());
        assert_eq!(
            pieces.iter().map(|piece| &*piece.text).collect::<String>(),
            decoded(&model, &tokens)
        );
        for (piece, logprob) in pieces.iter().zip(&logprobs) {
            assert!(
                (piece.logprob.unwrap() - logprob).abs() < 1e-4,
                "{piece:?}: {logprob}"
            );
            assert!(piece.top_logprobs[0].1 >= piece.logprob.unwrap());
        }
        let passes = &session.sequence().hook::<Count>().unwrap().passes;
        // That of the prompt shows one row; what was sampled last was not computed.
        assert_eq!(passes.iter().sum::<usize>(), tokens.len(), "{passes:?}");
        assert!(
            passes.len() <= 2 + tokens.len() - n_forced,
            "{passes:?} for {} tokens",
            tokens.len()
        );
        assert!(sampler.rollback(tokens.len() + 1).is_ok() && sampler.rollback(1).is_err());
    }

    /// However it ends, the session holds what was handed out, and the mask has accepted it.
    #[test]
    fn a_run_can_be_cut_anywhere() {
        let model = model();
        let prompt = model.tokenizer().unwrap().encode_prompt(PROMPT);
        let (tokens, ..) = one_by_one(&model, &prompt);
        let text = decoded(&model, &tokens);
        let held = |n: usize| [&prompt[..], &tokens[..n]].concat();
        for n in (0..tokens.len()).step_by(few_or_many(4, 2, 1)) {
            // A limit.
            let (mut limited, mut sampler) = (session(&model, 256), masked(&model, &[]));
            let mut generation = limited
                .generate(PROMPT, &mut sampler)
                .unwrap()
                .max_tokens(n);
            generation.by_ref().for_each(|piece| drop(piece.unwrap()));
            assert_eq!(
                (generation.finish().unwrap().reason, generation.tokens()),
                (StopReason::MaxTokens, &tokens[..n])
            );
            drop(generation);
            assert_eq!(limited.tokens(), held(n));
            assert_eq!(limited.fork().unwrap().tokens(), held(n));
            if n > 0 {
                assert!(
                    sampler.rollback(n).is_ok() && sampler.rollback(1).is_err(),
                    "{n}"
                );
            }
            // Dropped.
            let (mut dropped, mut sampler) = (session(&model, 256), masked(&model, &[]));
            dropped
                .generate(PROMPT, &mut sampler)
                .unwrap()
                .take(n)
                .for_each(|piece| drop(piece.unwrap()));
            assert_eq!(dropped.tokens(), held(n));
            // A full context.
            let (mut full, mut sampler) = (
                session(&model, prompt.len() + n.max(1)),
                masked(&model, &[]),
            );
            let mut generation = full.generate(PROMPT, &mut sampler).unwrap();
            generation.by_ref().for_each(|piece| drop(piece.unwrap()));
            let reason = generation.finish().unwrap().reason;
            assert!(matches!(
                reason,
                StopReason::ContextFull | StopReason::EndOfGeneration
            ));
            assert!(
                text.starts_with(&decoded(&model, generation.tokens())),
                "{n}"
            );
            assert!(generation.tokens().len() > n);
            // Cancelled, then continued by hand.
            let (mut cancelled, mut sampler) = (session(&model, 256), masked(&model, &[]));
            let cancel = cancelled.cancel_token();
            let mut generation = cancelled.generate(PROMPT, &mut sampler).unwrap();
            generation
                .by_ref()
                .take(n)
                .for_each(|piece| drop(piece.unwrap()));
            cancel.cancel();
            let more = generation.by_ref().map_while(Result::ok).count();
            drop(generation);
            assert_eq!(cancelled.tokens(), held(n + more));
            cancel.reset();
            if n % 5 == 0 {
                goes_on(&model, dropped);
                goes_on(&model, limited);
                goes_on(&model, cancelled);
            }
        }
        // A stop string.
        for (from, _) in text.char_indices().skip(1).step_by(3) {
            let Some(stop) = text.get(from..text.len().min(from + 5)) else {
                continue;
            };
            let at = text.find(stop).unwrap();
            let (mut stopped, mut sampler) = (session(&model, 256), masked(&model, &[]));
            let mut generation = stopped.generate(PROMPT, &mut sampler).unwrap().stop([stop]);
            let handed: String = generation
                .by_ref()
                .map(|piece| piece.unwrap().text)
                .collect();
            assert_eq!(
                (generation.finish().unwrap().reason, &*handed),
                (StopReason::StopString, &text[..at])
            );
            let rest = generation.rest().to_owned();
            drop(generation);
            let n = stopped.position() - prompt.len();
            assert_eq!(stopped.tokens(), held(n));
            assert_eq!(decoded(&model, &tokens[..n]) + &rest, handed, "{stop:?}");
        }
    }

    /// A bias of −∞ counts for forced tokens too.
    #[test]
    fn what_is_forbidden_is_not_forced() {
        let model = model();
        let prompt = model.tokenizer().unwrap().encode_prompt(PROMPT);
        let (tokens, ..) = one_by_one(&model, &prompt);
        let never = tokens[3];
        let (mut session, mut sampler) = (
            session(&model, 256),
            masked(&model, &[(never, f32::NEG_INFINITY)]),
        );
        let mut generation = session.generate(PROMPT, &mut sampler).unwrap();
        let text: String = generation
            .by_ref()
            .map(|piece| piece.unwrap().text)
            .collect();
        assert!(!generation.tokens().contains(&never));
        assert!(
            text.starts_with("The owner of the value is") && text.ends_with("So it ends."),
            "{text}"
        );
    }
}

/// A mask that forces a text, if there is one, and has reached its limits after some tokens.
#[derive(Clone, Debug)]
struct Tired {
    left: usize,
    words: Vec<u32>,
    /// What is left of the text that it forces.
    text: Vec<u32>,
}

impl Tired {
    fn sampler(model: &Model, left: usize, text: &[u32]) -> Sampler {
        let mut sampler = greedy();
        sampler.set_mask(Some(Box::new(Tired {
            left,
            words: vec![u32::MAX; model.hparams().n_vocab.div_ceil(32)],
            text: text.to_vec(),
        })));
        sampler
    }
}

impl TokenMask for Tired {
    fn mask(&mut self) -> Result<&[u32], MaskError> {
        let limit = String::from("no more states");
        match self.left {
            0 => Err(MaskError::TooComplex { n_tokens: 0, limit }),
            _ => Ok(&self.words),
        }
    }

    fn allows(&mut self, _: u32) -> Result<bool, MaskError> {
        self.mask().map(|_| true)
    }

    fn forced(&mut self, _: &dyn Fn(&[u8]) -> Vec<u32>) -> Vec<u32> {
        self.text.clone()
    }

    fn accept(&mut self, token: u32) -> Result<(), MaskError> {
        self.mask()?;
        self.left -= 1;
        if self.text.first() == Some(&token) {
            self.text.remove(0);
        }
        Ok(())
    }

    fn rollback(&mut self, n: usize) -> Result<(), MaskError> {
        self.left += n;
        Ok(())
    }

    fn reset(&mut self) {}

    fn boxed_clone(&self) -> Box<dyn TokenMask> {
        Box::new(self.clone())
    }
}

/// The text ends there with a reason, and nothing of it is lost, whether its tokens were sampled or
/// forced, in a session and in a scheduler.
#[test]
fn a_mask_at_its_limits_ends_the_text() {
    let model = model();
    let tokenizer = model.tokenizer().unwrap();
    let prompt = tokenizer.encode_prompt(PROMPT);
    let text = tokenizer.encode(" the set of rules by which a program manages", false, false);
    assert!(text.len() > 5);
    for (expected, text) in [
        (answer(&model, &prompt, 5), &[][..]),
        (text[..5].to_vec(), &text),
    ] {
        let mut sampler = Tired::sampler(&model, 5, text);
        let mut session = session(&model, 128);
        let mut generation = session.generate(PROMPT, &mut sampler).unwrap();
        let handed: String = (generation.by_ref())
            .map(|piece| piece.unwrap().text)
            .collect();
        assert_eq!(generation.finish().unwrap().reason, StopReason::MaskLimit);
        assert_eq!(generation.tokens(), expected);
        assert_eq!(handed, decoded(&model, &expected));
        drop(generation);
        assert_eq!(session.tokens(), [&prompt[..], &expected].concat());

        let engine = Engine::new(&model, &EngineOptions::default()).unwrap();
        let mut schedule = Schedule::new(&engine, &ScheduleOptions::default()).unwrap();
        let request = Request::new(prompt.clone(), Tired::sampler(&model, 5, text));
        let mut stream = schedule.submit(request).unwrap();
        steps(&mut schedule, 20);
        let (pieces, reason, n_generated) = answered(&mut stream);
        let handed: String = pieces.iter().map(|piece| &*piece.text).collect();
        assert_eq!((reason, n_generated), (StopReason::MaskLimit, 5));
        assert_eq!(handed, decoded(&model, &expected));
    }
}
