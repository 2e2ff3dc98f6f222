//! Quality of files: scored tasks, the mix of types for a size, and pictures.

use super::*;

const DEMO: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../models/ruvllm-rust-6m-q8_0.gguf"
);
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-heldout.txt");

/// Mean log-probability of the tokens of a text behind those that all texts begin with, from the
/// library's logits.
fn score(model: &Model, text: &str, common: usize, n_last: usize) -> f64 {
    let tokens = model.tokenizer().unwrap().encode(text, true, false);
    let options = SessionOptions {
        n_ctx: Some(512),
        ..SessionOptions::default()
    };
    let mut session = model.session_with(&options).unwrap();
    let mut sum = 0.0;
    let scored = common..tokens.len() - n_last;
    session
        .hooks()
        .prefill_each(&tokens[..scored.end - 1], scored.start - 1, |i, logits| {
            let all: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
            sum += f64::from(logits[tokens[i + 1] as usize]) - all.ln();
        })
        .unwrap();
    sum / scored.len() as f64
}

/// Tokens that all texts begin with.
fn common(model: &Model, texts: &[String]) -> usize {
    let encode = |text: &String| model.tokenizer().unwrap().encode(text, true, false);
    let all: Vec<Vec<u32>> = texts.iter().map(encode).collect();
    let same = |&i: &usize| all.iter().all(|tokens| tokens.get(i) == all[0].get(i));
    (0..all[0].len()).take_while(same).count()
}

/// The program chooses what the library's logits say.
#[test]
fn tasks() {
    let folder = Folder::new();
    let model = Model::open(DEMO).unwrap();
    let contexts = ["Ownership is", "A slice is", "The borrow checker"];
    let endings = [
        " a rule of the language",
        " made of green cheese",
        " xyzzy plugh",
        " 42",
    ];
    let (mut file, mut right) = (String::new(), 0);
    for (i, context) in contexts.iter().enumerate() {
        file += &format!("{context}\n{i}\n");
        endings
            .iter()
            .for_each(|ending| file += &format!("{ending}\n"));
        let texts = endings.map(|ending| format!("{context} {ending}"));
        let n = common(&model, &texts);
        let scores = texts.map(|text| score(&model, &text, n, 0));
        let best = (0..4)
            .max_by(|&a, &b| scores[a].total_cmp(&scores[b]))
            .unwrap();
        right += usize::from(best == i);
    }
    let path = folder.file("hellaswag.txt", &file);
    let of = |args: &[&str]| run(&[&["perplexity", "-m", DEMO, "-f"], args].concat());
    let found = parsed(&of(&[&path, "--hellaswag", "--json"]));
    assert_eq!(
        (&found["n_tasks"], &found["n_right"]),
        (&json!(3), &json!(right))
    );
    assert_eq!(found["by_chance"], 0.25);
    let told = text(&of(&[&path, "--hellaswag", "--hellaswag-tasks", "2"]));
    assert!(
        told.lines().count() == 3 && told.contains("HellaSwag score (2 tasks)"),
        "{told}"
    );

    // Three tokens and more follow the names, so that these do not count, and neither does the end.
    let sentence = |name: &str| format!("The value moves to {name} when the function returns it.");
    let path = folder.file(
        "winogrande.csv",
        "7,\"The value moves to _ when the function returns it.\",it,Vec,2",
    );
    let encode = |text: &str| model.tokenizer().unwrap().encode(text, true, false).len();
    let scores = ["it", "Vec"].map(|name| {
        let before = encode(&format!("The value moves to {name}"));
        score(&model, &sentence(name), before, 1)
    });
    let found = parsed(&of(&[&path, "--winogrande", "--json"]));
    assert_eq!(found["n_right"], json!(usize::from(scores[1] > scores[0])));

    for (name, content, kind, part) in [
        ("a.txt", "one\n2", "--hellaswag", "six"),
        ("b.csv", "0,a b,c,d,1", "--winogrande", "line 1"),
        ("c.bin", "\u{1}\0\0\0", "--multiple-choice", "ends too soon"),
    ] {
        let path = folder.file(name, content);
        fails(&["perplexity", "-m", DEMO, "-f", &path, kind], 1, &[part]);
    }
}

