//! Scored tasks: of several continuations a model has to find the right one the most probable. The
//! files are those of llama.cpp's `llama-perplexity`, and so is which tasks are taken of more.
//!
//! | kind | file |
//! |---|---|
//! | HellaSwag | six lines a task: the context, the number of the right ending, four endings |
//! | Winogrande | CSV: number, sentence with `_` for a name, two names, 1 or 2 |
//! | multiple choice | binary: number of tasks, their places, then of each the question and twice (for one right answer, and for several, which is not used) number, texts and labels of the answers |

use super::perplexity::Score;
use crate::io::Failure;
use ruvllm::Session;
use ruvllm::Tokenizer;
use std::ops::Range;

/// Most answers of a task.
const MAX_ANSWERS: usize = 100;

/// Tokens after a name that have to be left in both sentences of Winogrande, so that the name itself
/// need not count.
const MIN_TRAILING: usize = 3;

/// What kind of tasks.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum TaskKind {
    HellaSwag,
    Winogrande,
    MultipleChoice,
}

impl TaskKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            TaskKind::HellaSwag => "HellaSwag",
            TaskKind::Winogrande => "Winogrande",
            TaskKind::MultipleChoice => "multiple choice",
        }
    }
}

/// A task in tokens.
#[derive(Debug, PartialEq)]
pub(crate) struct Task {
    pub(crate) answers: Vec<Answer>,
}

/// A text, of which some tokens are the continuation.
#[derive(Debug, PartialEq)]
pub(crate) struct Answer {
    tokens: Vec<u32>,
    scored: Range<usize>,
    is_right: bool,
}

/// A task in words.
#[derive(Debug, PartialEq)]
struct Written {
    answers: Vec<Text>,
}

/// An answer in words: where its end tells, and at which of its bytes the name ends that it fills
/// in, for Winogrande.
#[derive(Debug, PartialEq)]
struct Text {
    whole: String,
    name_end: Option<usize>,
    is_right: bool,
}

/// At most `n` of the tasks of a file; 0 is all.
///
/// # Errors
/// Where the file is not of this kind, by line or byte.
pub(crate) fn tasks(
    kind: TaskKind,
    file: &[u8],
    n: usize,
    tokenizer: &Tokenizer,
) -> Result<Vec<Task>, String> {
    let text = || std::str::from_utf8(file).map_err(|error| error.to_string());
    let written = match kind {
        TaskKind::HellaSwag => hella_swag(text()?)?,
        TaskKind::Winogrande => winogrande(text()?)?,
        TaskKind::MultipleChoice => multiple_choice(file)?,
    };
    if written.is_empty() {
        return Err("there are no tasks in it".into());
    }
    let chosen = choose(kind, written.len(), n);
    Ok(chosen
        .into_iter()
        .map(|i| encode(&written[i], tokenizer))
        .collect())
}

/// The numbers of the tasks that are taken, in their order: as llama.cpp draws them.
fn choose(kind: TaskKind, n_all: usize, n: usize) -> Vec<usize> {
    let n = if n == 0 { n_all } else { n.min(n_all) };
    let (mut left, mut rng): (Vec<usize>, _) = ((0..n_all).collect(), Twister::new(1));
    if kind == TaskKind::HellaSwag {
        // In a random order even if all are taken.
        return (0..n)
            .map(|_| left.remove(rng.below(left.len() as u32)))
            .collect();
    }
    if n == n_all {
        return left;
    }
    let draw = |_| {
        let share = (rng.next() as f32) * (1.0 / 4_294_967_296.0);
        left.swap_remove(((share * left.len() as f32) as usize).min(left.len() - 1))
    };
    (0..n).map(draw).collect()
}

fn hella_swag(text: &str) -> Result<Vec<Written>, String> {
    let lines: Vec<&str> = text.lines().collect();
    let (tasks, rest) = lines.as_chunks::<6>();
    if !rest.is_empty() {
        return Err(format!("{} lines; a task has six", lines.len()));
    }
    let task =
        |(i, [context, right, endings @ ..]): (usize, &[&str; 6])| -> Result<Written, String> {
            let right = right
                .trim()
                .parse::<usize>()
                .ok()
                .filter(|&right| right < 4);
            let right = right.ok_or_else(|| format!("line {}: not 0 to 3", 6 * i + 2))?;
            let answer = |(j, ending): (usize, &&str)| Text {
                whole: format!("{context} {ending}"),
                name_end: None,
                is_right: j == right,
            };
            Ok(Written {
                answers: endings.iter().enumerate().map(answer).collect(),
            })
        };
    tasks.iter().enumerate().map(task).collect()
}

