//! How a question is judged.

use crate::bench::behaviour::BehaviourError;
use crate::bench::behaviour::facts::Question;
use ruvllm::session::log_sum;
use ruvllm::{Session, Tokenizer};

/// Tokens that a continuation may have more than the right answer.
const MORE: usize = 6;

/// What came of a question.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Answer {
    /// Whether the most likely continuation contains the right answer.
    pub(super) is_said: bool,
    /// The most likely of the answers; 0 is the right one.
    pub(super) chosen: usize,
    /// Logarithm of the right answer's probability, in nats.
    pub(super) log_p: f64,
}

/// Asks `question` in a session that continues `stem`, after `notes`.
pub(super) fn ask(
    stem: &Session,
    tokenizer: &Tokenizer,
    notes: &str,
    question: &Question,
) -> Result<Answer, BehaviourError> {
    let prompt = format!("{notes}{}", question.prompt);
    let tokens = tokenizer.encode(&prompt, false, false);
    let mut session = stem.fork()?;
    session.prefill(&tokens)?;
    let mut log_p = Vec::new();
    let mut length = 0;
    for answer in std::iter::once(&question.answer).chain(&question.wrong) {
        let whole = tokenizer.encode(&format!("{prompt} {answer}"), false, false);
        let same = tokens.iter().zip(&whole).take_while(|(a, b)| a == b);
        let n = same.count().min(whole.len() - 1).max(1);
        length = length.max(whole.len() - n);
        log_p.push(log_probability(&session, stem.position(), &whole, n)?);
    }
    let chosen = (0..log_p.len()).max_by(|&i, &j| log_p[i].total_cmp(&log_p[j]).then(j.cmp(&i)));
    let said = greedy(&mut session, tokenizer, length + MORE)?;
    Ok(Answer {
        is_said: contains(&said, &question.answer),
        chosen: chosen.unwrap_or(0),
        log_p: log_p[0],
    })
}

/// `Σ ln p` of `tokens[n..]`, where `session` contains the first of `tokens` from `start` on.
fn log_probability(
    session: &Session,
    start: usize,
    tokens: &[u32],
    n: usize,
) -> Result<f64, BehaviourError> {
    let mut session = session.fork()?;
    session.rewind(start + n - 1)?;
    let mut sum = 0.0;
    let given = &tokens[n - 1..tokens.len() - 1];
    session.hooks().prefill_each(given, 0, |i, logits| {
        let target = tokens[n + i] as usize;
        sum += f64::from(logits[target] - log_sum(logits));
    })?;
    Ok(sum)
}

/// The most likely continuation up to the end of a line, at most `n` tokens.
fn greedy(
    session: &mut Session,
    tokenizer: &Tokenizer,
    n: usize,
) -> Result<String, BehaviourError> {
    let mut said = Vec::new();
    for _ in 0..n {
        let logits = session.logits();
        let best =
            (0..logits.len()).max_by(|&i, &j| logits[i].total_cmp(&logits[j]).then(j.cmp(&i)));
        let token = best.unwrap_or(0) as u32;
        let is_end = tokenizer.is_eog(token)
            || tokenizer
                .token_bytes(token)
                .is_some_and(|bytes| bytes.contains(&b'\n'));
        if is_end {
            break;
        }
        said.push(token);
        session.decode(token)?;
    }
    Ok(tokenizer.decode_lossy(&said, false).unwrap_or_default())
}

/// Whether a text contains an answer as whole words, in whatever case.
fn contains(text: &str, answer: &str) -> bool {
    let words = |text: &str| {
        let lower = text.to_lowercase();
        let words = lower.split(|c: char| !c.is_alphanumeric());
        let words: Vec<String> = words.filter(|w| !w.is_empty()).map(str::to_owned).collect();
        format!(" {} ", words.join(" "))
    };
    words(text).contains(&words(answer))
}

/// Loss of a text in nats and its tokens, after half of it was given.
pub(super) fn loss(
    stem: &Session,
    notes: &[u32],
    text: &[u32],
) -> Result<(f64, usize), BehaviourError> {
    let mut session = stem.fork()?;
    let given = text.len() / 2;
    let whole = [notes, text].concat();
    let first = notes.len() + given - 1;
    let mut sum = 0.0;
    let read = &whole[..whole.len() - 1];
    session.hooks().prefill_each(read, first, |i, logits| {
        sum += f64::from(log_sum(logits) - logits[whole[i + 1] as usize]);
    })?;
    Ok((sum, text.len() - given))
}

#[cfg(test)]
mod tests {
    use super::contains;

    #[test]
    fn answers_are_whole_words() {
        assert!(contains(" Brumvik, and he", "Brumvik"));
        assert!(contains(" cold\u{a0}Pear soup.", "cold pear soup"));
        assert!(!contains(" 48213", "4821"));
        assert!(!contains("", "4821"));
    }
}
