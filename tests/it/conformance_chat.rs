//! Every rendering that Hugging Face's own code made of published templates, and calls as they
//! write them.

use crate::common::conformance;
use ruvllm::chat::ChatError;
use ruvllm::chat::tools::{Tool, ToolFormat, TurnParser};
use ruvllm::chat::{ChatInputs, ChatTemplate};
use serde_json::{Value, json};

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

/// Templates of the data that show tools, or have a form of calls, and leave calls out of the
/// history.
const WITHOUT_CALLS: &[&str] = &[
    "LFM2-8B-A1B.jinja",
    "ibm-granite-granite-3.3-2B-Instruct.jinja",
];

/// A call that a template writes is read in the format that the template is recognised by.
#[test]
fn calls_are_read_as_each_template_writes_them() {
    let Some(dir) = conformance() else { return };
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "days": {"type": "integer", "description": "How many"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Of what"},
        },
        "required": ["city"],
    });
    let function =
        json!({"name": "get_weather", "description": "The weather", "parameters": parameters});
    let tools = json!([{"type": "function", "function": function}]);
    let arguments = json!({"city": "Oslo", "days": 3, "unit": "celsius"});
    let call = json!({"name": "get_weather", "arguments": arguments});
    let messages = json!([
        {"role": "user", "content": "USERTEXT"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "abcDEF123", "type": "function", "function": call}
        ]},
    ]);
    let (mut n, mut failures) = (0, Vec::new());
    for folder in ["chat_templates", "chat_templates2"] {
        for entry in std::fs::read_dir(dir.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path
                .extension()
                .is_none_or(|extension| extension != "jinja")
            {
                continue;
            }
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let source = std::fs::read_to_string(&path).unwrap();
            let template = ChatTemplate::parse(&source).unwrap();
            let mut inputs = ChatInputs {
                messages: messages.clone(),
                tools: Some(tools.clone()),
                add_generation_prompt: false,
                bos_token: "<s>".into(),
                eos_token: "</s>".into(),
                ..ChatInputs::new(&[])
            };
            // What Firefunction's code gives its template.
            inputs
                .kwargs
                .insert("functions".into(), tools.to_string().into());
            inputs.kwargs.insert("datetime".into(), "now".into());
            let text = match template.render_fitted(&inputs) {
                Ok(rendered) => rendered.text,
                Err(error) => {
                    failures.push(format!("{name}: {error}"));
                    continue;
                }
            };
            let question = ChatInputs {
                messages: json!([messages[0]]),
                add_generation_prompt: true,
                ..inputs.clone()
            };
            let prompt = template.render_fitted(&question).unwrap().text;
            let (prompt, answer) = match text.strip_prefix(&prompt[..]) {
                Some(answer) => (&prompt[..], answer),
                None => ("", &text[text.rfind("USERTEXT").unwrap()..]),
            };
            let writes = answer.contains("get_weather");
            if writes == WITHOUT_CALLS.contains(&&name[..]) {
                failures.push(format!("{name}: {answer}"));
            }
            if !writes {
                continue;
            }
            n += 1;
            let format = ToolFormat::of(&source);
            let known = Tool::from_json(&tools).unwrap();
            let mut parser = TurnParser::new(format, &known, prompt);
            parser.push(answer);
            let turn = parser.finish();
            let [read] = &turn.calls[..] else {
                failures.push(format!("{name}: {format:?} read {turn:?}"));
                continue;
            };
            if read.name != "get_weather" || Value::from(read.arguments.clone()) != arguments {
                failures.push(format!("{name}: {format:?} read {read:?} of {answer}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(n > 40, "{n}");
}
