//! Completions that begin with their prompt, as evaluation harnesses ask for them; chats whose last
//! message goes on; numbers of tokens beside every part of a stream.

use super::{Server, shared, text};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";

fn numbers(list: &Value) -> Vec<Option<f64>> {
    list.as_array().unwrap().iter().map(Value::as_f64).collect()
}

fn ids(server: &Server, text: &str) -> Vec<u64> {
    let body = json!({"content": text, "add_special": true});
    let tokens = server.ask("/tokenize", &body);
    tokens["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect()
}

/// The request of lm-eval's `local-completions`: the prompt's tokens with their log-probabilities,
/// the first null, then the generated one; the same as a model that writes these tokens tells.
#[test]
fn log_probabilities_of_prompts() {
    // So that prompts have the arithmetic of what is generated.
    let server = &Server::start(&[
        "-c",
        "512",
        "--temp",
        "0",
        "--exact",
        "--repeat-penalty",
        "1",
    ]);
    let prompt = ids(
        server,
        &"A slice is a reference to a sequence of elements. ".repeat(12),
    );
    let n = prompt.len();
    // What the model writes, and what it says of it.
    let written = server.ask(
        COMPLETIONS,
        &json!({"prompt": prompt, "temperature": 0, "max_tokens": 24, "logprobs": 3}),
    );
    let written = &written["choices"][0];
    let all: Vec<u64> = {
        let body =
            json!({"prompt": prompt, "temperature": 0, "n_predict": 24, "return_tokens": true});
        let answer = server.ask("/completion", &body);
        let tokens = answer["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_u64().unwrap());
        prompt.iter().copied().chain(tokens).collect()
    };
    let body = json!({"model": "m", "prompt": [all], "temperature": 0, "max_tokens": 1, "logprobs": 3, "seed": 1234, "echo": true});
    let answer = server.ask(COMPLETIONS, &body);
    let choice = &answer["choices"][0];
    let logprobs = &choice["logprobs"];
    let of_tokens = numbers(&logprobs["token_logprobs"]);
    assert_eq!(of_tokens.len(), all.len() + 1);
    assert!(of_tokens[0].is_none() && of_tokens[1..].iter().all(|x| x.is_some_and(|x| x <= 0.0)));
    let top = logprobs["top_logprobs"].as_array().unwrap();
    assert!(
        top[0].is_null()
            && top[1..]
                .iter()
                .all(|top| top.as_object().unwrap().len() <= 3)
    );
    let tokens = logprobs["tokens"].as_array().unwrap();
    let expected = numbers(&written["logprobs"]["token_logprobs"]);
    for (i, expected) in expected.iter().enumerate() {
        assert_eq!(tokens[n + i], written["logprobs"]["tokens"][i]);
        let (found, expected) = (of_tokens[n + i].unwrap(), expected.unwrap());
        assert!(
            (found - expected).abs() < 1e-4,
            "token {i}: {found} instead of {expected}"
        );
        // It is the best one, as the harness finds out.
        let best = top[n + i]
            .as_object()
            .unwrap()
            .iter()
            .max_by(|a, b| a.1.as_f64().unwrap().total_cmp(&b.1.as_f64().unwrap()));
        assert_eq!(json!(best.unwrap().0), tokens[n + i], "token {i}");
    }
    // The text is that of the tokens, from where each begins.
    let whole = choice["text"].as_str().unwrap();
    let offsets = logprobs["text_offset"].as_array().unwrap();
    for (i, token) in tokens.iter().enumerate().skip(1) {
        let at = offsets[i].as_u64().unwrap() as usize;
        assert!(
            whole[at..].starts_with(token.as_str().unwrap()),
            "token {i} at {at}"
        );
    }
    assert_eq!(
        (
            &answer["usage"]["prompt_tokens"],
            &answer["usage"]["completion_tokens"]
        ),
        (&json!(all.len()), &json!(1))
    );
    // Nothing but the prompt; several of them; the stream; beside others, again and again.
    let body = json!({"prompt": [all, prompt], "max_tokens": 0, "logprobs": 1, "echo": true});
    for _ in 0..3 {
        let answer = server.ask(COMPLETIONS, &body);
        for (choice, tokens) in answer["choices"]
            .as_array()
            .unwrap()
            .iter()
            .zip([&all, &prompt])
        {
            assert_eq!(choice["finish_reason"], "length");
            assert_eq!(
                numbers(&choice["logprobs"]["token_logprobs"]),
                of_tokens[..tokens.len()]
            );
        }
    }
    let body =
        json!({"prompt": all, "max_tokens": 2, "logprobs": 1, "echo": true, "temperature": 0});
    let (mut streamed, mut of_stream) = (String::new(), Vec::new());
    for event in server.stream(COMPLETIONS, body.clone()) {
        streamed += event["choices"][0]["text"].as_str().unwrap_or_default();
        let logprobs = &event["choices"][0]["logprobs"];
        if logprobs.is_object() {
            of_stream.extend(numbers(&logprobs["token_logprobs"]));
        }
    }
    let answer = server.ask(COMPLETIONS, &body);
    assert_eq!(
        (&streamed[..], of_stream),
        (
            text(&answer),
            numbers(&answer["choices"][0]["logprobs"]["token_logprobs"])
        )
    );
}

/// Without log-probabilities the text alone is repeated.
#[test]
fn echoed_text() {
    let server = shared();
    let prompt = "Ownership is é";
    let plain = server.ask(
        COMPLETIONS,
        &json!({"prompt": prompt, "max_tokens": 5, "temperature": 0}),
    );
    let body = json!({"prompt": prompt, "max_tokens": 5, "temperature": 0, "echo": true});
    let answer = server.ask(COMPLETIONS, &body);
    assert_eq!(text(&answer), format!("{prompt}{}", text(&plain)));
    let events = server.stream(COMPLETIONS, body);
    let streamed: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(streamed, text(&answer));
    let none = server.ask(
        COMPLETIONS,
        &json!({"prompt": prompt, "max_tokens": 0, "echo": true, "n": 2}),
    );
    assert_eq!(
        none["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|choice| choice["text"].as_str().unwrap())
            .collect::<Vec<_>>(),
        [prompt; 2]
    );
    // What would do nothing here is taken; what would do something is refused.
    server.ask(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 1, "min_tokens": 0, "n_probs": 0, "best_of": 1, "suffix": "",
        "length_penalty": 1.0, "early_stopping": false, "n_keep": 0, "add_special_tokens": true, "continue_final_message": false}));
    for (name, value) in [
        ("min_tokens", json!(2)),
        ("suffix", json!("b")),
        ("length_penalty", json!(2)),
        ("best_of", json!(2)),
        ("n_keep", json!(-1)),
    ] {
        let (status, error) = server.post(
            COMPLETIONS,
            &json!({"prompt": "a", "max_tokens": 1, name: value}),
        );
        assert_eq!(
            (status, &error["error"]["param"]),
            (400, &json!(name)),
            "{error}"
        );
    }
}

/// The last message of the assistant goes on, without the end that the template gives it.
#[test]
fn a_message_that_goes_on() {
    let server = shared();
    let messages = |last: &str| json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": last}]);
    let prompt = |body: Value| {
        let answer = server.ask("/apply-template", &body);
        answer["prompt"].as_str().unwrap().to_owned()
    };
    for last in ["The answer", "The answer is ", "a\nb"] {
        for body in [
            json!({"messages": messages(last), "continue_final_message": true, "add_generation_prompt": false}),
            json!({"messages": messages(last), "continue_final_message": true}),
        ] {
            let prompt = prompt(body);
            assert!(
                prompt.ends_with(last) && prompt.contains("hi"),
                "{prompt:?}"
            );
        }
    }
    assert!(!prompt(json!({"messages": messages("The answer")})).ends_with("The answer"));
    let body = json!({"messages": messages("The answer"), "max_tokens": 8, "continue_final_message": true, "add_generation_prompt": false});
    let answer = server.ask("/v1/chat/completions", &body);
    let rendered =
        prompt(json!({"messages": messages("The answer"), "continue_final_message": true}));
    let plain = server.ask(COMPLETIONS, &json!({"prompt": rendered, "max_tokens": 8}));
    assert_eq!(
        answer["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .trim(),
        text(&plain).trim()
    );
    for (body, param) in [
        (
            json!({"messages": [{"role": "user", "content": "hi"}], "continue_final_message": true}),
            "continue_final_message",
        ),
        (
            json!({"messages": messages("a"), "continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
        ),
    ] {
        let (status, error) = server.post("/v1/chat/completions", &body);
        assert_eq!(
            (status, &error["error"]["param"]),
            (400, &json!(param)),
            "{error}"
        );
    }
}

/// A load generator's wish: the numbers of tokens so far beside every part.
#[test]
fn usage_in_every_part() {
    let server = shared();
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let events = server.stream("/v1/chat/completions", body);
    let mut before = 0;
    for event in &events {
        let usage = &event["usage"];
        let n = usage["completion_tokens"].as_u64().unwrap();
        assert!(n >= before, "{event}");
        before = n;
        assert_eq!(usage["prompt_tokens"], events[0]["usage"]["prompt_tokens"]);
        assert_eq!(
            usage["total_tokens"],
            n + usage["prompt_tokens"].as_u64().unwrap()
        );
    }
    assert_eq!(before, 6);
}

/// What clients of Ollama ask first; and a part that is no text, told in plain words.
#[test]
fn other_words() {
    let server = shared();
    let (status, body) = server.get("/api/tags");
    let list: Value = serde_json::from_str(&body).unwrap();
    let model = &list["models"][0];
    assert_eq!((status, &model["name"]), (200, &model["model"]));
    assert!(
        model["size"].as_u64().unwrap() > 1 << 20
            && model["modified_at"].as_str().unwrap().ends_with('Z'),
        "{model}"
    );
    assert_eq!(
        (
            &model["details"]["format"],
            &model["details"]["quantization_level"]
        ),
        (&json!("gguf"), &json!("Q8_0"))
    );
    let (_, models) = server.get("/v1/models");
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!(models["data"][0]["id"], model["name"]);
    let image = json!([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]);
    let (status, error) = server.post(
        "/v1/chat/completions",
        &json!({"messages": [{"role": "user", "content": image}]}),
    );
    let message = error["error"]["message"].as_str().unwrap();
    assert!(
        status == 400 && message.contains("reads text alone") && message.contains("image_url"),
        "{message}"
    );
    assert!(!message.contains("Some("), "{message}");
}