/// The mix fits, keeps what the user named, and is better than the type that fits as well.
#[test]
fn mixes_for_a_size() {
    let folder = Folder::new();
    let f16 = folder.name("f16.gguf");
    stdout(&run(&["quantize", DEMO, &f16, "F16"]));
    let input = folder.file("text.txt", &std::fs::read_to_string(TEXT).unwrap()[..9000]);
    let (out, flags) = (folder.name("out.gguf"), folder.name("flags.txt"));
    let quantize = |args: &[&str]| run(&[&["quantize", &f16], args].concat());
    let of_size = |size: &str| {
        quantize(&[
            &out,
            "Q4_K_M",
            "--target-size",
            size,
            "--target-text",
            &input,
            "--target-flags",
            &flags,
            "--tensor-type",
            "ffn_up=Q8_0",
            "--overwrite",
            "-t",
            "1",
        ])
    };
    let made = of_size("4200000");
    assert!(made.status.success(), "{}", stderr(&made));
    let file = Gguf::open(&out).unwrap();
    assert!(
        file.file_size() <= 4_200_000 && file.file_size() > 3_800_000,
        "{}",
        file.file_size()
    );
    assert!(stderr(&made).contains("measured"), "{}", stderr(&made));
    assert!(!std::fs::exists(format!("{out}.logits")).unwrap());
    let lines = std::fs::read_to_string(&flags).unwrap();
    assert!(
        lines.lines().count() > 5 && lines.contains("attn_q"),
        "{lines}"
    );
    let small = of_size("1000");
    assert!(
        stderr(&small).contains("the smallest file is"),
        "{}",
        stderr(&small)
    );
    assert_eq!(small.status.code(), Some(2));
}

/// A text on which columns make up for others' errors: the same size, less divergence on another
/// text, and the same bits on any number of threads.
#[test]
fn feedback_from_a_text() {
    let folder = Folder::new();
    let all = std::fs::read_to_string(TEXT).unwrap();
    let shown = folder.file("shown.txt", &all[..20_000]);
    let held_out = folder.file("held-out.txt", &all[all.len() - 6_000..]);
    let (f16, base) = (folder.name("f16.gguf"), folder.name("base.bin"));
    stdout(&run(&["quantize", DEMO, &f16, "F16"]));
    let perplexity = |model: &str, args: &[&str]| {
        let common = ["perplexity", "-m", model, "--kl-divergence-base", &base];
        run(&[&common[..], args].concat())
    };
    stdout(&perplexity(&f16, &["-f", &held_out, "-c", "128"]));
    let quantized = |name: &str, args: &[&str]| {
        let out = folder.name(name);
        let made = run(&[&["quantize", &f16, &out, "Q4_0", "-v"], args].concat());
        assert!(made.status.success(), "{}", stderr(&made));
        let found = parsed(&perplexity(&out, &["--kl-divergence", "--json"]));
        let divergence = found["kl"].as_f64().unwrap();
        (std::fs::read(out).unwrap(), divergence, stderr(&made))
    };
    let (plain, before, _) = quantized("plain.gguf", &[]);
    let (bytes, after, told) = quantized("fed.gguf", &["--feedback-text", &shown, "-t", "2"]);
    assert_eq!(bytes.len(), plain.len());
    // 0.61 on more of the text.
    assert!(after < 0.8 * before, "{after} of {before}");
    assert!(told.contains("Q4_0, with feedback"), "{told}");
    let (again, _, _) = quantized("again.gguf", &["--feedback-text", &shown, "-t", "1"]);
    assert!(again == bytes, "threads changed bits");

    let short = folder.file("short.txt", "It is short.");
    let out = folder.name("short.gguf");
    fails(
        &["quantize", &f16, &out, "Q4_0", "--feedback-text", &short],
        1,
        &["tokens", "are needed"],
    );
    assert!(!std::fs::exists(&out).unwrap());
}

/// Speed by depth, and memory by context.
#[test]
fn pictures_of_speed_and_memory() {
    let folder = Folder::new();
    let (model, to) = (tiny(&folder), folder.name("to.svg"));
    let drawn = |args: &[&str]| {
        text(&run(&[args, &["--svg", &to]].concat()));
        let svg = std::fs::read_to_string(&to).unwrap();
        std::fs::remove_file(&to).unwrap();
        svg
    };
    let bench = ["bench", "-m", &model, "-t", "1", "-r", "1"];
    let speed = drawn(&[&bench[..], &["-p", "8", "-n", "4", "-d", "0,16"]].concat());
    for part in [
        ">tiny.gguf, 1 threads<",
        ">pp8<",
        ">tg4<",
        ">tokens per second<",
    ] {
        assert!(speed.contains(part), "{part}: {speed}");
    }
    let memory = drawn(&["inspect", &model]);
    for part in [
        ">KV cache in f16<",
        ">KV cache in q4_0<",
        ">context, tokens<",
    ] {
        assert!(memory.contains(part), "{part}: {memory}");
    }
    fails(
        &["bench", "-m", &model, "--scenario", "chat", "--svg", &to],
        2,
        &["cannot be used with"],
    );
    fails(
        &["inspect", &model, "--svg", &folder.name("no/such")],
        1,
        &["no/such"],
    );
}
