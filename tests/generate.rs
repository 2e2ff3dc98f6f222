//! What a session holds after a generation, however it ended: the prompt and the text that was handed out.

use ruvllm::arch::Arch;
use ruvllm::exec::{KvType, SessionOptions};
use ruvllm::{CancelToken, Error, Model, Sampler, Session, SessionError, StopReason};

const PROMPT: &str = "Ownership is";
const NEXT: &str = " Borrowing is";

/// Scalar, as there a token's bits do not depend on whether it was computed alone.
fn model() -> Model {
    Model::open(concat!(env!("CARGO_MANIFEST_DIR"), "/models/ruvllm-rust-6m-q8_0.gguf"))
        .unwrap()
        .with_arch(Arch::scalar())
}

fn session(model: &Model, n_ctx: usize) -> Session<'_> {
    let options = SessionOptions { n_ctx: Some(n_ctx), kv_type: KvType::F32, n_threads: 1, ..Default::default() };
    model.session_with(&options).unwrap()
}

fn greedy() -> Sampler {
    Sampler::builder().temperature(0.0).build().unwrap()
}

/// The first `n` tokens of the answer to `tokens`, one decode after the other.
fn answer(model: &Model, tokens: &[u32], n: usize) -> Vec<u32> {
    let (mut session, mut sampler, mut all) = (session(model, 128), greedy(), tokens.to_vec());
    let mut logits = session.prefill(tokens).unwrap().to_vec();
    for _ in 0..n {
        all.push(sampler.sample(&logits, &all).unwrap());
        logits = session.decode(all[all.len() - 1]).unwrap().to_vec();
    }
    all.split_off(tokens.len())
}

fn decoded(model: &Model, tokens: &[u32]) -> String {
    model.tokenizer().unwrap().decode_lossy(tokens, false).unwrap()
}

/// A second turn writes what one run over all tokens writes.
#[track_caller]
fn goes_on(model: &Model, mut session: Session<'_>) {
    let mut all = session.tokens().to_vec();
    all.extend(model.tokenizer().unwrap().encode(NEXT, false, true));
    let expected = answer(model, &all, 6);
    let mut sampler = greedy();
    let mut generation = session.generate(NEXT, &mut sampler).unwrap().max_tokens(6);
    generation.by_ref().for_each(|piece| drop(piece.unwrap()));
    assert_eq!(generation.tokens(), expected);
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
    limited.generate(PROMPT, &mut sampler).unwrap().max_tokens(5).for_each(|piece| drop(piece.unwrap()));
    assert_eq!(limited.tokens(), held(5));
    assert_eq!(limited.fork().unwrap().tokens(), held(5));
    goes_on(&model, limited.fork().unwrap());
    goes_on(&model, limited);

    // Dropped, and rewound to and before the token that waits.
    let mut dropped = session(&model, 128);
    dropped.generate(PROMPT, &mut sampler).unwrap().take(3).for_each(|piece| drop(piece.unwrap()));
    let n = dropped.position() - prompt.len();
    assert_eq!(dropped.tokens(), held(n));
    dropped.rewind(prompt.len() + n).unwrap();
    goes_on(&model, dropped.fork().unwrap());
    dropped.rewind(prompt.len() + n - 1).unwrap();
    assert_eq!(dropped.tokens(), held(n - 1));
    goes_on(&model, dropped);

    let mut cancelled = session(&model, 128);
    let cancel = CancelToken::default();
    cancelled.set_cancel_token(cancel.clone());
    let mut generation = cancelled.generate(PROMPT, &mut sampler).unwrap();
    generation.next().unwrap().unwrap();
    cancel.cancel();
    assert!(matches!(generation.last(), Some(Err(Error::Session(SessionError::Cancelled)))));
    let n = cancelled.position() - prompt.len();
    assert!(n > 0 && cancelled.tokens() == held(n));
    assert!(matches!(cancelled.prefill(&[1]), Err(SessionError::Cancelled)));
    assert_eq!(cancelled.tokens(), held(n));
    cancel.reset();
    goes_on(&model, cancelled);

    let mut full = session(&model, prompt.len() + 4);
    let mut generation = full.generate(PROMPT, &mut sampler).unwrap();
    generation.by_ref().for_each(|piece| drop(piece.unwrap()));
    assert_eq!((generation.stop_reason(), generation.tokens()), (Some(StopReason::ContextFull), &answer[..5]));
    assert_eq!(full.tokens(), held(4));
}

#[test]
fn a_stop_string_is_not_held() {
    let model = model();
    let prompt = model.tokenizer().unwrap().encode_prompt(PROMPT);
    let answer = answer(&model, &prompt, 12);
    let texts: Vec<String> = answer.iter().map(|&token| decoded(&model, &[token])).collect();
    let text = texts.concat();
    let mut inside = 0;
    for (from, _) in text.char_indices().skip(1) {
        let Some(stop) = text.get(from..text.len().min(from + 5)) else { continue };
        // Where it appears first.
        let at = text.find(stop).unwrap();
        let mut session = session(&model, 128);
        let mut sampler = greedy();
        let mut generation = session.generate(PROMPT, &mut sampler).unwrap().stop([stop]).max_tokens(20);
        let handed: String = generation.by_ref().map(Result::unwrap).collect();
        assert_eq!((generation.stop_reason(), &*handed), (Some(StopReason::StopString), &text[..at]), "{stop:?}");
        let rest = generation.rest().to_owned();
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
    assert_eq!((session.keep(&[5, 6, 9, 8]), session.tokens()), (2, &[5, 6][..]));
    assert_eq!((session.keep(&[5, 6]), session.tokens()), (1, &[5][..]));
    assert_eq!((session.keep(&[]), session.position()), (0, 0));
}
