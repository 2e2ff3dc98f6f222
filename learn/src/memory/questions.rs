//! Questions that a model writes about what is remembered, to train on.

use crate::memory::continued::continued;
use crate::memory::words::{behind_first, is_long, is_name, names, words};
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
/// Most tokens of a question and its answer.
const MOST: usize = 80;
/// What half an answer may begin with, besides what the model's answers do.
const LEADS: [&str; 8] = [
    "It is",
    "That is",
    "They are",
    "The answer is",
    "That would be",
    "It must be",
    "I think it is",
    "You are looking for",
];
/// Questions that are kept though the model did not answer them, where it answered fewer.
const LEAST: usize = 2;
/// Most words before what is asked for that are taken to other answers.
const LEAD: usize = 6;
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
    /// How the answer begins, if that is given, too; otherwise empty.
    pub lead: String,
    /// The entry's text, the model's answer, or what is asked for alone.
    pub answer: String,
}

impl QuestionAnswer {
    /// The pair as a text: what is given, and what is to be learnt.
    pub fn text(&self) -> (String, String) {
        let answer = &self.answer;
        let Some(question) = &self.question else {
            return (String::new(), format!("{answer}\n"));
        };
        let given = format!("Question: {question}\nAnswer: {}", self.lead);
        (given.trim_end().to_owned(), format!(" {answer}\n"))
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

    /// An entry by itself, and questions about it, with the model's answers where it found any.
    pub(super) fn about(
        &self,
        entry: &Entry,
        options: &QuestionOptions,
        cancel: &CancelToken,
    ) -> Result<Vec<QuestionAnswer>, MemoryError> {
        let asked = format!("Fact: {}\nQuestion:", told(entry));
        let seed = options.seed.wrapping_add(entry.number << 16);
        let about = (&*asked, seed, &*entry.text);
        let written = written(&self.shown, about, options.each, cancel)?;
        let pair = |question, answer: Option<String>| QuestionAnswer {
            number: entry.number,
            question,
            lead: String::new(),
            answer: answer.unwrap_or_else(|| entry.text.clone()),
        };
        let pairs = written.into_iter();
        let pairs = pairs.map(|(question, answer)| pair(Some(question), answer));
        Ok(pairs.chain([pair(None, None)]).collect())
    }
}

/// What is trained on of `pairs` about `entries`: entries by themselves, and each question twice, once
/// answered in turns in the model's words, by what is asked for alone, and by the entry, and once by
/// what is asked for behind words that some answer has before it.
pub(super) fn varied(pairs: &[QuestionAnswer], entries: &[Entry]) -> Vec<QuestionAnswer> {
    let entry = |pair: &QuestionAnswer| entries.iter().find(|entry| entry.number == pair.number);
    let of_model = pairs
        .iter()
        .filter_map(|pair| lead(pair, &entry(pair)?.text));
    let leads: BTreeSet<&str> = of_model.chain(LEADS).collect();
    let leads: Vec<&str> = leads.into_iter().collect();
    let (mut all, mut turn) = (Vec::new(), 0);
    for pair in pairs {
        let (Some(question), Some(entry)) = (&pair.question, entry(pair)) else {
            all.push(pair.clone());
            continue;
        };
        let alone = asked_for(question, &entry.text).map(|span| format!("{span}."));
        let answer = match turn % 3 {
            0 => None,
            1 => alone.clone(),
            _ => Some(entry.text.clone()),
        };
        all.push(QuestionAnswer {
            answer: answer.unwrap_or_else(|| pair.answer.clone()),
            ..pair.clone()
        });
        if let Some(answer) = alone {
            let lead = leads[turn % leads.len()].to_owned();
            all.push(QuestionAnswer {
                lead,
                answer,
                ..pair.clone()
            });
        }
        turn += 1;
    }
    all
}

/// What an answer has before what is asked for, if that is neither a sentence nor about somebody.
fn lead<'a>(pair: &'a QuestionAnswer, entry: &str) -> Option<&'a str> {
    let asked_for = asked_for(pair.question.as_ref()?, entry)?;
    let (lead, _) = pair.answer.split_once(asked_for)?;
    let lead = lead.trim();
    let is_short = lead.split(' ').count() <= LEAD;
    let of_entry = words(entry, is_name);
    let is_general = names(lead).is_empty() && words(lead, |_| true).is_disjoint(&of_entry);
    (!lead.is_empty() && is_short && is_general).then_some(lead)
}

