//! Vectors and scores are the same over HTTP, in batches and on the command line: where a text
//! ends, its tokens end, too.

use super::{Folder, Server, batch, program, tiny};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

const TEXTS: [&str; 4] = [
    "a",
    "hello world",
    "Once upon a time, there was a little girl named Lily.",
    "naïve, 東京!",
];

fn parsed(text: Result<String, String>) -> Value {
    serde_json::from_str(&text.unwrap()).unwrap()
}

/// The answers to these requests over HTTP, then those in a batch.
fn answers(folder: &Folder, model: &str, requests: &[(&str, Value)]) -> Vec<Vec<Value>> {
    let server = Server::start(&["-m", model]);
    let of_server = requests
        .iter()
        .map(|(path, body)| server.ask(path, body))
        .collect();
    vec![of_server, batch(folder, &["-m", model], requests)]
}

/// The vectors of these texts, which are the same everywhere.
fn vectors(folder: &Folder, model: &str, texts: &[&str]) -> Vec<Value> {
    let file = folder.file("texts.txt", &(texts.join("\n") + "\n"));
    let expected = parsed(program(&[
        "embed",
        "-m",
        model,
        "-f",
        &file,
        "--embd-output-format",
        "array",
    ]));
    let expected = expected.as_array().unwrap();
    assert_eq!(expected.len(), texts.len(), "{model}: a row for each line");
    let requests = [
        ("/v1/embeddings", json!({"input": texts})),
        ("/embeddings", json!({"input": texts})),
        ("/embedding", json!({"content": texts})),
        ("/v1/embeddings", json!({"input": texts[0]})),
        ("/embedding", json!({"content": texts[0]})),
    ];
    for answers in answers(folder, model, &requests) {
        for (answer, (path, body)) in answers.iter().zip(&requests) {
            let found: Vec<&Value> = match answer.get("data").unwrap_or(answer).as_array() {
                Some(list) if answer.is_array() => {
                    list.iter().map(|of| &of["embedding"][0]).collect()
                }
                Some(list) => list.iter().map(|of| &of["embedding"]).collect(),
                None => panic!("{model}, {path}: {answer}"),
            };
            let expected: Vec<&Value> = expected.iter().take(found.len()).collect();
            assert!(
                !found.is_empty() && found == expected,
                "{model}, {path}: {body}"
            );
        }
    }
    expected.clone()
}

/// The scores of these documents, which are the same everywhere, in the same order.
fn scores(folder: &Folder, model: &str, query: &str, documents: &[&str]) {
    let file = folder.file("documents.txt", &(documents.join("\n") + "\n"));
    let expected = parsed(program(&[
        "rerank", "-m", model, "--query", query, "-f", &file, "--json",
    ]));
    let pairs = |list: &Value, score: &str| -> Vec<(Value, Value)> {
        list.as_array()
            .unwrap()
            .iter()
            .map(|of| (of["index"].clone(), of[score].clone()))
            .collect()
    };
    let expected = pairs(&expected, "score");
    assert_eq!(
        expected.len(),
        documents.len(),
        "{model}: a score for each line"
    );
    let body = json!({"query": query, "documents": documents});
    let requests = ["/v1/rerank", "/rerank"].map(|path| (path, body.clone()));
    for answer in answers(folder, model, &requests).into_iter().flatten() {
        assert_eq!(
            pairs(&answer["results"], "relevance_score"),
            expected,
            "{model}"
        );
    }
}

