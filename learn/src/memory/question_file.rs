//! Questions about entries, kept on disk: an attempt that was interrupted goes on with them, and later
//! ones ask only about what is new.

use crate::memory::versions::{QUESTIONS, begun, damaged, numbers, put_numbers, read, written};
use crate::memory::{MemoryError, QuestionAnswer, QuestionOptions};
use ruvllm::gguf::{Array, GgufError, Metadata, StringArray, Value};
use std::path::Path;

/// Who wrote questions: a model by its fingerprint, with these options.
type By<'a> = (u64, &'a QuestionOptions);

/// Whether a file is of that model and those options.
fn is_by(metadata: &Metadata, (model, options): By<'_>) -> bool {
    let found = ["memory.model", "memory.each", "memory.seed"].map(|key| metadata.u64(key).ok());
    found == [model, options.each as u64, options.seed].map(Some)
}

/// Questions that `path` has; none if they are of another model or of other options.
pub(super) fn read_questions(path: &Path, by: By<'_>) -> Result<Vec<QuestionAnswer>, MemoryError> {
    let path = path.join(QUESTIONS);
    let Some(gguf) = read(&path)? else {
        return Ok(Vec::new());
    };
    let metadata = gguf.metadata();
    let pairs = || -> Result<Vec<QuestionAnswer>, GgufError> {
        if !is_by(metadata, by) {
            return Ok(Vec::new());
        }
        let [questions, answers] =
            ["memory.questions", "memory.answers"].map(|key| metadata.strings(key));
        let (questions, answers) = (questions?, answers?);
        let all = numbers(metadata, "memory.entries")?.into_iter().enumerate();
        let all = all.map(|(i, number)| QuestionAnswer {
            number,
            question: questions
                .str(i)
                .filter(|text| !text.is_empty())
                .map(str::to_owned),
            lead: String::new(),
            answer: answers.str(i).unwrap_or_default().to_owned(),
        });
        Ok(all.filter(|pair| !pair.answer.is_empty()).collect())
    };
    pairs().map_err(|error| damaged(&path, error))
}

/// Keeps the questions of all entries that were asked about so far.
pub(super) fn write_questions(
    path: &Path,
    (model, options): By<'_>,
    pairs: &[QuestionAnswer],
) -> Result<(), MemoryError> {
    let mut w = begun();
    w.metadata("memory.model", model);
    w.metadata("memory.each", options.each as u64);
    w.metadata("memory.seed", options.seed);
    put_numbers(
        &mut w,
        "memory.entries".into(),
        pairs.iter().map(|pair| pair.number),
    );
    let questions = pairs
        .iter()
        .map(|pair| pair.question.as_deref().unwrap_or_default());
    let questions: StringArray = questions.collect();
    let answers: StringArray = pairs.iter().map(|pair| &*pair.answer).collect();
    w.metadata("memory.questions", Value::Array(Array::Strings(questions)));
    w.metadata("memory.answers", Value::Array(Array::Strings(answers)));
    written(w, &path.join(QUESTIONS))
}