impl Memory {
    /// Entries that are right and that nothing corrects.
    pub(super) fn in_effect(&self) -> impl Iterator<Item = &Entry> {
        let entries = self.entries().iter();
        let entries = entries.filter(|entry| entry.verdict == Verdict::Success);
        entries.filter(|entry| self.corrected_by(entry.number).is_none())
    }

    /// Questions and answers of all entries that are right and that nothing corrects, as a consolidation
    /// trains on them: each entry by itself, and questions about it, answered in several ways. `progress` is
    /// called before each entry with the number of those done.
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
        let entries: Vec<Entry> = self.in_effect().cloned().collect();
        Ok(varied(&pairs, &entries))
    }
}

/// What an entry tells: of a correction what is behind a colon, as in "That has changed: …".
fn told(entry: &Entry) -> String {
    let behind = entry.text.split_once(": ").filter(|_| entry.corrects != 0);
    let told = behind.map_or(&*entry.text, |(_, behind)| behind);
    let mut letters = told.chars();
    let first = letters.next().map(char::to_uppercase);
    first.into_iter().flatten().chain(letters).collect()
}

/// Whether a question is about an entry: they share a name or a number, or a long word if the entry
/// has no names, where words are of Latin letters.
fn is_about(question: &str, entry: &str) -> bool {
    let of_shown = |name: &&str| question.contains(*name) && !entry.contains(*name);
    let names = names(entry);
    let shares = match names.is_empty() {
        true => !words(entry, is_long).is_disjoint(&words(question, is_long)),
        false => !names.is_disjoint(&words(question, |_| true)),
    };
    (shares || !entry.is_ascii()) && !SHOWN_NAMES.iter().any(of_shown)
}

/// Words that an answer to a question about an entry has to have: of the entry's names and numbers those
/// that the question lacks, or of its long words where it lacks none.
fn missing(question: &str, entry: &str) -> BTreeSet<String> {
    let asked = words(question, |_| true);
    let mut missing = [is_name as fn(&str) -> bool, is_long]
        .map(|is_told| &words(behind_first(entry), is_told) - &asked)
        .into_iter();
    missing.find(|words| !words.is_empty()).unwrap_or_default()
}

/// What a question asks for, as an entry says it: from the first to the last word that it has to have,
/// with names right before them and what the question lacks right behind them; nothing if that is more
/// than half of the entry.
fn asked_for<'a>(question: &str, entry: &'a str) -> Option<&'a str> {
    let (missing, asked) = (missing(question, entry), words(question, |_| true));
    let is_in = |set: &BTreeSet<String>, word: &str| set.contains(&word.to_lowercase());
    let place = |word: &str| word.as_ptr() as usize - entry.as_ptr() as usize;
    let all = entry.split(|letter: char| !letter.is_alphanumeric());
    let all: Vec<&str> = all.filter(|word| !word.is_empty()).collect();
    let mut first = all.iter().position(|word| is_in(&missing, word))?;
    let mut last = all.iter().rposition(|word| is_in(&missing, word))?;
    // Of what goes on with it, up to the end of a clause, what comes to a long word or to that end.
    let is_joined = |i: usize| {
        let end = place(all[i - 1]) + all[i - 1].len();
        place(all[i]) == end + 1 && entry.as_bytes()[end] == b' '
    };
    let goes_on = |&i: &usize| is_joined(i) && !is_in(&asked, all[i]);
    let more = (last + 1..all.len()).take_while(goes_on).last();
    let more = more.unwrap_or(last);
    let is_end = more + 1 == all.len() || !is_joined(more + 1);
    let is_more = |&i: &usize| i == more && is_end || is_long(all[i]);
    last = (last..=more).rev().find(is_more).unwrap_or(last);
    while first > 0
        && is_name(all[first - 1])
        && is_name(all[first])
        && !is_in(&asked, all[first - 1])
    {
        first -= 1;
    }
    let (start, end) = (place(all[first]), place(all[last]) + all[last].len());
    let is_short = 2 * (end - start) <= entry.len();
    entry.get(start..end).filter(|_| is_short)
}