/// Vectors end as the model's file says: with [SEP], with the end-of-sequence token, or with
/// nothing; blank lines have vectors, too.
#[test]
fn vectors_and_scores_are_the_same_everywhere() {
    let folder = Folder::new("tiny");
    let with_blank = [&TEXTS[..], &["", "b"]].concat();
    let mut with_end = tiny::reranker();
    with_end.metadata("tokenizer.ggml.add_eos_token", true);
    let (bert, qwen) = (
        folder.model("bert.gguf", tiny::encoder(false)),
        folder.model("qwen.gguf", with_end),
    );
    let begins_only = folder.model("begins.gguf", tiny::reranker());
    for model in [&bert, &qwen, &begins_only] {
        vectors(&folder, model, &with_blank);
    }
    let tokens = |model: &str| {
        let answer = Server::start(&["-m", model]).ask("/v1/embeddings", &json!({"input": "a"}));
        answer["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens(&bert), 3, "[CLS] a [SEP]");
    assert_eq!(tokens(&qwen), tokens(&begins_only) + 1, "the end");
    let bert_reranker = folder.model("bert-reranker.gguf", tiny::encoder(true));
    for model in [&bert_reranker, &qwen] {
        scores(
            &folder,
            model,
            "hot?",
            &["It rains.", "", "It is hot.", "Cold."],
        );
    }
    // Without any token around a text, a blank one has none: it is named, and not left out.
    let mut bare = tiny::reranker();
    bare.metadata("tokenizer.ggml.add_bos_token", false);
    bare.metadata("tokenizer.ggml.add_space_prefix", false);
    let bare = folder.model("bare.gguf", bare);
    let file = folder.file("texts.txt", "a\n\nb\n");
    let error = program(&["embed", "-m", &bare, "-f", &file]).unwrap_err();
    assert!(
        error.contains("text 2") && error.contains("no tokens"),
        "{error}"
    );
    vectors(&folder, &bare, &TEXTS);
}

/// Each embedding model of the reference data, of which none is a reranker. The vectors of its
/// texts are Hugging Face's, where the file asks for the special tokens that those have (that of
/// Qwen 3 does not).
#[test]
fn vectors_of_reference_models() {
    let Some(root) = std::env::var_os("RUVLLM_CONFORMANCE") else {
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED vectors_of_reference_models: RUVLLM_CONFORMANCE is not set"
        );
        return;
    };
    let (folder, mut n_models, mut n_golden) = (Folder::new("reference"), 0, 0);
    for entry in std::fs::read_dir(Path::new(&root).join("models2")).unwrap() {
        let dir = entry.unwrap().path();
        let Ok(manifest) = std::fs::read(dir.join("manifest.json")) else {
            continue;
        };
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        if manifest["kind"] != "embedding" {
            continue;
        }
        n_models += 1;
        let model = dir.join("model-f16.gguf").to_str().unwrap().to_owned();
        let embedder = ruvllm::Model::open(&model).unwrap().embedder().unwrap();
        let golden = manifest["tests"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|test| {
                let tokens = embedder.tokens(test["text"].as_str()?).unwrap();
                if json!(tokens) != test["tokens"] {
                    return None;
                }
                let bytes = std::fs::read(dir.join(test["embedding_file"].as_str()?)).ok()?;
                let vector = bytes
                    .chunks_exact(4)
                    .map(|x| f32::from_le_bytes(x.try_into().unwrap()));
                Some((test["text"].as_str()?, vector.collect::<Vec<f32>>()))
            });
        let golden: Vec<_> = golden.collect();
        let texts: Vec<&str> = golden.iter().map(|&(text, _)| text).chain(TEXTS).collect();
        let found = vectors(&folder, &model, &texts);
        for ((text, golden), found) in golden.iter().zip(found) {
            n_golden += 1;
            let found = found
                .as_array()
                .unwrap()
                .iter()
                .map(|x| x.as_f64().unwrap() as f32);
            let difference = found
                .zip(golden)
                .map(|(x, y)| (x - y).abs())
                .fold(0.0, f32::max);
            assert!(difference <= 1e-4, "{model}, {text:?}: {difference}");
        }
    }
    assert!(
        n_models >= 7 && n_golden >= 28,
        "{n_models} models, {n_golden} vectors"
    );
}

/// Texts that are too long for the model: refused in words of tokens of the text, or shortened as
/// the request or the server says, so that the special tokens at the ends stay.
#[test]
fn long_texts() {
    let folder = Folder::new("long-texts");
    let model = folder.model("model.gguf", tiny::reranker());
    let texts = ["short", &"long ".repeat(400)];
    let server = Server::start(&["-m", &model, "-c", "64"]);
    let path = "/v1/embeddings";
    let (status, error) = server.post(path, &json!({"input": texts}));
    let message = error["error"]["message"].as_str().unwrap();
    assert!(
        status == 400 && message.contains("text 1") && message.contains("at most 64"),
        "{error}"
    );
    assert_eq!(error["error"]["code"], "context_length_exceeded");
    let vector = |body: &Value| server.ask(path, body)["data"][0]["embedding"].clone();
    let of = |wish: Value| {
        let mut body = json!({"input": texts[1]});
        body.as_object_mut()
            .unwrap()
            .extend(wish.as_object().unwrap().clone());
        body
    };
    let tokens = server.ask(
        "/tokenize",
        &json!({"content": texts[1], "add_special": true}),
    );
    let tokens: Vec<u64> = tokens["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect();
    let n = tokens.len();
    let first = vector(&json!({"input": tokens[..64]}));
    let ends = [&tokens[..1], &tokens[n - 63..]].concat();
    let last = vector(&json!({"input": ends}));
    for wish in [
        json!({"truncate": true}),
        json!({"truncate": "END"}),
        json!({"truncate_prompt_tokens": -1}),
        json!({"truncate_prompt_tokens": 1000}),
        json!({"truncate": true, "truncation_direction": "Right"}),
    ] {
        assert_eq!(vector(&of(wish.clone())), first, "{wish}");
    }
    for wish in [
        json!({"truncate": "START"}),
        json!({"truncate": true, "truncation_direction": "Left"}),
        json!({"truncate_prompt_tokens": 64, "truncation_side": "left"}),
    ] {
        assert_eq!(vector(&of(wish.clone())), last, "{wish}");
    }
    assert_eq!(
        vector(&of(json!({"truncate_prompt_tokens": 9}))),
        vector(&json!({"input": tokens[..9]}))
    );
    for (wish, status) in [
        (json!({"truncate": false}), 400),
        (json!({"truncate": "middle"}), 400),
        (json!({"truncate_prompt_tokens": 0}), 400),
        (json!({"truncate": null, "input": "a"}), 200),
    ] {
        assert_eq!(server.post(path, &of(wish.clone())).0, status, "{wish}");
    }
    let server = Server::start(&["-m", &model, "-c", "64", "--embd-truncate"]);
    assert_eq!(
        server.ask(path, &json!({"input": texts}))["data"][1]["embedding"],
        first
    );
    assert_eq!(server.post(path, &of(json!({"truncate": false}))).0, 400);
}

/// Of a document that is too long, as much is read as fits; the query and what stands around both
/// stay.
#[test]
fn long_documents_are_refused_or_shortened() {
    let folder = Folder::new("long-documents");
    let model = folder.model("model.gguf", tiny::reranker());
    let server = Server::start(&["-m", &model, "-c", "64"]);
    let path = "/v1/rerank";
    let long: String = ('a'..='z')
        .cycle()
        .map(|c| [c, 'é', ' '])
        .take(90)
        .flatten()
        .collect();
    let ask = |document: &str, wish: &Value| {
        let mut body = json!({"query": "hot?", "documents": ["It is.", document]});
        let map = body.as_object_mut().unwrap();
        map.extend(wish.as_object().unwrap().clone());
        server.post(path, &body)
    };
    let score = |answer: &Value| {
        let results = answer["results"].as_array().unwrap();
        let found = results.iter().find(|result| result["index"] == 1);
        (
            found.unwrap()["relevance_score"].clone(),
            answer["usage"].clone(),
        )
    };
    for wish in [json!({}), json!({"truncate": "NONE"})] {
        let (status, error) = ask(&long, &wish);
        let message = error["error"]["message"].as_str().unwrap();
        assert!(
            status == 400 && message.contains("text 1") && message.contains("at most 64"),
            "{error}"
        );
        assert_eq!(error["error"]["code"], "context_length_exceeded");
    }
    // The longest beginning, and the longest end, that the model takes.
    let starts: Vec<usize> = long.char_indices().map(|(at, _)| at).collect();
    let fits = |part: &str| {
        let (status, answer) = ask(part, &json!({}));
        (status == 200).then(|| score(&answer))
    };
    let first = (starts.iter().rev())
        .find_map(|&at| fits(&long[..at]))
        .unwrap();
    let last = starts.iter().find_map(|&at| fits(&long[at..])).unwrap();
    for (wish, expected) in [
        (json!({"truncate": true}), &first),
        (json!({"truncate_prompt_tokens": -1}), &first),
        (json!({"truncate": "START"}), &last),
        (json!({"truncate": true, "truncation_side": "left"}), &last),
    ] {
        let (status, answer) = ask(&long, &wish);
        assert_eq!((status, &score(&answer)), (200, expected), "{wish}");
    }
    let (status, error) = ask(&long, &json!({"truncate": true, "query": "?".repeat(100)}));
    assert_eq!(
        (status, &error["error"]["param"]),
        (400, &json!("query")),
        "{error}"
    );
}
