//! Gives texts the label of the nearest labelled example: of which the vector points in the most
//! similar direction. The first argument is a model, best one for embeddings; the others are texts.

use ruvllm::{Embedder, Model};

/// What support wants to tell apart, by examples.
const EXAMPLES: &[(&str, &str)] = &[
    (
        "threads",
        "A thread takes ownership of the values that its closure moves.",
    ),
    (
        "threads",
        "Channels send values from one thread to another.",
    ),
    ("patterns", "A match must cover every pattern of the enum."),
    (
        "patterns",
        "The if let syntax takes a value apart if it matches one pattern.",
    ),
    (
        "borrowing",
        "A reference borrows a value without owning it.",
    ),
    (
        "borrowing",
        "The borrow checker rejects a second mutable reference.",
    ),
];

/// The label whose example is nearest to each of `texts`, and its cosine.
fn classify(
    embedder: &Embedder,
    texts: &[String],
) -> Result<Vec<(&'static str, f32)>, ruvllm::Error> {
    let examples: Vec<&str> = EXAMPLES.iter().map(|(_, text)| *text).collect();
    let examples = embedder.embed(&examples)?;
    // Vectors have length 1.
    let cosine = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let nearest = |text: Vec<f32>| {
        let labelled = EXAMPLES
            .iter()
            .zip(&examples)
            .map(|((label, _), vector)| (*label, cosine(&text, vector)));
        labelled
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap_or(("", 0.0))
    };
    Ok(embedder.embed(texts)?.into_iter().map(nearest).collect())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = Model::open(
        args.next()
            .unwrap_or_else(|| "models/ruvllm-rust-6m-q8_0.gguf".into()),
    )?;
    let mut texts: Vec<String> = args.collect();
    if texts.is_empty() {
        texts = vec![
            "Can two threads share one channel?".into(),
            "What may a pattern match?".into(),
        ];
    }
    for (text, (label, cosine)) in texts.iter().zip(classify(&model.embedder()?, &texts)?) {
        println!("{label} ({cosine:.2}): {text}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_get_the_label_of_what_is_like_them() {
        let embedder = Model::open("models/ruvllm-rust-6m-q8_0.gguf")
            .unwrap()
            .embedder()
            .unwrap();
        let texts: Vec<String> = EXAMPLES
            .iter()
            .map(|(_, text)| format!("{text} This is so."))
            .collect();
        for ((label, text), (given, _)) in EXAMPLES.iter().zip(classify(&embedder, &texts).unwrap())
        {
            assert_eq!(given, *label, "{text}");
        }
    }
}
