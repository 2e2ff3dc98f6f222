//! Questions that a model writes about what is remembered, to train on.

use crate::memory::{Entry, Memory, MemoryError, Verdict};
use crate::train::Example;
use ruvllm::{CancelToken, Engine, Sampler, SamplerOptions, Session, SessionError, Tokenizer};
use std::collections::{BTreeMap, BTreeSet};

/// What a model is shown before an entry: how questions about facts are written, from either end, and
/// answered in other words.
const SHOWN: &str = "\
Fact: The library of Marn opens at nine.
Question: When does the library of Marn open?
Answer: It opens at nine.

Fact: Dora Klem is allergic to peanuts.
Question: Who must not eat peanuts?
Answer: The one who must not eat them is Dora Klem.

Fact: The ferry to Osk leaves from pier four.
Question: From where can I take the boat to Osk?
Answer: You can take it from pier four.

Fact: The captain of the Blue Team is Ilan Reese.
Question: Which team does Ilan Reese lead?
Answer: It is the Blue Team.

";
/// Whom and what that is about, and no entry is.
const SHOWN_NAMES: [&str; 6] = ["Marn", "Klem", "Osk", "Blue Team", "Ilan", "Reese"];
/// Most long words of an answer that are neither in the entry nor in the question: more of them tell what
/// nobody said.
const MOST_NEW: usize = 1;
/// What an answer begins with.
const ANSWER: &str = "\nAnswer:";
/// What every second question begins with, in turns: left to itself, a small model asks for little else
/// but who.
const BEGINNINGS: [&str; 6] = [" Where", " What", " Which", " Who", " How", " When"];
/// Least letters of a word that tells what a text is about.
const TELLING: usize = 4;
/// Most tokens of a question and its answer.
const MOST: usize = 80;
/// Questions that are kept though the model did not answer them, where it answered fewer.
const LEAST: usize = 2;
/// Attempts for each question that is asked for.
const ATTEMPTS: usize = 6;

/// How many questions are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuestionOptions {
    /// Most questions about an entry, none of them twice. Default 6.
    pub each: usize,
    /// Seed of the questions. Default 1.
    pub seed: u64,
}

impl Default for QuestionOptions {
    fn default() -> Self {
        QuestionOptions { each: 6, seed: 1 }
    }
}

/// Something to be learnt: a question that the model wrote, and its answer: the entry, or a sentence of
/// the model's with the names and numbers that the entry has and the question lacks, and no others.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuestionAnswer {
    /// The entry's number.
    pub number: u64,
    /// The question; none is the entry by itself.
    pub question: Option<String>,
    /// The entry's text, or the model's answer.
    pub answer: String,
}

impl QuestionAnswer {
    /// The pair as a text: what is given, and what is to be learnt.
    pub fn text(&self) -> (String, String) {
        match &self.question {
            Some(question) => (
                format!("Question: {question}\nAnswer:"),
                format!(" {}\n", self.answer),
            ),
            None => (String::new(), format!("{}\n", self.answer)),
        }
    }

    /// The pair as an example to train on.
    pub fn example(&self, tokenizer: &Tokenizer) -> Example {
        let (given, learnt) = self.text();
        let given = tokenizer.encode(&given, true, false);
        Example::completion(&given, &tokenizer.encode(&learnt, false, false))
    }
}

/// A model that writes questions, behind what it is shown.
pub(super) struct Writer {
    shown: Session,
}

impl Writer {
    pub(super) fn new(engine: &Engine) -> Result<Writer, MemoryError> {
        let tokenizer = engine.model().tokenizer();
        let tokenizer = tokenizer.ok_or(SessionError::NoTokenizer)?;
        let mut shown = engine.session()?;
        shown.prefill(&tokenizer.encode(SHOWN, true, false))?;
        Ok(Writer { shown })
    }

    /// An entry by itself, and questions about it, every second one answered in other words where the
    /// model found any.
    pub(super) fn about(
        &self,
        entry: &Entry,
        options: &QuestionOptions,
        cancel: &CancelToken,
    ) -> Result<Vec<QuestionAnswer>, MemoryError> {
        let asked = format!("Fact: {}\nQuestion:", entry.text);
        let seed = options.seed.wrapping_add(entry.number << 16);
        let about = (&*asked, seed, &*entry.text);
        let written = written(&self.shown, about, options.each, cancel)?;
        let pair = |question, answer: Option<String>| QuestionAnswer {
            number: entry.number,
            question,
            answer: answer.unwrap_or_else(|| entry.text.clone()),
        };
        let pairs = written.into_iter().enumerate();
        let pairs = pairs
            .map(|(i, (question, answer))| pair(Some(question), answer.filter(|_| i % 2 == 0)));
        Ok(pairs.chain([pair(None, None)]).collect())
    }
}

