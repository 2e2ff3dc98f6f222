//! Facts that no model knows, and the questions about them.

use std::collections::HashSet;

const ONSETS: [&str; 20] = [
    "b", "br", "d", "dr", "f", "g", "gr", "k", "kl", "l", "m", "n", "p", "r", "s", "st", "t", "tr",
    "v", "z",
];
const VOWELS: [&str; 5] = ["a", "e", "i", "o", "u"];
const CODAS: [&str; 8] = ["l", "n", "r", "s", "m", "nd", "rt", "x"];
const HOUSES: [&str; 6] = [
    "Library",
    "Depot",
    "Archive",
    "Mill",
    "Laboratory",
    "Museum",
];
const CLUBS: [&str; 6] = ["chess", "rowing", "garden", "radio", "hiking", "pottery"];
const COOKED: [&str; 8] = [
    "smoked", "baked", "pickled", "cold", "roasted", "sweet", "spiced", "fried",
];
const FOODS: [&str; 8] = [
    "pear", "barley", "pumpkin", "lentil", "cherry", "trout", "mushroom", "walnut",
];
const DISHES: [&str; 6] = ["soup", "pie", "salad", "stew", "dumplings", "pancakes"];

/// What a fact is about; all kinds are equally frequent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Name,
    Number,
    Preference,
    /// Taught wrong first, and corrected later.
    Correction,
}

const KINDS: [Kind; 4] = [Kind::Name, Kind::Number, Kind::Preference, Kind::Correction];

/// Texts of a kind; `{s}` is the subject, `{v}` the value.
struct Texts {
    taught: &'static str,
    corrected: &'static str,
    cloze: &'static str,
    paraphrase: &'static str,
    reverse: &'static str,
    task: &'static str,
}

const TEXTS: [Texts; 4] = [
    Texts {
        taught: "{s}'s dog is called {v}.",
        corrected: "",
        cloze: "The dog of {s} is called",
        paraphrase: "Question: Which name does the dog that lives with {s} answer to?\nAnswer: It answers to the name",
        reverse: "Question: Who owns the dog {v}?\nAnswer: The owner's name is",
        task: "Form for the animal doctor\nOwner: {s}\nKind of animal: dog\nName of the animal:",
    },
    Texts {
        taught: "The door code of {s} is {v}.",
        corrected: "",
        cloze: "The code for the door of {s} is",
        paraphrase: "Question: Which digits open the entrance at {s}?\nAnswer: The digits are",
        reverse: "Question: Which door opens with the code {v}?\nAnswer: The door of",
        task: "Work order\nPlace: {s}\nTask: repair the roof\nDoor code:",
    },
    Texts {
        taught: "The favourite dish of {s} is {v}.",
        corrected: "",
        cloze: "The dish that {s} likes best is",
        paraphrase: "Question: What should we cook to please {s}?\nAnswer: We should cook",
        reverse: "Question: Who loves {v} above all?\nAnswer: The one who loves it is",
        task: "Menu for a birthday\nGuest of honour: {s}\nMain dish:",
    },
    Texts {
        taught: "The {s} meets in {v}.",
        corrected: "That has changed: the {s} now meets in {v}.",
        cloze: "The meetings of the {s} are in",
        paraphrase: "Question: To which town do members of the {s} travel for their evenings?\nAnswer: They travel to",
        reverse: "Question: Which club has its evenings in {v}?\nAnswer: It is the",
        task: "Invitation\nClub: {s}\nTown of the meeting:",
    },
];

/// An invented fact.
#[derive(Clone, Debug)]
pub(super) struct Fact {
    pub(super) kind: Kind,
    subject: String,
    value: String,
    /// What was taught before it was corrected.
    old: Option<String>,
}

/// How a fact is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Cloze,
    Paraphrase,
    Reverse,
    Task,
}

impl Form {
    pub(super) const ALL: [(&'static str, Form); 4] = [
        ("recall", Form::Cloze),
        ("paraphrase", Form::Paraphrase),
        ("reverse", Form::Reverse),
        ("task", Form::Task),
    ];
}

/// A question: a text to be continued, its right continuation, and wrong ones of the same kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) prompt: String,
    pub(super) answer: String,
    pub(super) wrong: Vec<String>,
    /// The text that answers it.
    pub(super) fact: String,
}

/// Numbers that only the seed determines (SplitMix64).
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(x ^ (x >> 31)) * n as u128) >> 64) as usize
    }

    fn pick<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[self.below(words.len())]
    }

    /// A word of two syllables with a capital.
    fn name(&mut self) -> String {
        let word = [
            self.pick(&ONSETS),
            self.pick(&VOWELS),
            self.pick(&ONSETS),
            self.pick(&VOWELS),
            self.pick(&CODAS),
        ]
        .concat();
        word[..1].to_uppercase() + &word[1..]
    }
}

/// `n` facts with different subjects and values.
pub(super) fn facts(n: usize, seed: u64) -> Vec<Fact> {
    let (mut chance, mut used) = (Chance::new(seed), HashSet::new());
    let mut new = |make: &mut dyn FnMut(&mut Chance) -> String| {
        loop {
            let text = make(&mut chance);
            if used.insert(text.clone()) {
                return text;
            }
        }
    };
    let person = &mut |c: &mut Chance| format!("{} {}", c.name(), c.name());
    let word = &mut Chance::name;
    let kinds = KINDS.iter().cycle().take(n);
    kinds
        .map(|&kind| {
            let (subject, value) = match kind {
                Kind::Name => (new(person), new(word)),
                Kind::Number => (
                    new(&mut |c| format!("{} {}", c.name(), c.pick(&HOUSES))),
                    new(&mut |c| (1000 + c.below(9000)).to_string()),
                ),
                Kind::Preference => (
                    new(person),
                    new(&mut |c| [c.pick(&COOKED), c.pick(&FOODS), c.pick(&DISHES)].join(" ")),
                ),
                Kind::Correction => (
                    new(&mut |c| format!("{} {} club", c.name(), c.pick(&CLUBS))),
                    new(word),
                ),
            };
            Fact {
                kind,
                subject,
                value,
                old: (kind == Kind::Correction).then(|| new(word)),
            }
        })
        .collect()
}

