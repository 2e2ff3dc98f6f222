//! Questions that a model writes about what is remembered, to train on.

use crate::memory::{Memory, MemoryError, Verdict};
use crate::train::Example;
use ruvllm::{Engine, Sampler, SamplerOptions, Session, SessionError, Tokenizer};
use std::collections::BTreeSet;

/// What a model is shown before an entry: how questions about facts are written.
const SHOWN: &str = "\
Fact: The library of Marn opens at nine.
Question: When does the library of Marn open?

Fact: Dora Klem is allergic to peanuts.
Question: Which food makes Dora Klem ill?

Fact: The ferry to Osk leaves from pier four.
Question: From where can I take the boat to Osk?

Fact: The captain of the Blue Team is Ilan Reese.
Question: Whom does the Blue Team have as its captain?

";
/// Whom and what that is about, and no entry is.
const SHOWN_NAMES: [&str; 6] = ["Marn", "Klem", "Osk", "Blue Team", "Ilan", "Reese"];
/// Least letters of a word that tells what a text is about.
const TELLING: usize = 4;
/// Most tokens of a question.
const MOST: usize = 40;
/// Attempts for each question that is asked for.
const ATTEMPTS: usize = 3;

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

/// Something to be learnt: a question that the model wrote, and the entry as its answer, so that
/// nothing is learnt that was not said.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuestionAnswer {
    /// The entry's number.
    pub number: u64,
    /// The question; none is the entry by itself.
    pub question: Option<String>,
    /// The entry's text.
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

impl Memory {
    /// Questions and answers of all entries that are right and that nothing corrects: each by itself, and
    /// questions about it. `progress` is called before each entry with the number of those done.
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
        let tokenizer = engine.model().tokenizer();
        let tokenizer = tokenizer.ok_or(SessionError::NoTokenizer)?;
        let mut shown = engine.session()?;
        shown.prefill(&tokenizer.encode(SHOWN, true, false))?;
        let mut pairs = Vec::new();
        let counts = |verdict| verdict == Verdict::Success;
        let entries = self.entries().iter();
        let entries = entries.filter(|entry| counts(entry.verdict));
        let entries = entries.filter(|entry| self.corrected_by(entry.number).is_none());
        for (done, entry) in entries.enumerate() {
            progress(done);
            let asked = tokenizer.encode(&format!("Fact: {}\nQuestion:", entry.text), false, false);
            let seed = options.seed.wrapping_add(entry.number << 16);
            let is_about = |question: &str| is_about(question, &entry.text);
            let questions = questions(&shown, &asked, (options.each, seed), is_about)?;
            let questions = questions.into_iter().map(Some).chain([None]);
            pairs.extend(questions.map(|question| QuestionAnswer {
                number: entry.number,
                question,
                answer: entry.text.clone(),
            }));
        }
        Ok(pairs)
    }
}

/// Whether a question is about an entry: they share a long word, where words are of Latin letters.
fn is_about(question: &str, entry: &str) -> bool {
    let words = |text: &str| -> BTreeSet<String> {
        let words = text.split(|letter: char| !letter.is_alphanumeric());
        let long = words.filter(|word| word.chars().count() >= TELLING);
        long.map(str::to_lowercase).collect()
    };
    let of_shown = |name: &&str| question.contains(*name) && !entry.contains(*name);
    let shares = !words(entry).is_disjoint(&words(question));
    (shares || !entry.is_ascii()) && !SHOWN_NAMES.iter().any(of_shown)
}

/// At most `each` different questions that go on from `asked` behind what is `shown`.
fn questions(
    shown: &Session,
    asked: &[u32],
    (each, seed): (usize, u64),
    is_about: impl Fn(&str) -> bool,
) -> Result<BTreeSet<String>, MemoryError> {
    let Some((last, before)) = asked.split_last() else {
        return Ok(BTreeSet::new());
    };
    let mut begun = shown.fork()?;
    begun.prefill(before)?;
    let mut found = BTreeSet::new();
    for attempt in 0..ATTEMPTS.saturating_mul(each) {
        if found.len() == each {
            break;
        }
        let mut sampler = Sampler::new(SamplerOptions {
            seed: Some(seed.wrapping_add(attempt as u64)),
            temperature: 0.8,
            top_p: 0.9,
            ..Default::default()
        })?;
        let mut session = begun.fork()?;
        let generation = session.generate(&[*last], &mut sampler)?;
        let mut text = String::new();
        for piece in generation.stop(["\n".to_owned()]).max_tokens(MOST) {
            text.push_str(&piece?.text);
        }
        // What does not come to a question mark is no question.
        let question = text.split_once('?').map(|(question, _)| question.trim());
        let question = question.filter(|question| is_about(question));
        found.extend(question.map(|question| format!("{question}?")));
    }
    Ok(found)
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