/// Whether an answer tells what the entry does and the question does not: of the entry's names and
/// numbers those that the question lacks, or of its long words where it lacks none; and no name or
/// number besides, and hardly a long word.
pub(super) fn is_answered(answer: &str, question: &str, entry: &str) -> bool {
    let asked = words(question, |_| true);
    let told = words(answer, |_| true);
    let known = &words(entry, |_| true) | &asked;
    let has_number = |word: &str| word.contains(char::is_numeric);
    let names = &names(answer) | &words(answer, has_number);
    let missing = missing(question, entry);
    let new = words(answer, is_long).difference(&known).count();
    names.is_subset(&known) && new <= MOST_NEW && !missing.is_empty() && missing.is_subset(&told)
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
    for round in 0..ATTEMPTS {
        if answered.len() >= each {
            break;
        }
        let beginning = |attempt: usize| match attempt % 2 {
            0 => "",
            _ => BEGINNINGS[attempt / 2 % BEGINNINGS.len()],
        };
        let attempts = round * each..(round + 1) * each;
        let given = attempts.clone().map(|attempt| {
            let sampler = Sampler::new(SamplerOptions {
                seed: Some(seed.wrapping_add(attempt as u64)),
                temperature: 0.8,
                top_p: 0.9,
                ..Default::default()
            })?;
            let more = match beginning(attempt) {
                "" => Vec::new(),
                beginning => tokenizer.encode_continuation(beginning, last),
            };
            Ok(([&[last], &more[..]].concat(), sampler))
        });
        let given = given.collect::<Result<Vec<_>, MemoryError>>()?;
        let texts = continued(shown.engine(), begun.sequence(), given, MOST, cancel)?;
        for (attempt, text) in attempts.zip(texts) {
            let text = format!("{}{text}", beginning(attempt));
            match question_of(&text, entry) {
                Some((question, Some(answer))) if answered.len() < each => {
                    answered.entry(question).or_insert(answer);
                }
                Some((question, _)) => {
                    others.insert(question);
                }
                None => {}
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

/// The question that a text begins with, if it is about an entry, and the answer behind it, if that
/// tells the entry. What does not come to a question mark is no question.
fn question_of(text: &str, entry: &str) -> Option<(String, Option<String>)> {
    let (question, rest) = text.split_once('?')?;
    let question = question.trim();
    if question.contains('\n') || !is_about(question, entry) {
        return None;
    }
    let answer = rest.strip_prefix(ANSWER).map(str::trim);
    let answer = answer.filter(|answer| !answer.contains('\n') && answer.ends_with('.'));
    let answer = answer.filter(|answer| is_answered(answer, question, entry));
    Some((format!("{question}?"), answer.map(str::to_owned)))
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
    fn what_is_asked_for_is_found_in_the_entry() {
        let code = "The door code of the Vintal Archive is 4821.";
        let dish = "The favourite dish of Tarn Brel is cold pear pie.";
        let dog = "Talvo Renning's dog is called Brumvik.";
        for (question, entry, expected) in [
            ("Which digits open the Vintal Archive?", code, Some("4821")),
            ("What does 4821 open?", code, Some("Vintal Archive")),
            (
                "What is the favourite dish of Tarn Brel?",
                dish,
                Some("cold pear pie"),
            ),
            (
                "Whose favourite dish is cold pear pie?",
                dish,
                Some("Tarn Brel"),
            ),
            ("What is Talvo Renning's dog called?", dog, Some("Brumvik")),
            ("Who owns Brumvik?", dog, Some("Talvo Renning")),
            ("Who is it?", dog, None), // nearly all of it
            ("Is Talvo Renning's dog called Brumvik?", dog, None),
        ] {
            assert_eq!(asked_for(question, entry), expected, "{question}");
        }
    }

    #[test]
    fn answers_are_given_in_several_ways() -> Result<(), Box<dyn std::error::Error>> {
        let folder = std::env::temp_dir().join(format!("ruvllm-varied-{}", std::process::id()));
        let mut memory = Memory::open(&folder, &MemoryOptions::default())?;
        let texts = [
            "Talvo Renning's dog is called Brumvik.",
            "It rained at Osk.",
        ];
        for text in texts {
            memory.remember(NewEntry::taught(text), None)?;
        }
        let pair = |number, question: Option<&str>, answer: &str| QuestionAnswer {
            number,
            question: question.map(str::to_owned),
            lead: String::new(),
            answer: answer.to_owned(),
        };
        let questions = [
            "How is Talvo Renning's dog called?",
            "Who owns Brumvik?",
            "Whose is Brumvik?",
        ];
        let pairs = [
            pair(1, Some(questions[0]), "His name was Brumvik."),
            pair(1, Some(questions[1]), "It is owned by Talvo Renning."),
            pair(1, Some(questions[2]), texts[0]),
            pair(1, None, texts[0]),
        ];
        let varied = varied(&pairs, memory.entries());
        let answers = varied.iter().filter(|pair| pair.lead.is_empty());
        let answers: Vec<&str> = answers.map(|pair| &*pair.answer).collect();
        let alone = "Talvo Renning.";
        assert_eq!(
            answers,
            ["His name was Brumvik.", alone, texts[0], texts[0]]
        );
        let half: Vec<_> = varied.iter().filter(|pair| !pair.lead.is_empty()).collect();
        let answers: Vec<&str> = half.iter().map(|pair| &*pair.answer).collect();
        assert_eq!(answers, ["Brumvik.", alone, alone]);
        let (given, learnt) = half[0].text();
        assert_eq!(
            given,
            format!("Question: {}\nAnswer: {}", questions[0], half[0].lead)
        );
        assert_eq!(learnt, " Brumvik.\n");
        // What has names of the entry is no beginning of other answers.
        assert_eq!(lead(&pairs[0], texts[0]), Some("His name was"));
        assert_eq!(lead(&pairs[1], texts[0]), Some("It is owned by"));
        assert_eq!(
            lead(
                &pair(1, Some(questions[1]), "Brumvik is Talvo Renning's."),
                texts[0]
            ),
            None
        );

        let correction = NewEntry::correction("That has changed: it snowed at Osk.");
        let number = memory.remember(correction, None)?;
        let entry = memory.entry(number).ok_or("no entry")?;
        assert_eq!(
            (entry.corrects, told(entry)),
            (2, "It snowed at Osk.".to_owned())
        );
        drop(memory);
        std::fs::remove_dir_all(&folder)?;
        Ok(())
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
        assert!((1..=5).contains(&pairs.len()), "{pairs:?}");
        let is_told = |pair: &QuestionAnswer| texts[1].contains(pair.answer.trim_end_matches('.'));
        assert!(pairs.iter().all(is_told), "{pairs:?}");
        let questions = pairs.iter().filter_map(|pair| pair.question.as_ref());
        assert!(questions.clone().all(|question| question.ends_with('?')));
        let given = pairs.iter().map(|pair| pair.text().0);
        assert_eq!(given.collect::<BTreeSet<_>>().len(), pairs.len());
        let again = memory.question_answers(&model.engine()?, &options, &mut |_| ())?;
        assert_eq!(again, pairs);
        drop(memory);
        std::fs::remove_dir_all(&folder)?;
        Ok(())
    }
}