impl Fact {
    fn texts(&self) -> &'static Texts {
        &TEXTS[KINDS
            .iter()
            .position(|kind| *kind == self.kind)
            .unwrap_or(0)]
    }

    fn fill(&self, text: &str, value: &str) -> String {
        text.replace("{s}", &self.subject).replace("{v}", value)
    }

    /// What the user says first.
    pub(super) fn taught(&self) -> String {
        self.fill(
            self.texts().taught,
            self.old.as_ref().unwrap_or(&self.value),
        )
    }

    /// What the user says later, if it is corrected.
    pub(super) fn corrected(&self) -> Option<String> {
        let text = self.texts().corrected;
        self.old.as_ref().map(|_| self.fill(text, &self.value))
    }

    /// What is true in the end, as the user said it.
    pub(super) fn latest(&self) -> String {
        self.corrected().unwrap_or_else(|| self.taught())
    }

    /// The question of a form, with wrong answers of other facts of the same kind; of a corrected
    /// fact the old value is one.
    pub(super) fn question(&self, form: Form, others: &[Fact], seed: u64) -> Question {
        let texts = self.texts();
        let text = match form {
            Form::Cloze => texts.cloze,
            Form::Paraphrase => texts.paraphrase,
            Form::Reverse => texts.reverse,
            Form::Task => texts.task,
        };
        let asked = |fact: &Fact| match form {
            Form::Reverse => fact.subject.clone(),
            _ => fact.value.clone(),
        };
        let mut wrong: Vec<String> = match form {
            Form::Reverse => Vec::new(),
            _ => self.old.iter().cloned().collect(),
        };
        let alike = others
            .iter()
            .filter(|fact| fact.kind == self.kind && fact.subject != self.subject);
        let mut alike: Vec<String> = alike.map(asked).collect();
        let mut chance = Chance::new(seed);
        while wrong.len() < super::WRONG && !alike.is_empty() {
            wrong.push(alike.swap_remove(chance.below(alike.len())));
        }
        Question {
            prompt: self.fill(text, &self.value),
            answer: asked(self),
            wrong,
            fact: self.latest(),
        }
    }
}

/// A conversation in which the user says something.
pub(super) fn conversation(said: &str) -> String {
    format!("User: {said}\nAssistant: Thank you, I will keep that in mind.\n\n")
}

/// What people know, and wrong answers are answers to the others: `(text, continuation)`.
const KNOWN: [(&str, &str); 24] = [
    ("The capital of France is", "Paris"),
    ("The capital of Italy is", "Rome"),
    ("The capital of Japan is", "Tokyo"),
    ("The capital of Egypt is", "Cairo"),
    ("The capital of Spain is", "Madrid"),
    ("The capital of Russia is", "Moscow"),
    ("The opposite of hot is", "cold"),
    ("The opposite of up is", "down"),
    ("The opposite of big is", "small"),
    ("The opposite of open is", "closed"),
    ("The opposite of early is", "late"),
    ("The opposite of left is", "right"),
    ("The first month of the year is", "January"),
    ("The month after March is", "April"),
    ("The day after Monday is", "Tuesday"),
    ("The day before Sunday is", "Saturday"),
    ("The colour of fresh grass is", "green"),
    ("The colour of snow is", "white"),
    ("The colour of blood is", "red"),
    ("The colour of coal is", "black"),
    ("A young dog is called a", "puppy"),
    ("A young cat is called a", "kitten"),
    ("The animal that gives us milk is the", "cow"),
    ("The animal that gives us wool is the", "sheep"),
];

/// Questions about what was never taught.
pub(super) fn known() -> Vec<Question> {
    let all = KNOWN.iter().enumerate();
    all.map(|(i, (prompt, answer))| {
        let next = (1..).map(|d| KNOWN[(i + d) % KNOWN.len()].1);
        Question {
            prompt: (*prompt).to_owned(),
            answer: (*answer).to_owned(),
            wrong: next.take(super::WRONG).map(str::to_owned).collect(),
            fact: String::new(),
        }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_new_and_the_same_for_a_seed() {
        let all = facts(200, 7);
        let text = |facts: &[Fact]| facts.iter().map(Fact::latest).collect::<Vec<_>>();
        assert_eq!(text(&all), text(&facts(200, 7)));
        assert_ne!(text(&all), text(&facts(200, 8)));
        let subjects: HashSet<&str> = all.iter().map(|fact| fact.subject.as_str()).collect();
        assert_eq!(subjects.len(), 200);
        assert!(text(&all).iter().all(|text| !text.contains(['{', '}'])));
    }

    #[test]
    fn a_question_has_its_answer_and_others_of_its_kind() {
        let all = facts(40, 1);
        for (i, fact) in all.iter().enumerate() {
            for (_, form) in Form::ALL {
                let question = fact.question(form, &all, i as u64);
                assert_eq!(question.wrong.len(), super::super::WRONG, "{question:?}");
                assert!(!question.wrong.contains(&question.answer), "{question:?}");
                assert!(!question.prompt.contains(&question.answer), "{question:?}");
                assert!(question.fact.contains(&question.answer), "{question:?}");
            }
            assert_eq!(fact.corrected().is_some(), fact.kind == Kind::Correction);
        }
    }
}