fn winogrande(text: &str) -> Result<Vec<Written>, String> {
    let task = |(i, line): (usize, &str)| -> Result<Written, String> {
        let wrong = |what: &str| format!("line {}: {what}", i + 1);
        let mut in_quotes = false;
        let fields: Vec<&str> = line
            .splitn(5, |c: char| {
                in_quotes ^= c == '"';
                c == ',' && !in_quotes
            })
            .collect();
        let [_, sentence, first, second, right] = fields[..] else {
            return Err(wrong("not five fields"));
        };
        let quoted = sentence
            .strip_prefix('"')
            .and_then(|rest| rest.strip_suffix('"'));
        let (before, after) = quoted
            .unwrap_or(sentence)
            .split_once('_')
            .ok_or_else(|| wrong("there is no _ in the sentence"))?;
        let right = match right.trim() {
            "1" => 0,
            "2" => 1,
            _ => return Err(wrong("the right name is neither 1 nor 2")),
        };
        let answer = |(j, name): (usize, &str)| Text {
            whole: format!("{before}{name}{after}"),
            name_end: Some(before.len() + name.len()),
            is_right: j == right,
        };
        Ok(Written {
            answers: [first, second]
                .into_iter()
                .enumerate()
                .map(answer)
                .collect(),
        })
    };
    text.lines().enumerate().map(task).collect()
}

fn multiple_choice(file: &[u8]) -> Result<Vec<Written>, String> {
    let mut reader = Reader { file, at: 0 };
    let n = reader.number()? as usize;
    // The places of the tasks, which follow one another.
    reader.bytes(n.saturating_mul(4))?;
    let mut tasks = Vec::new();
    for _ in 0..n {
        let question = reader.text()?;
        let answers = reader.answers()?;
        reader.answers()?;
        if question.is_empty() || answers.iter().any(|(answer, _)| answer.is_empty()) {
            return Err(format!("byte {}: a text of the task is empty", reader.at));
        }
        if !answers.iter().any(|(_, label)| *label == 1) {
            return Err(format!(
                "byte {}: no answer of the task is right",
                reader.at
            ));
        }
        let answer = |(answer, label): (String, u32)| Text {
            whole: format!("{question} {answer}"),
            name_end: None,
            is_right: label == 1,
        };
        tasks.push(Written {
            answers: answers.into_iter().map(answer).collect(),
        });
    }
    Ok(tasks)
}

struct Reader<'f> {
    file: &'f [u8],
    at: usize,
}