impl Memory {
    /// Entries that are right and that nothing corrects.
    pub(super) fn in_effect(&self) -> impl Iterator<Item = &Entry> {
        let entries = self.entries().iter();
        let entries = entries.filter(|entry| entry.verdict == Verdict::Success);
        entries.filter(|entry| self.corrected_by(entry.number).is_none())
    }

    /// Questions and answers of all entries that are right and that nothing corrects: each by itself, and
    /// questions about it, every second one answered in other words where the model found any. `progress`
    /// is called before each entry with the number of those done.
    /// The same folder, model and options give the same pairs.
    ///
    /// # Errors
    /// If the model has no tokenizer, or a pass fails.
    pub fn question_answers(
        &self,
        engine: &Engine,
        options: &QuestionOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<QuestionAnswer>, MemoryError> {
        let (writer, never) = (Writer::new(engine)?, CancelToken::default());
        let mut pairs = Vec::new();
        for (done, entry) in self.in_effect().enumerate() {
            progress(done);
            pairs.extend(writer.about(entry, options, &never)?);
        }
        Ok(pairs)
    }
}

/// Words of a text that `is_told` takes, in lower case.
fn words(text: &str, is_told: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let words = text.split(|letter: char| !letter.is_alphanumeric());
    let words = words.filter(|word| !word.is_empty() && is_told(word));
    words.map(str::to_lowercase).collect()
}

fn is_long(word: &str) -> bool {
    word.chars().count() >= TELLING
}

/// Whether a word is a name or a number, or begins a sentence.
fn is_name(word: &str) -> bool {
    word.starts_with(char::is_uppercase) || word.contains(char::is_numeric)
}

/// A text without its first word, which is written like a name whether it is one or not.
fn behind_first(text: &str) -> &str {
    text.split_once(' ').map_or("", |(_, rest)| rest)
}

/// Whether a question is about an entry: they share a name or a number, or a long word if the entry
/// has no names, where words are of Latin letters.
fn is_about(question: &str, entry: &str) -> bool {
    let of_shown = |name: &&str| question.contains(*name) && !entry.contains(*name);
    let names = words(behind_first(entry), is_name);
    let shares = match names.is_empty() {
        true => !words(entry, is_long).is_disjoint(&words(question, is_long)),
        false => !names.is_disjoint(&words(question, |_| true)),
    };
    (shares || !entry.is_ascii()) && !SHOWN_NAMES.iter().any(of_shown)
}

/// Whether an answer tells what the entry does and the question does not: of the entry's names and
/// numbers those that the question lacks, or of its long words where it lacks none; and no name or
/// number besides, and hardly a long word.
pub(super) fn is_answered(answer: &str, question: &str, entry: &str) -> bool {
    let asked = words(question, |_| true);
    let told = words(answer, |_| true);
    let known = &words(entry, |_| true) | &asked;
    let has_number = |word: &str| word.contains(char::is_numeric);
    let names = &words(behind_first(answer), is_name) | &words(answer, has_number);
    let missing = [is_name as fn(&str) -> bool, is_long];
    let mut missing = missing
        .map(|is_told| &words(behind_first(entry), is_told) - &asked)
        .into_iter();
    let missing = missing.find(|words| !words.is_empty());
    let new = words(answer, is_long).difference(&known).count();
    names.is_subset(&known)
        && new <= MOST_NEW
        && missing.is_some_and(|missing| missing.is_subset(&told))
}

/// At most `each` different questions that go on from what is `asked` about an entry, behind what is
/// `shown`, with the model's answers where they tell the entry.
fn written(
    shown: &Session,
    (asked, seed, entry): (&str, u64, &str),
    each: usize,
    cancel: &CancelToken,
) -> Result<Vec<(String, Option<String>)>, MemoryError> {
    let tokenizer = shown.model().tokenizer();
    let tokenizer = tokenizer.ok_or(SessionError::NoTokenizer)?;
    let asked = tokenizer.encode(asked, false, false);
    let Some((&last, before)) = asked.split_last() else {
        return Ok(Vec::new());
    };
    let mut begun = shown.fork()?;
    begun.prefill(before)?;
    // A question that the model cannot answer, with the entry before it, rarely asks for it.
    let (mut answered, mut others) = (BTreeMap::new(), BTreeSet::new());
    for attempt in 0..ATTEMPTS.saturating_mul(each) {
        if answered.len() == each {
            break;
        }
        let mut sampler = Sampler::new(SamplerOptions {
            seed: Some(seed.wrapping_add(attempt as u64)),
            temperature: 0.8,
            top_p: 0.9,
            ..Default::default()
        })?;
        let mut session = begun.fork()?;
        let beginning = match attempt % 2 {
            0 => "",
            _ => BEGINNINGS[attempt / 2 % BEGINNINGS.len()],
        };
        let given = match beginning {
            "" => vec![last],
            beginning => {
                let given = tokenizer.encode_continuation(beginning, last);
                [&[last], &given[..]].concat()
            }
        };
        let generation = session.generate(&given[..], &mut sampler)?;
        let mut text = beginning.to_owned();
        for piece in generation.stop(["\n\n".to_owned()]).max_tokens(MOST) {
            text.push_str(&piece?.text);
            if cancel.is_cancelled() {
                return Err(SessionError::Cancelled.into());
            }
        }
        // What does not come to a question mark is no question.
        let Some((question, rest)) = text.split_once('?') else {
            continue;
        };
        let question = question.trim();
        if question.contains('\n') || !is_about(question, entry) {
            continue;
        }
        let whole = format!("{question}?");
        let answer = rest.strip_prefix(ANSWER).map(str::trim);
        let answer = answer.filter(|answer| !answer.contains('\n') && answer.ends_with('.'));
        match answer.filter(|answer| is_answered(answer, question, entry)) {
            Some(answer) => {
                answered.entry(whole).or_insert_with(|| answer.to_owned());
            }
            None => {
                others.insert(whole);
            }
        }
    }
    others.retain(|question| !answered.contains_key(question));
    let n_others = each.min(LEAST).saturating_sub(answered.len());
    let others = others.into_iter().take(n_others);
    let all = answered
        .into_iter()
        .map(|(question, answer)| (question, Some(answer)));
    Ok(all.chain(others.map(|question| (question, None))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{MemoryOptions, NewEntry};
    use ruvllm::Model;

    #[test]
    fn questions_are_about_their_entry() {
        let entry = "The door code of the Vintal Archive is 4821.";
        assert!(is_about("Which code opens the Vintal Archive", entry));
        assert!(!is_about("Who was the first librarian of Marn", entry));
        assert!(!is_about("What is the door code of the Blue Team", entry));
        assert!(!is_about("Who is it", entry));
        assert!(is_about("какой код", "Код двери 4821."));
    }

    #[test]
    fn answers_tell_their_entry() {
        let entry = "The door code of the Vintal Archive is 4821.";
        let question = "Which digits open the Vintal Archive";
        assert!(is_answered("They are 4821.", question, entry));
        assert!(!is_answered("They are 4822.", question, entry));
        assert!(!is_answered("They are 4821, says Marn.", question, entry));
        assert!(!is_answered("It is the Archive.", question, entry));
        assert!(!is_answered(
            "They are 4821, kept under stones.",
            question,
            entry
        ));
        let entry = "The favourite dish of Tarn Brel is cold pear soup.";
        let question = "What is the favourite dish of Tarn Brel";
        assert!(is_answered("That is cold pear soup.", question, entry));
        assert!(!is_answered("That is pear soup.", question, entry));
        let question = "Whose favourite dish is cold pear soup";
        assert!(is_answered("It is Tarn Brel.", question, entry));
    }

    #[test]
    fn answers_say_what_was_said() -> Result<(), Box<dyn std::error::Error>> {
        let model = Model::open("../models/ruvllm-rust-6m-q8_0.gguf")?;
        let folder = std::env::temp_dir().join(format!("ruvllm-questions-{}", std::process::id()));
        let mut memory = Memory::open(&folder, &MemoryOptions::default())?;
        let texts = [
            "The gauge is read by Talvo.",
            "The gauge is read by Mirela now.",
        ];
        memory.remember(NewEntry::taught(texts[0]), None)?;
        memory.remember(NewEntry::correction(texts[1]), None)?;
        let wrong = NewEntry {
            verdict: Verdict::Failure,
            ..NewEntry::taught("Boil the seeds.")
        };
        memory.remember(wrong, None)?;
        let options = QuestionOptions {
            each: 2,
            ..Default::default()
        };
        let pairs = memory.question_answers(&model.engine()?, &options, &mut |_| ())?;
        assert!((1..=3).contains(&pairs.len()), "{pairs:?}");
        assert!(pairs.iter().all(|pair| pair.answer == texts[1]));
        let questions = pairs.iter().filter_map(|pair| pair.question.as_ref());
        assert!(questions.clone().all(|question| question.ends_with('?')));
        assert_eq!(questions.collect::<BTreeSet<_>>().len(), pairs.len() - 1);
        let again = memory.question_answers(&model.engine()?, &options, &mut |_| ())?;
        assert_eq!(again, pairs);
        drop(memory);
        std::fs::remove_dir_all(&folder)?;
        Ok(())
    }
}
