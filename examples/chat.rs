//! A conversation through the model's chat template (feature `chat`); messages come as arguments.

use ruvllm::chat::{ChatInputs, ChatTemplate, Message};
use ruvllm::{Model, Sampler, SamplerOptions};

/// For models that bring no template.
const PLAIN: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = Model::open(
        args.next()
            .unwrap_or_else(|| "models/ruvllm-rust-6m-q8_0.gguf".into()),
    )?;
    let tokenizer = model.tokenizer().ok_or("the file has no tokenizer")?;
    let template = ChatTemplate::parse(model.chat_template().unwrap_or(PLAIN))?;
    let mut session = model.session()?;
    let mut sampler = Sampler::new(SamplerOptions {
        seed: Some(1),
        ..Default::default()
    })?;
    let mut messages = Vec::new();
    let questions: Vec<String> = args.collect();
    for question in if questions.is_empty() {
        vec!["What is ownership?".into()]
    } else {
        questions
    } {
        println!("> {question}");
        messages.push(Message::user(&question));
        let ids = tokenizer.encode_prompt(&template.render(&ChatInputs::new(&messages))?);
        // What the session holds of the conversation already is not computed again.
        let kept = session.cache().keep(&ids);
        let answer = session
            .generate(&ids[kept..], &mut sampler)?
            .max_tokens(48)
            .stop(["\nuser:"])
            .text()?;
        println!("{}", answer.trim());
        messages.push(Message::assistant(answer));
    }
    Ok(())
}