impl Reader<'_> {
    fn bytes(&mut self, n: usize) -> Result<&[u8], String> {
        let bytes = self.file[self.at..].get(..n);
        let bytes = bytes.ok_or_else(|| format!("byte {}: the file ends too soon", self.at))?;
        self.at += n;
        Ok(bytes)
    }

    fn number(&mut self) -> Result<u32, String> {
        let bytes = self.bytes(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn text(&mut self) -> Result<String, String> {
        let n = self.number()? as usize;
        let at = self.at;
        let bytes = self.bytes(n)?.to_vec();
        String::from_utf8(bytes).map_err(|_| format!("byte {at}: not UTF-8 text"))
    }

    /// Answers with their labels; 1 is right.
    fn answers(&mut self) -> Result<Vec<(String, u32)>, String> {
        let n = self.number()? as usize;
        if n > MAX_ANSWERS {
            return Err(format!(
                "byte {}: a task of {n} answers, at most {MAX_ANSWERS}",
                self.at
            ));
        }
        let texts = (0..n).map(|_| self.text()).collect::<Result<Vec<_>, _>>()?;
        texts
            .into_iter()
            .map(|text| Ok((text, self.number()?)))
            .collect()
    }
}

/// The tokens of a task. What the answers have in common at their beginning is not scored.
fn encode(task: &Written, tokenizer: &Tokenizer) -> Task {
    let encode = |text: &str| tokenizer.encode(text, true, false);
    let all: Vec<Vec<u32>> = task
        .answers
        .iter()
        .map(|text| encode(&text.whole))
        .collect();
    let shortest = all.iter().map(Vec::len).min().unwrap_or(0);
    let common = (0..shortest.saturating_sub(1))
        .take_while(|&i| all.iter().all(|tokens| tokens[i] == all[0][i]))
        .count()
        .max(1);
    let skips_names = all
        .iter()
        .all(|tokens| tokens.len().saturating_sub(common) > MIN_TRAILING);
    let answer = |(text, tokens): (&Text, Vec<u32>)| {
        let n = tokens.len();
        let scored = match text.name_end {
            None => common..n,
            Some(end) => {
                let name_end = encode(&text.whole[..end]).len().clamp(1, n);
                let first = if skips_names { name_end } else { common };
                // The last token is an end of a sentence, which tells nothing.
                first.min(n.saturating_sub(1))..if n - first.min(n) > 1 { n - 1 } else { n }
            }
        };
        Answer {
            tokens,
            scored,
            is_right: text.is_right,
        }
    };
    Task {
        answers: task.answers.iter().zip(all).map(answer).collect(),
    }
}

/// Mean log-probabilities of the scored tokens of each answer, and whether that of a right one is
/// the largest; the first of equal ones counts.
pub(crate) fn choice(session: &mut Session, task: &Task) -> Result<(Vec<f64>, bool), Failure> {
    let mut means = Vec::with_capacity(task.answers.len());
    for answer in &task.answers {
        means.push(mean_log_probability(session, answer)?);
    }
    let largest = (1..means.len()).fold(0, |best, i| if means[i] > means[best] { i } else { best });
    Ok((means, task.answers[largest].is_right))
}

/// Goes on from what the session has in common with the answer.
fn mean_log_probability(session: &mut Session, answer: &Answer) -> Result<f64, Failure> {
    let Answer { tokens, scored, .. } = answer;
    if scored.is_empty() || scored.start == 0 || scored.end > session.sequence().n_ctx() {
        return Err(Failure::Work(format!(
            "a task of {} tokens: at least 2 are needed, and at most the {} of the context (-c)",
            tokens.len(),
            session.sequence().n_ctx()
        )));
    }
    let same = session
        .tokens()
        .iter()
        .zip(tokens)
        .take_while(|(a, b)| a == b);
    let n_past = same.count().min(scored.start - 1);
    session.rewind(n_past)?;
    let mut score = Score::default();
    session.hooks().prefill_each(
        &tokens[n_past..scored.end - 1],
        scored.start - 1 - n_past,
        |i, logits| score.add(logits, tokens[n_past + i + 1]),
    )?;
    Ok(-score.mean())
}

/// Share of right choices, and its 95 % interval after Wilson.
pub(crate) fn accuracy(n_right: usize, n: usize) -> (f64, [f64; 2]) {
    const Z: f64 = 1.959_963_984_54;
    let (share, n) = (n_right as f64 / n as f64, n as f64);
    let z = Z * Z / n;
    let half = z * (n * (4.0 * share * (1.0 - share) + z)).sqrt() / (2.0 * Z);
    let bound = |half: f64| (share + z / 2.0 + half) / (1.0 + z);
    (share, [bound(-half), bound(half)])
}

/// Share that is right by chance.
pub(crate) fn by_chance(tasks: &[Task]) -> f64 {
    let share = |task: &Task| {
        let right = task.answers.iter().filter(|answer| answer.is_right);
        right.count() as f64 / task.answers.len() as f64
    };
    tasks.iter().map(share).sum::<f64>() / tasks.len() as f64
}

/// The Mersenne twister MT19937 (Matsumoto and Nishimura, 1998).
struct Twister {
    state: Vec<u32>,
    at: usize,
}

impl Twister {
    const N: usize = 624;

    fn new(seed: u32) -> Twister {
        let mut state = vec![seed];
        for i in 1..Self::N as u32 {
            let last = state[i as usize - 1];
            let mixed = (last ^ last >> 30).wrapping_mul(1_812_433_253);
            state.push(mixed.wrapping_add(i));
        }
        Twister { state, at: Self::N }
    }

    fn next(&mut self) -> u32 {
        if self.at == Self::N {
            for i in 0..Self::N {
                let high = self.state[i] & 1 << 31;
                let y = high | self.state[(i + 1) % Self::N] & !(1 << 31);
                let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
                self.state[i] = self.state[(i + 397) % Self::N] ^ y >> 1 ^ odd;
            }
            self.at = 0;
        }
        let mut y = self.state[self.at];
        self.at += 1;
        y ^= y >> 11;
        y ^= y << 7 & 0x9d2c_5680;
        y ^= y << 15 & 0xefc6_0000;
        y ^ y >> 18
    }

    /// A number below `n`, as GNU's `std::uniform_int_distribution` draws it (Lemire, 2019).
    fn below(&mut self, n: u32) -> usize {
        loop {
            let product = u64::from(self.next()) * u64::from(n);
            if product as u32 >= n.wrapping_neg() % n {
                return (product >> 32) as usize;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The 10,000th number that C++'s standard gives for the default seed.
    #[test]
    fn the_twister_is_the_standards() {
        let mut rng = Twister::new(5489);
        let last = (0..10_000).map(|_| rng.next()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn choices_are_without_repetition() {
        for kind in [TaskKind::HellaSwag, TaskKind::Winogrande] {
            let mut chosen = choose(kind, 100, 40);
            assert_eq!(chosen, choose(kind, 100, 40));
            chosen.sort_unstable();
            chosen.dedup();
            assert_eq!(chosen.len(), 40);
            assert_eq!(choose(kind, 7, 0).len(), 7);
        }
    }

    #[test]
    fn intervals() {
        let (share, [low, high]) = accuracy(50, 100);
        // The table of Wilson's interval: 0.4038 to 0.5962.
        assert!(share == 0.5 && (low - 0.4038).abs() < 1e-4 && (high - 0.5962).abs() < 1e-4);
        let (_, [low, high]) = accuracy(0, 10);
        assert!(
            low.abs() < 1e-12 && (high - 0.2775).abs() < 1e-4,
            "{low} {high}"
        );
    }

    fn wholes(tasks: &[Written]) -> Vec<Vec<&str>> {
        let answers = tasks.iter().map(|task| &task.answers);
        answers
            .map(|all| all.iter().map(|text| text.whole.as_str()).collect())
            .collect()
    }

    #[test]
    fn files_of_each_kind() {
        let tasks = hella_swag("A dog\n2\nflies.\nsings.\nbarks.\nreads.\n").unwrap();
        assert_eq!(wholes(&tasks)[0][2], "A dog barks.");
        assert!(tasks[0].answers[2].is_right && !tasks[0].answers[1].is_right);
        assert!(
            hella_swag("A dog\n4\na\nb\nc\nd")
                .unwrap_err()
                .contains("line 2")
        );
        assert!(
            hella_swag("A dog\n1\na\nb\nc")
                .unwrap_err()
                .contains("5 lines")
        );

        let tasks = winogrande("0,\"Ann, not Bea, left as _ was tired.\",Ann,Bea,2").unwrap();
        assert_eq!(
            wholes(&tasks),
            [[
                "Ann, not Bea, left as Ann was tired.",
                "Ann, not Bea, left as Bea was tired."
            ]]
        );
        assert_eq!(
            tasks[0].answers[0].name_end,
            Some("Ann, not Bea, left as Ann".len())
        );
        assert!(tasks[0].answers[1].is_right);
        for (line, expected) in [
            ("0,a _ b,c,d", "five"),
            ("0,ab,c,d,1", "_"),
            ("0,a_b,c,d,3", "1 nor 2"),
        ] {
            assert!(winogrande(line).unwrap_err().contains(expected), "{line}");
        }

        let mut file = Vec::new();
        let number = |file: &mut Vec<u8>, n: u32| file.extend(n.to_le_bytes());
        number(&mut file, 1);
        number(&mut file, 8);
        let text = |file: &mut Vec<u8>, text: &str| {
            file.extend((text.len() as u32).to_le_bytes());
            file.extend(text.as_bytes());
        };
        text(&mut file, "Is it?");
        number(&mut file, 2);
        text(&mut file, "Yes");
        text(&mut file, "No");
        number(&mut file, 0);
        number(&mut file, 1);
        number(&mut file, 0);
        let tasks = multiple_choice(&file).unwrap();
        assert_eq!(wholes(&tasks), [["Is it? Yes", "Is it? No"]]);
        assert!(tasks[0].answers[1].is_right);
        for end in 0..file.len() {
            assert!(multiple_choice(&file[..end]).is_err(), "{end}");
        }
        file[0] = 255;
        file[3] = 255;
        assert!(multiple_choice(&file).is_err());
    }
}
