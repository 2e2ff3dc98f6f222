//! Any template: it is refused, or renders a conversation, or fails with a typed error.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ruvllm::chat::{ChatInputs, ChatTemplate, Message};

fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::parse(source) else {
        return;
    };
    let inputs = ChatInputs {
        bos_token: "<s>".into(),
        now: "2025-01-15T09:05:07".parse().ok(),
        ..ChatInputs::new(&[
            Message::system("Be brief."),
            Message::user("Hi"),
            Message::assistant("Hello."),
        ])
    };
    let first = template.render(&inputs);
    // The same inputs give the same text.
    assert_eq!(first.ok(), template.render(&inputs).ok());
});
