//! Every rendering that Hugging Face's own code made of published templates.

use crate::common::conformance;
use ruvllm::ChatError;
use ruvllm::chat::{ChatInputs, ChatTemplate};
use serde_json::Value;

#[test]
fn renders_as_hugging_face_does() {
    let Some(dir) = conformance() else { return };
    let dir = dir.join("chat_templates");
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap();
    let json = |name: &str| serde_json::from_str::<Value>(&read(name)).unwrap();
    let manifest = json("manifest.json");
    let now = manifest["frozen_time"].as_str().unwrap().parse().unwrap();

    let (mut checked, mut failures) = (0, Vec::new());
    for case in json("cases.json").as_array().unwrap() {
        if case.get("error_type").is_some_and(|t| t != "TemplateError") {
            continue;
        }
        let conversation = &manifest["conversations"][case["conversation"].as_str().unwrap()];
        let token = |name: &str| case[name].as_str().unwrap_or_default().to_owned();
        let inputs = ChatInputs {
            messages: conversation["messages"].clone(),
            tools: conversation.get("tools").cloned(),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            bos_token: token("bos_token"),
            eos_token: token("eos_token"),
            kwargs: conversation["kwargs"]
                .as_object()
                .cloned()
                .unwrap_or_default(),
            now: Some(now),
        };
        let name = case["template"].as_str().unwrap();
        let template = ChatTemplate::parse(&read(name)).unwrap();
        let got = template.render(&inputs);
        let expected = match case.get("expected") {
            Some(text) => Ok(text.as_str().unwrap().to_owned()),
            None => Err(ChatError::Raised(
                case["error"].as_str().unwrap().to_owned(),
            )),
        };
        checked += 1;
        if got != expected {
            let conversation = &case["conversation"];
            failures.push(format!(
                "{name} {conversation}:\n got {got:?}\nwant {expected:?}"
            ));
        }
    }
    assert!(checked > 0);
    assert!(
        failures.is_empty(),
        "{} of {checked}\n{}",
        failures.len(),
        failures.join("\n")
    );
    eprintln!("{checked} renderings are exact");
}
